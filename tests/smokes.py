"""Benchmarks as a user starts them, in their smallest form, and what the lines of each must have.

Every script of benchmarks/ is called by `smoke("NAME", ...)` somewhere in the tests; test_benchmarks.py sees to it.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
ORIGIN = {"commit", "is_modified", "python", "versions", "cpu", "cores", "load_average"}


class Smoked(NamedTuple):
    said: str
    lines: list[dict[str, Any]]  # of its JSON, but for the two below
    environment: dict[str, Any]
    summary: dict[str, Any]


def smoke(script: str, *args: object, numbers: Path | None = None, status: int = 0, width: int = 110) -> Smoked:
    """In a process of its own. The lines of `numbers` say where these come from, and end in a summary."""
    words = [*args, *(("--json", numbers) if numbers else ())]
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= width
    if numbers is None:
        return Smoked(done.stdout, [], {}, {})
    *lines, last = read_lines(numbers)
    (origin,) = [line for line in lines if [*line] == ["environment"]]
    lines.remove(origin)
    environment = origin["environment"]
    assert environment.keys() >= {*ORIGIN, "seed"}
    assert all(environment["versions"][name] for name in ("torch", "fastcssl"))
    assert [*last] == ["summary"] and last["summary"]
    return Smoked(done.stdout, lines, environment, last["summary"])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Numbers are finite, or null where not measured."""
    return [json.loads(line, parse_constant=_refuse) for line in path.read_text().splitlines()]


def _refuse(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no number to publish")
