"""The preloaded library counts, fails and kills at each kind of file operation, below its folders and nowhere else."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.shim.plan import CALLS, Counted, NoCompiler, Plan, counted, library

# One operation of each kind on `path`, which exists before with 100 bytes.
_OPERATIONS = {
    "open": "os.open(path, os.O_RDONLY)",
    "create": "os.open(path + '2', os.O_WRONLY | os.O_CREAT)",
    "write": "os.write(existing, bytes(50))",
    "read": "os.read(existing, 100)",
    "sync": "os.fsync(existing)",
    "rename": "os.rename(path, path + '2')",
    "mkdir": "os.mkdir(path + '2')",
    "truncate": "os.truncate(existing, 10)",
    "map": "mmap.mmap(existing, 100)",
    "remove": "os.unlink(path)",
}
_PROGRAM = """
import errno, mmap, os, sys
path = sys.argv[1]
existing = os.open(sys.argv[1], os.O_RDWR)
try:
    print(len(done) if isinstance(done := {operation}, bytes) else done if {is_count} else "done")
except OSError as error:
    print(errno.errorcode[error.errno])
"""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Path:
    try:
        return library()
    except NoCompiler as error:
        pytest.skip(str(error))


def _run(tmp_path: Path, plan: Plan, program: str, below: str = "watched") -> tuple[int, str, Counted]:
    folder, state = tmp_path / "watched", tmp_path / "plan"
    folder.mkdir()
    (folder / "file").write_bytes(bytes(100))
    plan.write(state, (tmp_path / below,))
    environment = {**os.environ, "LD_PRELOAD": str(library()), "CHAOS_PLAN": str(state)}
    command = [sys.executable, "-c", program, str(folder / "file")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.strip() + done.stderr.strip(), counted(state)


def _program(call: str) -> str:
    return _PROGRAM.format(operation=_OPERATIONS[call], is_count=call == "write")


def _nth(call: str) -> int:
    return 2 if call == "open" else 1  # the program opens the file once before


@pytest.mark.parametrize("call", CALLS)
def test_it_counts_and_fails_each_operation(call: str, tmp_path: Path) -> None:
    plan = Plan(call=call, nth=_nth(call), action="fail once", error="ENOSPC")
    status, printed, seen = _run(tmp_path, plan, _program(call))
    assert (status, printed) == (0, "ENOSPC")
    assert seen.num_injected == 1
    assert seen.counts[call] == _nth(call)


@pytest.mark.parametrize("call", CALLS)
def test_it_kills_at_each_operation(call: str, tmp_path: Path) -> None:
    status, printed, seen = _run(tmp_path, Plan(call=call, nth=_nth(call), action="kill"), _program(call))
    assert (status, printed) == (-signal.SIGKILL, "")
    assert seen.num_injected == 1


def test_a_killed_write_leaves_half_of_it(tmp_path: Path) -> None:
    program = "import os, sys; os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND), bytes(50))"
    _run(tmp_path, Plan(call="write", nth=1, action="kill"), program)
    assert (tmp_path / "watched" / "file").stat().st_size == 125


@pytest.mark.parametrize(("call", "size"), [("write", "25"), ("read", "50")])
def test_short_transfers(call: str, size: str, tmp_path: Path) -> None:
    assert _run(tmp_path, Plan(call=call, nth=1, action="short"), _program(call))[1] == size


def test_errors_from_there_on(tmp_path: Path) -> None:
    program = """
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY)
for _ in range(4):
    try:
        os.write(file, b"x")
        print("written", end=" ")
    except OSError as error:
        print(error.strerror, end=" ")
"""
    plan = Plan(call="write", nth=3, action="fail from there on", error="EIO")
    _, printed, seen = _run(tmp_path, plan, program)
    assert printed == "written written Input/output error Input/output error"
    assert seen.num_injected == 2


def test_it_ignores_other_folders(tmp_path: Path) -> None:
    plan = Plan(call="write", nth=1, action="fail once", error="EIO")
    status, printed, seen = _run(tmp_path, plan, _program("write"), below="watch")  # a prefix of the name only
    assert (status, printed) == (0, "50")
    assert set(seen.counts.values()) == {0}


def test_numpy_writes_through_stdio(tmp_path: Path) -> None:
    program = """
import sys
import numpy as np
try:
    with open(sys.argv[1], "wb") as file:
        np.arange(100).tofile(file)
    print("written")
except OSError as error:
    print("refused")
"""
    assert _run(tmp_path, Plan(call="write", nth=1, action="fail once", error="ENOSPC"), program)[1] == "refused"


def test_a_started_program_shares_the_plan(tmp_path: Path) -> None:
    inner = "import os, sys; os.write(os.open(sys.argv[1], os.O_WRONLY), b'x')"
    program = f"""
import os, subprocess, sys
os.write(os.open(sys.argv[1], os.O_WRONLY), b"x")
print(subprocess.run([sys.executable, "-c", {inner!r}, sys.argv[1]]).returncode)
"""
    assert _run(tmp_path, Plan(call="write", nth=2, action="kill"), program)[1] == str(-signal.SIGKILL)
