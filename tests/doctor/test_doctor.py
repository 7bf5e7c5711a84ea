"""fastcssl-doctor on a machine as it should be, and on broken ones: each fault is a sentence with a remedy."""

import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastcssl import ops
from fastcssl.cli import doctor
from fastcssl.doctor import (
    Finding,
    Section,
    build,
    checks,
    failed,
    gpus,
    machine,
    operators,
    packages,
    peers,
    run_checks,
    suite,
)
from fastcssl.doctor import timings as timing

Usage = namedtuple("Usage", "total used free")


def run(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "fastcssl.cli.doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **env})


def only(found: Finding | Iterable[Finding]) -> Finding:
    (finding,) = [found] if isinstance(found, Finding) else list(found)
    return finding


def script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


# ---- The command -----------------------------------------------------------------------------------------------------


def test_all_is_well_here(tmp_path: Path) -> None:
    (tmp_path / "shard.tar").write_bytes(bytes(3_000_000))
    done = run("--json", "--data", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["well"] and found["gpu"] == torch.cuda.is_available()
    by_name = {each["name"]: each for section in found["sections"] for each in section["findings"]}
    for name in ("processor", "open files", "shared memory", "disk", "codec", "engine", "operators", "needed", "NCCL"):
        assert by_name[name]["status"] in ("ok", "note"), by_name[name]
    for name in ("loss, float32 banks", "loss, float16 banks", "loss, bfloat16 banks", "enqueue", "photometry"):
        assert by_name[name]["status"] == "ok", by_name[name]
    assert "MB/s" in by_name["disk"]["text"] and "(3 MB" in by_name["disk"]["text"]
    for name in ("FFCV", "DALI", "apex", "CUDA build"):  # absent ones say what to do
        assert by_name[name]["status"] == "ok" or by_name[name]["remedy"], by_name[name]


def test_a_library_that_does_not_load(tmp_path: Path) -> None:
    broken = tmp_path / "_ops.so"
    broken.write_bytes(b"no library")
    for path, says in ((broken, "does not load"), (tmp_path / "nothing.so", "which is not a file")):
        done = run(FASTCSSL_OPS_LIBRARY=str(path))
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert says in " ".join(done.stdout.split()) and "→ Reinstall with a C++ compiler" in done.stdout
        assert "1 failed: operators." in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 110


def test_exit_status_and_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good = Section("Good", (Finding("a", "ok", "fine"), Finding("b", "note", "absent", "get it")))
    bad = Section("Bad", (failed("c", "it is broken", "mend it"),))
    for sections, status, says in (
        ((good,), 0, "No problems found. 1 check passed, 1 note."),
        ((good, bad), 1, "1 failed: c."),
    ):
        made = [("x", lambda s=s: s) for s in sections]
        monkeypatch.setattr(checks, "checks", lambda *_, made=made, **__: iter(made))
        assert doctor.main([]) == status
        out = capsys.readouterr().out
        assert says in out and "→ get it" in out
        assert doctor.main(["--json"]) == status
        assert json.loads(capsys.readouterr().out)["well"] == (status == 0)


def test_a_look_that_raises_is_a_failure_of_its_object() -> None:
    def broken() -> Finding:
        raise RuntimeError("first line\nsecond line")

    section = run_checks("Things", [("thing", broken), ("other", lambda: Finding("other", "ok", ""))])
    assert [finding.status for finding in section.findings] == ["failed", "ok"]
    assert section.findings[0].text == "this check raised RuntimeError: first line"
    with pytest.raises(ValueError, match="has no remedy"):
        Finding("thing", "failed", "broken")


# ---- The machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "status", "remedy"),
    [((256, 8192), "note", "ulimit -n 4096"), ((256, 1024), "note", "limits.conf"), ((4096, 4096), "ok", "")],
)
def test_open_files(limits: tuple[int, int], status: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    found = machine.open_files()
    assert found.status == status and remedy in found.remedy and f"{limits[0]:,}" in found.text


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "no /nowhere" in machine.shared_memory("/nowhere").text
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(64 << 20, 0, 64 << 20))  # Docker's default
    found = machine.shared_memory(str(tmp_path))
    assert found.status == "note" and "0.07 GB" in found.text and "--shm-size" in found.remedy


def test_memory_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": ["MemTotal:       16000000 kB", "MemAvailable:    9000000 kB"],
        "/sys/fs/cgroup/memory.max": ["2000000000"],
        "/proc/cpuinfo": ["model name : Some CPU", "flags : sse2"],
    }
    monkeypatch.setattr(machine, "_lines", lambda path: files.get(path, []))
    found = machine.memory()
    assert found.status == "note" and "9.0 of 16.0 GB" in found.text and "2.0 GB allowed" in found.text
    assert machine.processor().status == "note" and "Some CPU" in machine.processor().text
    files["/sys/fs/cgroup/memory.max"], files["/proc/cpuinfo"][1] = ["max"], "flags : avx2 avx512f"
    assert machine.memory().status == "ok" and machine.processor().text.endswith("AVX2, AVX-512")
    files.clear()
    assert machine.memory().status == "note" and machine.processor().status == "ok"


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist" in machine.disk(tmp_path / "nothing").text
    assert machine.disk(tmp_path).status == "failed"
    for number in range(3):
        (tmp_path / f"{number}.tar").write_bytes(bytes(1_000_000 * (number + 1)))
    monkeypatch.setattr(machine, "READ_BYTES", 4_000_000)
    assert "(4 MB sequentially)" in machine.disk(tmp_path).text  # the largest first, no more than asked for
    monkeypatch.setattr(machine, "_read", lambda _, most: (most, 1.0, False))
    found = machine.disk(tmp_path / "0.tar")
    assert found.status == "note" and "4 MB/s" in found.text and "from memory" in found.text and found.remedy


