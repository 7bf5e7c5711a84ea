"""Looks for data races and invalid memory accesses on a GPU with NVIDIA's compute-sanitizer, if it is installed."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fastcssl.doctor import REPORT_IT, Finding, Section, exercise, failed, note, ok, run_checks

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def races() -> Section:
    return run_checks("Races on the GPU", [("compute-sanitizer", sanitized)])


def sanitized(limit_seconds: float = 600) -> Iterator[Finding]:
    """Runs our CUDA kernels under each of the sanitizer's tools, and yields one finding per tool."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        yield note("compute-sanitizer", "not installed; data races were not checked", "It is part of the CUDA toolkit.")
        return
    with tempfile.TemporaryDirectory() as folder:
        yield from _by_each_tool(tool, exercise.prepare(Path(folder) / "data"), limit_seconds)


def _by_each_tool(tool: str, data: Path, limit_seconds: float) -> Iterator[Finding]:
    program = [sys.executable, "-m", "fastcssl.doctor.exercise", "cuda", str(data)]
    for kind in TOOLS:
        command = [tool, "--tool", kind, "--error-exitcode", "9", *program]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            yield note(
                kind, f"not finished after {limit_seconds:.0f} s", f"Run it by hand: {tool} --tool {kind} python ..."
            )
            continue
        if done.returncode == 9:
            said = [line for line in done.stdout.splitlines() if "=====" in line][:2]
            yield failed(kind, " ".join(said).replace("=", "").strip() or "found errors", REPORT_IT)
        elif done.returncode or exercise.ENDED not in done.stdout:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            yield failed(
                kind, f"could not run: {' '.join(last)}", "Run it by hand, as root if counters are restricted."
            )
        else:
            yield ok(
                kind, "no errors in the contrastive loss, in enqueue, in the photometric kernels and in the loader"
            )
