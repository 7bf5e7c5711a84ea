"""Checkpoints: bit-exact, taken while the training goes on, whole whatever happens to the process or the disk."""

import errno
import os
import pickle
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastcssl.runs import changed_settings, checkpoint
from fastcssl.runs.checkpoint import CheckpointError, Checkpoints, SavedState, TornError, latest, load


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def state_of(step: int, num_floats: int = 1000) -> SavedState:
    return {"step": step, "weights": torch.full((num_floats,), float(step))}


def same(a: Any, b: Any) -> bool:
    """The same types and the same bits, strides included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        return alike and torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def file_limit() -> Iterator[Any]:
    """Lets no file of this process grow beyond so many bytes: as a full disk would, the kernel refuses the write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes or soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def train(state: SavedState | None, until: int) -> SavedState:
    """All that a resumed run has to carry on: momentum, and a generator in use. Bits do not depend on threads."""
    if state is None:
        torch.manual_seed(1)
        state = {"weight": torch.ones(64, 64), "momentum": torch.zeros(64, 64), "step": 0}
    for _ in range(state["step"], until):
        noise = nn.functional.dropout(torch.randn(64, 64))
        state["momentum"].mul_(0.9).add_(noise * state["weight"])
        state["weight"].sub_(state["momentum"], alpha=0.1)
    return {**state, "step": until, "rng": torch.get_rng_state()}


def killed_in_a_write(folder: str) -> None:
    """What the child of the next test runs: checkpoints at steps 3 and 6; it gets stuck inside the second."""
    write, written = checkpoint._DigestingFile.write, []

    def write_half(self: Any, data: bytes) -> int:
        written.append(len(data))
        if sum(written) > 10_000:
            self._file.flush()
            os.write(1, b"in the middle\n")
            threading.Event().wait()
        return write(self, data)

    checkpoints = Checkpoints(folder)
    state = train(None, 3)
    checkpoints.save(3, state, wait=True)
    state = train(state, 6)
    checkpoint._DigestingFile.write = write_half  # type: ignore[method-assign]
    checkpoints.save(6, state)
    train(state, 8)
    threading.Event().wait()


def test_killed_inside_a_write_it_goes_on_bit_identically(folder: Path) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_checkpoint as t; t.killed_in_a_write(sys.argv[2])"
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None and child.stdout.readline() == "in the middle\n"
        child.kill()
    partial = f"step-00000006.pt.{child.pid}.partial"
    assert names(folder) == ["step-00000003.pt", partial] and (folder / partial).stat().st_size > 0

    found = latest(folder)
    assert found is not None and found.step == 3 and not found.warnings
    expected = train(None, 9)
    torch.set_rng_state(found.state["rng"])
    resumed = train(found.state, 9)
    assert same(resumed, expected)
    Checkpoints(folder).save(9, resumed, wait=True)
    assert names(folder) == ["step-00000003.pt", "step-00000009.pt"], "the leftover of the dead process stays"


def test_the_partial_file_of_a_living_process_is_left_alone(folder: Path) -> None:
    checkpoints = Checkpoints(folder)
    theirs = folder / f"step-00000001.pt.{os.getppid()}.partial"
    earlier = folder / f"step-00000001.pt.{os.getpid()}.partial"  # of a process that had our number
    theirs.touch(), earlier.touch()
    checkpoints.save(2, state_of(2), wait=True)
    assert names(folder) == sorted([theirs.name, "step-00000002.pt"])


def test_everything_comes_back_with_the_same_bits(folder: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(5, 8)).square().sum().backward()
    optimizer.step()
    state = {
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "types": [torch.randn(3, 5).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)],
        "odd": [torch.tensor([float("nan"), -0.0, float("inf")]), None, torch.empty(0), {}, (), "größer"],
        "integers": [torch.arange(5), torch.tensor(7), torch.tensor([True, False]), -(2**63), 2**70, 5, True],
        "channels_last": torch.randn(4, 8, 5, 5).to(memory_format=torch.channels_last),
        "floats": [0.1, float("inf"), float("nan"), 5e-324],
        "parameter": nn.Parameter(torch.ones(2)),
        7: "an integer key",
    }
    expected = {**state, "parameter": torch.ones(2), "net": dict(state["net"])}
    Checkpoints(folder).save(1, state, wait=True)
    assert same(load(folder / "step-00000001.pt"), expected)


def test_a_view_is_saved_without_the_rest_of_its_storage(folder: Path) -> None:
    Checkpoints(folder).save(1, {"row": torch.randn(1000, 1000)[5]}, wait=True)
    assert (folder / "step-00000001.pt").stat().st_size < 20_000


def test_training_may_go_on_while_the_write_is_under_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), checkpoint._write_file
    monkeypatch.setattr(checkpoint, "_write_file", lambda *args: (gate.wait(60), write(*args)))
    weights, inner = torch.ones(1000), [torch.zeros(3)]
    checkpoints = Checkpoints(folder)
    stall = checkpoints.save(1, {"weights": weights, "inner": inner})
    assert stall > 0 and names(folder) == []
    weights.fill_(2)
    inner[0].fill_(9)
    inner.append(torch.ones(1))
    gate.set()
    checkpoints.wait()
    assert same(load(folder / "step-00000001.pt"), {"weights": torch.ones(1000), "inner": [torch.zeros(3)]})