# ---- The build -------------------------------------------------------------------------------------------------------


def test_missing_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_import", lambda name: f"No module named {name!r}")
    for found in (build.codec(), build.engine()):
        assert found.status == "failed" and "does not load: No module" in found.text and "libjpeg-dev" in found.remedy
    monkeypatch.setattr(ops, "_PATH", None)
    found = build.operators()
    assert found.status == "failed" and "without its compiled operators" in found.text and found.remedy
    (found,) = operators.operators("cpu").findings
    assert found.status == "note" and found.text.startswith("not checked")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = build.compiler()
    assert found.status == "note" and "no C++ compiler" in found.text and "g++" in found.remedy


def test_cuda_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"built": False, "toolkit": "", "architectures": "", "num_devices": 0, "problem": ""}
    monkeypatch.setattr(build, "_import", lambda _: SimpleNamespace(cuda_status=lambda: status))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert only(build.cuda_build()).status == "note"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = only(build.cuda_build())
    assert found.status == "failed" and "FASTCSSL_CUDA=1" in found.remedy
    status.update(built=True, toolkit="12.8", architectures="sm_80;sm_90;compute_90")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    built, versions = build.cuda_build()
    assert (
        "sm_80, sm_90 and PTX for compute_90 and later" in built.text
        and versions.status == "note"
        and "CUDA 13" in versions.remedy
    )


# ---- Packages --------------------------------------------------------------------------------------------------------


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("tyro", "pillow"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = packages.needed()
    assert (
        found.status == "failed" and found.text == "pillow, tyro not installed" and found.remedy.endswith("pillow tyro")
    )
    absent = packages.Optional("Thing", "no-such-thing", "no_such.thing", "--loader thing", "pip install thing")
    found = packages.optional(absent)
    assert found.status == "note" and "needed for --loader thing" in found.text and "pip install thing" in found.remedy


def test_a_package_that_takes_the_interpreter_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_thing.py").write_text("import os; os.abort()")
    (tmp_path / "unfit_thing.py").write_text("raise ImportError('libsomething.so.4: cannot open')")
    for module, says in (("broken_thing", "status -6"), ("unfit_thing", "libsomething.so.4")):
        found = packages.optional(packages.Optional("Thing", "no-such-thing", module, "", "pip install thing", True))
        assert found.status == "failed" and says in found.text and "Reinstall it" in found.remedy


def test_the_other_apex(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "apex.py").write_text("")
    found = packages.apex()
    assert found.status == "failed" and "pip uninstall apex" in found.remedy
    sys.modules.pop("apex", None)


def test_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert packages.nccl().status == "note" and "gloo" in packages.nccl().text


# ---- Cards -----------------------------------------------------------------------------------------------------------


def cards(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int], built: list[str]) -> list[Finding]:
    about = [SimpleNamespace(name="Card", major=a, minor=b, total_memory=24e9) for a, b in capabilities]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(about))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: about[number])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    monkeypatch.setattr(ops, "_ARCHITECTURES", tuple(built))
    return list(gpus.every_card())


def test_cards_and_what_was_built_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    built = ["sm_80", "sm_90", "compute_90"]
    found = cards(monkeypatch, (8, 6), (9, 0), (7, 5), (12, 0), built=built)
    assert [each.status for each in found] == ["ok", "ok", "note", "ok", "note"]  # 8.6 runs 8.0's code, 12.0 the PTX
    assert "plain torch runs in place" in found[2].text and "8.0" in found[2].remedy and "6 pairs" in found[4].text
    (only_newer,) = cards(monkeypatch, (8, 0), built=["sm_86", "sm_90", "compute_90"])
    assert only_newer.status == "failed" and "sm_86, sm_90, compute_90 only" in only_newer.text
    assert "TORCH_CUDA_ARCH_LIST='8.0'" in only_newer.remedy
    # An older major version's machine code does not run, and of PTX there is that of 12.0 alone.
    (other_major,) = cards(monkeypatch, (9, 0), built=["sm_80", "sm_120", "compute_120"])
    assert other_major.status == "failed" and "TORCH_CUDA_ARCH_LIST='9.0'" in other_major.remedy


