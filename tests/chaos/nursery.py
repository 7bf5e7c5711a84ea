"""Runs functions in children of a process that has imported everything once, with limits of time and memory.

`python -m chaos.nursery MODULE ...` imports the modules, and then forks a child for each request on its standard input.
"""

import atexit
import contextlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

PRINTED_CHARACTERS = 6000
_DEADLINE_FACTOR = 20  # a busy machine gives a process a fraction of a core


@dataclass(frozen=True)
class Errand:
    """A function to call in a child: "module:function" and its keyword arguments, which JSON can hold.

    `cpu_seconds` is a limit of the processor's time and `more_bytes` of the address space beyond what the parent has.
    The child is killed after `cpu_seconds` too many or, if it sleeps, after a multiple of them.
    """

    target: str
    arguments: dict[str, Any]
    cpu_seconds: int = 60
    more_bytes: int = 4 << 30


@dataclass(frozen=True)
class Ending:
    """How a child ended: `value` is what the function returned, None if it did not return."""

    value: Any
    signal: int
    late: bool  # it was killed because it took too long
    cpu_seconds: float
    more_bytes: int  # the growth of its resident memory at its peak
    printed: str

    def broken(self, *, cpu_seconds: float, more_bytes: int) -> list[str]:
        """Returns a sentence for every invariant that did not hold for any child."""
        found = []
        if self.late:
            found.append("it did not end in time and was killed")
        elif self.signal:
            found.append(f"it ended by signal {self.signal}")
        if "Traceback (most recent call last)" in self.printed:
            found.append("it printed a traceback: " + self.last_line)
        if self.cpu_seconds > cpu_seconds:
            found.append(f"it used {self.cpu_seconds:.1f} s of the processor, more than {cpu_seconds:g}")
        if self.more_bytes > more_bytes:
            found.append(f"it used {self.more_bytes >> 20} MiB more memory, more than {more_bytes >> 20}")
        return found

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.printed.splitlines() if line.strip()]
        return lines[-1][:300] if lines else "nothing was printed"


class Nursery:
    """A process that has imported `modules`, and whose children do errands one after another."""

    def __init__(self, *modules: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": import_path()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chaos.nursery", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        atexit.register(self.close)

    def run(self, errand: Errand, printed: Path) -> Ending:
        """Does an errand whose output goes to the file `printed`, and returns how it ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({**asdict(errand), "printed": str(printed)}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that should run {errand.target} is gone")
        text = printed.read_text(encoding="utf-8", errors="replace")
        return Ending(**json.loads(answer), printed=text[-PRINTED_CHARACTERS:])

    def close(self) -> None:
        if self._process.returncode is not None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@cache
def nursery() -> Nursery:
    """Returns the nursery of this process, which has imported what the errands of all experiments need."""
    return Nursery("torch", "hypothesis", "dataprep.cli", "dataprep.verify", "fastcssl.data.loader")


def import_path() -> str:
    """Returns the PYTHONPATH with which another process finds this package and the code that it tests."""
    tests = Path(__file__).resolve().parent.parent
    return os.pathsep.join(filter(None, (str(tests), str(tests.parent), os.environ.get("PYTHONPATH"))))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _do(request: dict[str, Any], answers: int) -> None:
    """Calls the function, in the child, and writes what it returned to a pipe."""
    file = os.open(request["printed"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_seconds"], request["cpu_seconds"] + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + request["more_bytes"],) * 2)
    module, _, name = request["target"].partition(":")
    function = vars(importlib.import_module(module))[name]
    value = function(**request["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(answers, json.dumps(value).encode())


def _fork(request: dict[str, Any]) -> dict[str, Any]:
    """Returns how a child did the errand."""
    before = _resident()
    answers, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        status = 0
        try:
            os.close(answers)
            _do(request, theirs)
        except BaseException:
            status = 70
            with contextlib.suppress(BaseException):
                traceback.print_exc()
                sys.stderr.flush()
        os._exit(status)
    os.close(theirs)
    content, late = _read(answers, child, request["cpu_seconds"] * _DEADLINE_FACTOR)
    _, status, used = os.wait4(child, 0)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {
        "value": json.loads(content) if content else None,
        "signal": number,
        "late": late or number == signal.SIGXCPU,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "more_bytes": max(0, used.ru_maxrss * 1024 - before),
    }


def _read(answers: int, child: int, seconds: float) -> tuple[bytes, bool]:
    """Returns what the child wrote until it ended, and whether it had to be killed."""
    deadline = time.monotonic() + seconds
    content, late = b"", False
    with os.fdopen(answers, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                os.kill(child, signal.SIGKILL)
                late = True
                deadline += 10
                continue
            chunk = pipe.read(1 << 16)
            if not chunk:
                return content, late
            content += chunk


def main(modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that no module disturbs the answers
    for line in sys.stdin:
        answers.write(json.dumps(_fork(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
