"""The suite notices a command that misbehaves: each invariant is broken here on purpose."""

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chaos import commands
from chaos.commands import Ended, server
from chaos.comparison import prepared_differs, run_differs
from chaos.experiments.company import _holds_lock
from chaos.experiments.system_calls import EXPERIMENT as SYSTEM_CALLS
from chaos.invariants import FINISHED, KILLED, MISTAKE, ends_well
from chaos.shim.plan import NoCompiler, library
from chaos.subjects import PREPARATIONS, Reference
from fastcssl.runs.checkpoint import Checkpoints

_WELL = Ended(("fastcssl-train",), 0, "done\n", "", 1.0, 300.0, 3, 9, ())
_TRACE = 'Traceback (most recent call last):\n  File "/x/fastcssl/y.py", line 3, in z\n    a\nOSError: full\n'


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    try:
        library()
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"status": None}, "did not end within"),
        ({"status": -signal.SIGSEGV}, "status -11, not 0 or 2"),
        ({"status": 1, "stderr": _TRACE}, 'OSError: full (File "/x/fastcssl/y.py", line 3, in z)'),
        ({"stdout": _TRACE}, "printed a traceback"),
        ({"status": 2, "stderr": "usage"}, "without a sentence"),
        ({"left": ("python -c pass",)}, "left processes behind: python -c pass"),
        ({"peak_mb": 3000.0}, "3000 MB of memory"),
        ({"num_threads": 40}, "40 threads"),
        ({"num_files": 400}, "400 open files"),
    ],
)
def test_a_command_that_ends_badly_is_reported(changes: dict[str, object], says: str) -> None:
    reference = Reference(Path(), {}, 1.0, peak_mb=300.0, num_threads=3, num_files=9)
    assert ends_well(_WELL, (FINISHED, MISTAKE), reference) == []
    broken = ends_well(replace(_WELL, **changes), (FINISHED, MISTAKE), reference)  # type: ignore[arg-type]
    assert any(says in sentence for sentence in broken), broken


def _prepared(root: Path) -> Path:
    (root / "task-00").mkdir(parents=True)
    (root / "task-00" / "train.npy").write_bytes(bytes(1000))
    (root / "manifest.json").write_text("{}")
    return root


@pytest.mark.parametrize(
    ("alter", "says"),
    [
        (lambda root: (root / "task-00/train.npy").write_bytes(bytes(999) + b"\x01"), "files differ"),
        (lambda root: (root / "manifest.json").unlink(), "files are missing: manifest.json"),
        (lambda root: (root / "task-00/train.npy.part").touch(), "files are left over: task-00/train.npy.part"),
    ],
)
def test_a_prepared_folder_that_differs_is_reported(alter: Callable[[Path], object], says: str, tmp_path: Path) -> None:
    reference, made = _prepared(tmp_path / "a"), _prepared(tmp_path / "b")
    assert prepared_differs(reference, made) == []
    alter(made)
    assert any(says in sentence for sentence in prepared_differs(reference, made))


def _trained(root: Path, *, weight: float = 1.0, loss: float = 2.0, seconds: float = 3.0, rolling: int = 2) -> Path:
    saved = Checkpoints(root / "checkpoints", keep=9)
    state = {"weights": torch.tensor([weight, 0.5]), "stages": {"wait": seconds}}
    saved.task_end(0, 4, state)
    for step in range(rolling):
        saved.save(step, state, wait=True)
    line = {"kind": "step", "step": 1, "loss": loss, "images_per_s": seconds}
    event = {"kind": "event", "what": "resume", "at": seconds}
    (root / "metrics.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(event) + "\n")
    (root / "status.json").write_text(json.dumps({"state": "finished", "updated": seconds, "pid": int(seconds)}))
    return root


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seconds": 4.0}, None),  # clocks and process numbers
        ({"rolling": 1}, None),  # a periodic checkpoint that did not fit
        ({"rolling": 3}, "3 rolling checkpoints"),
        ({"weight": 1.0000001}, "checkpoints/task-0.pt (at weights)"),
        ({"loss": 2.0000001}, "metrics.jsonl (at 0.loss)"),
    ],
)
def test_a_run_that_differs_is_reported(changes: dict[str, float], says: str | None, tmp_path: Path) -> None:
    reference, made = _trained(tmp_path / "a" / "out"), _trained(tmp_path / "b" / "out", **changes)  # type: ignore[arg-type]
    broken = run_differs(reference, made)
    assert broken == [] if says is None else any(says in sentence for sentence in broken), broken


def test_a_difference_reaches_the_outcome(tmp_path: Path) -> None:
    SYSTEM_CALLS.prepare(tmp_path / "references" / "system_calls")
    bench = SYSTEM_CALLS.bench()
    fault = next(fault for fault in SYSTEM_CALLS.faults(0) if fault.kind == "killed at a write")
    table = bench.reference(PREPARATIONS[0]).out / "samples.npy"
    table.write_bytes(table.read_bytes()[:-1] + b"\x7f")  # as if the build after the kill had written another byte
    outcome = SYSTEM_CALLS.inject(fault, tmp_path / "references" / "system_calls", tmp_path)
    assert outcome.injected
    assert outcome.broken == ("files differ from the uninterrupted ones: samples.npy",)


def test_the_server_reports_how_a_command_ended(tmp_path: Path) -> None:
    assert server().run(["fastcssl-prep", "--help"], tmp_path).status == FINISHED
    wrong = server().run(["fastcssl-prep", "verify", "nowhere"], tmp_path)
    assert (wrong.status, "nowhere" in wrong.stderr) == (MISTAKE, True)
    killed = server().start(["fastcssl-prep", "--help"], tmp_path)
    killed.send(signal.SIGKILL)
    assert killed.wait().status == KILLED
    stopped = server().start(["fastcssl-report", "--help"], tmp_path)
    stopped.send(signal.SIGSTOP)
    hung = stopped.wait(deadline_s=0.3)
    assert hung.status is None
    assert hung.peak_mb > 0 and hung.num_threads > 0


def test_processes_that_are_left_behind_are_found() -> None:
    leader = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        while not (found := commands._session(leader.pid)):
            time.sleep(0.01)
        assert list(found) == [leader.pid]
    finally:
        leader.kill()
        leader.wait()
    assert commands._session(leader.pid) == {}


def test_a_lock_that_is_held_is_seen(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with lock.open("w") as file:
        assert not _holds_lock(os.getpid(), lock)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert _holds_lock(os.getpid(), lock)
        assert not _holds_lock(os.getppid(), lock)
    assert not _holds_lock(os.getpid(), lock)
