"""The look for races with compute-sanitizer, up to the card, and the program that it watches, on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from fastcssl.doctor import Finding, exercise, failed, operators, races


def sanitizer(folder: Path, text: str) -> None:
    """Puts a script in place of compute-sanitizer."""
    path = folder / "compute-sanitizer"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_races(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    (absent,) = races.sanitized()
    assert absent.status == "note"
    sanitizer(tmp_path, "echo finished")
    assert [each.status for each in races.sanitized()] == ["ok"] * 4
    sanitizer(
        tmp_path,
        'if [ "$2" = racecheck ]; then echo "===== Race reported between Write and Read"; exit 9; fi; echo finished',
    )
    found = {each.name: each for each in races.sanitized()}
    assert found["racecheck"].status == "failed" and "Race reported between" in found["racecheck"].text
    assert found["memcheck"].status == "ok"
    sanitizer(tmp_path, "echo 'Unable to find injection library' >&2; exit 1")
    assert all("could not run: Unable" in each.text and each.remedy for each in races.sanitized())
    sanitizer(tmp_path, "exec sleep 5")
    assert all("not finished after" in each.text for each in races.sanitized(limit_seconds=0.1))


def test_the_sanitized_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the sanitizer starts it, but on the CPU: the sweep, the rings, the photometry and two loaders run."""
    data = exercise.prepare(tmp_path / "data")
    done = subprocess.run(
        [sys.executable, "-m", "fastcssl.doctor.exercise", "cpu", str(data)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"{exercise.ENDED}\n"), done.stderr
    ran: list[str] = []
    monkeypatch.setattr(operators, "enqueue", lambda _: ran.append("enqueue") or Finding("enqueue", "ok", ""))
    monkeypatch.setattr(exercise, "load", lambda _device, _data, loader: ran.append(loader))
    exercise.exercise("cpu", data)
    assert ran == ["enqueue", "native", "resident"]
    ran.clear()
    monkeypatch.setattr(
        operators, "photometry", lambda _: ran.append("photometry") or failed("photometry", "is off", "mend it")
    )
    with pytest.raises(RuntimeError, match="photometry: is off"):
        exercise.exercise("cpu", data)
    assert ran == ["enqueue", "photometry"]
