"""Runs tests/gpu, the tests that need a GPU, with pytest in a process of their own."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import torch

import fastcssl
from fastcssl.doctor import Finding, Section, failed, note, ok, run_checks


def suite() -> Section:
    return run_checks("tests/gpu", [("tests/gpu", full)])


def folder() -> Path:
    """Returns where tests/gpu is in a clone of the repository."""
    return Path(fastcssl.__file__).resolve().parent.parent / "tests" / "gpu"


def full(tests: Path | None = None) -> Finding:
    """Runs the tests in a folder and returns how they ended."""
    tests = tests or folder()
    if not tests.is_dir():
        return failed(
            "tests/gpu",
            "the tests are not part of an installed package",
            "Clone the repository, pip install --no-build-isolation -e '.[dev]' in it, and run fastcssl-doctor --full.",
        )
    if importlib.util.find_spec("pytest") is None:
        return failed("tests/gpu", "pytest is not installed", "pip install pytest")
    command = [sys.executable, "-m", "pytest", str(tests), "-m", "gpu", "-q", "-rfs", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tests.parent.parent, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    if done.returncode == 1:
        broken = [line.removeprefix("FAILED ") for line in done.stdout.splitlines() if line.startswith("FAILED ")]
        first = f"; first: {broken[0]}" if broken else ""
        return failed("tests/gpu", f"{last}{first}", f"See the full output: python {' '.join(command[1:])}")
    if done.returncode:
        said = (done.stderr.strip() or last).splitlines()[-1]
        return failed("tests/gpu", f"pytest could not run them: {said}", "pip install -e '.[dev]' in the repository.")
    if not torch.cuda.is_available():
        return note("tests/gpu", f"{last}: there is no GPU; this only shows that the tests can be collected")
    return ok("tests/gpu", last)