def test_a_card_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    script(tmp_path, "nvidia-smi", "echo 'GPU 0: Card (UUID: x)'")
    found = only(gpus.every_card())
    assert found.status == "failed" and "driver for CUDA 13.0" in found.remedy
    script(tmp_path, "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    found = only(gpus.every_card())
    assert found.status == "failed" and "version mismatch" in found.text and "reboot" in found.remedy
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CPU build" in only(gpus.every_card()).text


# ---- Operators -------------------------------------------------------------------------------------------------------


def test_a_wrong_kernel_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = peers.ours()

    def wrong(_impl: str) -> Any:
        def answer(given: peers.Problem) -> peers.Answer:
            loss, gradient = right(given)
            return (loss, gradient) if given.banks[0].dtype != torch.float16 else (loss, gradient * 1.01)

        return answer

    monkeypatch.setattr(peers, "ours", wrong)
    found = list(operators.contrastive("cpu"))
    assert [each.status for each in found] == ["ok", "failed", "ok"]
    assert "times the allowed error, at" in found[1].text and "plain torch is used instead" in found[1].remedy


def test_a_wrong_ring_and_wrong_colours_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    if ops.missing("cpu"):
        pytest.skip("needs the compiled operators")
    enqueue, photometric = ops.enqueue, ops.photometric

    def late(bank: Any, keys: Any, pointer: Any, filled: Any, **options: Any) -> None:
        enqueue(bank, keys, pointer, filled, **options)
        if options["impl"] == "cpu":
            filled.sub_(1)

    monkeypatch.setattr(ops, "enqueue", late)
    monkeypatch.setattr(ops, "photometric", lambda *arguments: photometric(*arguments) + 0.01)
    assert operators.enqueue("cpu").status == "failed" and "differs from plain torch's" in operators.enqueue("cpu").text
    found = operators.photometry("cpu")
    assert found.status == "failed" and "grey levels" in found.text and "--augment torch" in found.remedy


def test_no_operators_for_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "missing", lambda *_: "this build of fastcssl has no operators for cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    (found,) = operators.operators("cuda").findings
    assert found.status == "failed" and "FASTCSSL_CUDA=1" in found.remedy
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    (found,) = operators.operators("cuda").findings
    assert found.status == "note" and "plain torch runs in their place" in found.text


def test_nothing_of_ours_is_looked_at_on_an_older_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for reason, looks in ((None, True), ("this card has compute capability 7.5", False)):
        monkeypatch.setattr(ops, "missing", lambda *_, reason=reason: reason)
        titles = [title for title, _ in checks.checks()]
        assert "operators on the GPU" in titles and ("races" in titles) == ("speed" in titles) == looks


# ---- What only a card can show, up to the card -----------------------------------------------------------------------


def test_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_given: peers.Problem) -> peers.Answer:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(peers, "compiled", lambda: broken)
    monkeypatch.setattr(timing, "ROUNDS", 2)
    found = {each.name: each for each in timing.contrastive(rows=8, banks=(64,), device="cpu")}
    assert (
        found["torch.compile"].status == "note" and "left out: RuntimeError: no compiler" in found["torch.compile"].text
    )
    for name in ("eager, as in MoCo", "flash attention, V = K"):
        assert "times as fast" in found[name].text


def test_full_runs_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert suite.folder() == Path(__file__).parents[1] / "gpu"
    found = suite.full(tmp_path / "site-packages" / "tests" / "gpu")
    assert found.status == "failed" and "Clone the repository" in found.remedy
    tests = tmp_path / "tests" / "gpu"
    tests.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    head = "import pytest\npytestmark = pytest.mark.gpu\n"
    (tests / "test_some.py").write_text(f"{head}def test_good(): pass\ndef test_bad(): assert 1 == 2\n")
    found = suite.full(tests)
    assert found.status == "failed" and "1 failed, 1 passed" in found.text and "test_bad" in found.text, found
    (tests / "test_some.py").write_text(f"{head}def test_good(): pass\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert suite.full(tests).status == "ok"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = suite.full(tests)
    assert found.status == "note" and "no GPU" in found.text
    (tests / "test_some.py").write_text("import no_such_module\n")
    assert suite.full(tests).status == "failed"