def test_the_stall_counts_the_wait_for_the_write_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write, now = threading.Event(), checkpoint._write_file, [100.0]

    def slow(*args: Any) -> None:
        gate.wait(60)
        now[0] += 5.0
        write(*args)

    class Waiting(Checkpoints):
        def wait(self) -> None:
            if self._thread is not None:
                gate.set()
            super().wait()

    monkeypatch.setattr(checkpoint, "_write_file", slow)
    monkeypatch.setattr(checkpoint.time, "perf_counter", lambda: now[0])
    checkpoints = Waiting(folder)
    assert checkpoints.save(1, state_of(1)) == 0
    assert checkpoints.save(2, state_of(2)) >= 5
    checkpoints.wait()
    assert names(folder) == ["step-00000001.pt", "step-00000002.pt"]


def test_retention(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, write = [], checkpoint._write_file
    monkeypatch.setattr(checkpoint, "_write_file", lambda *args: (write(*args), seen.append(names(folder))))
    checkpoints = Checkpoints(folder, keep=2)
    checkpoints.failed(1, state_of(1))
    for step in (8, 9, 10):
        checkpoints.save(step, state_of(step), wait=True)
    assert names(folder) == ["failed-step-00000001.pt", "step-00000009.pt", "step-00000010.pt"]
    assert {"step-00000008.pt", "step-00000010.pt"} <= set(seen[3]), "the oldest went before the new one was in place"
    checkpoints.task_end(0, 11, state_of(11))
    for step in (99_999_999, 100_000_000, 100_000_001):  # beyond the digits that names are padded to
        checkpoints.save(step, state_of(step))
    checkpoints.wait()
    assert names(folder) == ["failed-step-00000001.pt", "step-100000000.pt", "step-100000001.pt", "task-0.pt"]
    Checkpoints(folder, keep=1).save(5, state_of(5), wait=True)  # a run that had to go back keeps what it writes
    assert "step-00000005.pt" in names(folder) and "step-100000000.pt" in names(folder)
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpoints(folder, keep=0)


def test_the_latest_is_by_step_and_never_a_failed_one(folder: Path) -> None:
    assert latest(folder) is None
    checkpoints = Checkpoints(folder, keep=9)
    checkpoints.failed(50, state_of(50))
    assert latest(folder) is None
    for task, step in ((1, 40), (0, 20)):
        checkpoints.task_end(task, step, state_of(step))
    checkpoints.save(30, state_of(30))
    checkpoints.save(40, state_of(-1), wait=True)
    assert (found := latest(folder)) is not None
    assert (found.path, found.step, found.state["step"]) == (folder / "task-1.pt", 40, 40)
    checkpoints.save(41, state_of(41), wait=True)
    assert (found := latest(folder)) is not None and found.step == found.state["step"] == 41
    assert load(folder / "failed-step-00000050.pt")["step"] == 50


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


DAMAGES = {
    "empty": lambda content: content[:0],
    "zeros": lambda content: bytes(len(content)),
    "half": lambda content: content[: len(content) // 2],
    "short by a byte": lambda content: content[:-1],
    "long by a byte": lambda content: content + bytes(1),
    "without its beginning": lambda content: content[1:],
    "without the footer": lambda content: content[:-64],
    "a bit of a tensor": lambda content: flipped(content, content.index(b"\x00\x00\x00\x40" * 8)),  # 2.0
    "a bit of the step": lambda content: flipped(content, len(content) - 52),
    "a bit of the version": lambda content: flipped(content, len(content) - 56),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_file_is_passed_over(folder: Path, damage: Any) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state_of(1))
    checkpoints.save(2, state_of(2), wait=True)
    path = folder / "step-00000002.pt"
    path.write_bytes(damage(path.read_bytes()))
    found = latest(folder)
    assert found is not None and found.step == 1 and same(found.state, state_of(1))
    assert len(found.warnings) == 1 and str(path) in found.warnings[0] and "is damaged: " in found.warnings[0]
    says = "bytes, not" if damage is DAMAGES["without its beginning"] else "is damaged: "
    with pytest.raises(TornError, match=says):
        load(path)
    (folder / "step-00000001.pt").unlink()
    with pytest.raises(CheckpointError, match=r"All checkpoints in .* are damaged.*--resume never"):
        latest(folder)


def test_a_full_disk_leaves_the_previous_one_whole(folder: Path, file_limit: Any) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state_of(1), wait=True)
    file_limit(1_000_000)
    checkpoints.save(2, state_of(2, 1_000_000))
    checkpoints.wait()
    error = checkpoints.check()
    assert checkpoints.check() is None, "told once"
    reason = os.strerror(errno.EFBIG)
    for words in (
        f"step-00000002.pt could not be written to {folder}: {reason}",
        "4.0 MB",
        "step-00000001.pt is still",
    ):
        assert words in str(error)
    assert names(folder) == ["step-00000001.pt"]

    checkpoints.save(3, state_of(3, 1_000_000))  # the run goes on, and this one is waited for by the next
    with pytest.raises(CheckpointError, match=r"task-0\.pt could not be written"):
        checkpoints.task_end(0, 4, state_of(4, 1_000_000))
    with pytest.raises(CheckpointError, match="step-00000005"):
        checkpoints.save(5, state_of(5, 1_000_000), wait=True)
    checkpoints.save(6, state_of(6, 1_000_000))
    checkpoints.wait()
    assert "step-00000006" in str(checkpoints.check()) and checkpoints.check() is None
    assert names(folder) == ["step-00000001.pt"] and same(load(folder / "step-00000001.pt"), state_of(1))

    checkpoints.save(7, state_of(7, 1_000_000))
    checkpoints.wait()
    file_limit(None)  # there is space again
    checkpoints.task_end(0, 8, state_of(8, 1_000_000))
    checkpoints.wait()
    assert names(folder) == ["step-00000001.pt", "task-0.pt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_no_space_at_the_end_of_a_write(folder: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state_of(1), wait=True)
    monkeypatch.setattr(os, call, full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*step-00000001\.pt is still intact"):
        checkpoints.save(2, state_of(2), wait=True)
    assert names(folder) == ["step-00000001.pt"]


def test_a_folder_that_is_gone_is_a_sentence(folder: Path) -> None:
    checkpoints = Checkpoints(folder)
    folder.rmdir()
    with pytest.raises(CheckpointError, match=r"No such file or directory.*there is no earlier checkpoint"):
        checkpoints.save(1, state_of(1), wait=True)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["FASTCSSL_TEST_EVIL"],)


def test_code_is_never_unpickled(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCSSL_TEST_EVIL", str(tmp_path / "executed"))
    Checkpoints(folder).save(1, state_of(1), wait=True)
    checkpoint._write_file(
        folder / "step-00000002.pt", 2, {"x": Evil()}, lambda: None
    )  # a right checksum, no good intent
    for read in (lambda: load(folder / "step-00000002.pt"), lambda: latest(folder)):
        with pytest.raises(CheckpointError, match=r"step-00000002\.pt holds something other than tensors"):
            read()
    (folder / "step-00000003.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(TornError, match="closing mark"):
        load(folder / "step-00000003.pt")
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(Evil()))
    assert (tmp_path / "executed").exists(), "the test's pickle does nothing"


def test_another_format_version_is_refused_not_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state_of(1), wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_FORMAT_VERSION", 9)
        checkpoints.save(2, state_of(2), wait=True)
    with pytest.raises(CheckpointError, match=r"step-00000002\.pt has format version 9, this fastcssl reads 1"):
        latest(folder)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"optimizer": {"state": {3: {"x": Evil()}}}}, r"^optimizer\.state\.3\.x is a Evil;"),
        ({"lr": [0.1, np.float64(0.1)]}, r"^lr\.1 is a float64;"),
        ({"a": os.terminal_size((1, 2))}, "^a is a terminal_size;"),
        ({"a": {"b": {(1, 2): 3}}}, r"^a\.b has the key \(1, 2\);"),
        ({"a": torch.eye(2).to_sparse()}, r"^a is a Tensor \(torch.sparse_coo\);"),
        ({"a": torch.float32}, "^a is a dtype;"),
    ],
)
def test_what_could_not_be_read_again_is_refused_by_its_path(folder: Path, state: SavedState, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        Checkpoints(folder).save(1, state)
    assert names(folder) == []


def test_differences() -> None:
    saved = {
        "optim": {"lr": 0.6, "betas": (0.9, 0.95), "gone": 1},
        "views": [{"size": 224}],
        "flag": True,
        "x": {"y": 1},
    }
    optim = {"lr": 0.6, "betas": [0.9, 0.95], "gone": 1.0}
    same_again = {"optim": optim, "views": ({"size": 224},), "flag": True, "x": {"y": 1}}
    assert changed_settings.differences(saved, same_again) == []
    assert changed_settings.differences({"a": float("nan")}, {"a": float("nan")}) == []
    changed = {"optim": {"lr": 0.3, "betas": (0.9, 0.99), "new": "a"}, "views": [{"size": 96}], "flag": 1, "x": 5}
    assert changed_settings.differences(saved, changed) == [
        "optim.lr: 0.6 in the checkpoint, 0.3 now",
        "optim.betas: (0.9, 0.95) in the checkpoint, (0.9, 0.99) now",
        "optim.gone: 1 in the checkpoint, not set now",
        "views.0.size: 224 in the checkpoint, 96 now",
        "flag: True in the checkpoint, 1 now",
        "x.y: 1 in the checkpoint, not set now",
        "optim.new: not in the checkpoint, 'a' now",
        "x: not in the checkpoint, 5 now",
    ]
    changed_settings.refuse_changed(saved, same_again, Path("step-1.pt"))
    with pytest.raises(CheckpointError) as refused:
        changed_settings.refuse_changed(saved, changed, Path("run/step-1.pt"))
    for words in ("run/step-1.pt", "optim.lr: 0.6", "optim.new", "flag", "--out", "--resume never", "the same values"):
        assert words in str(refused.value)
