"""Looks for data races and invalid memory accesses on a GPU with NVIDIA's compute-sanitizer, if it is installed."""

import shutil
import subprocess
import sys
from collections.abc import Iterator

from fastcssl.doctor import REPORT_IT, Finding, Section, failed, note, ok, run_checks

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
PROGRAM = """
import torch
from fastcssl.doctor import operators, peers
for dtype in (torch.float32, torch.float16):
    given = peers.problem(72, 128, (300, 70), dtype=dtype, device="cuda")
    peers.ours()(given)
assert operators.enqueue("cuda").status == "ok"
torch.cuda.synchronize()
print("finished")
"""


def races() -> Section:
    return run_checks("Races on the GPU", [("compute-sanitizer", sanitized)])


def sanitized(limit_seconds: float = 600) -> Iterator[Finding]:
    """Runs our CUDA kernels under each of the sanitizer's tools, and yields one finding per tool."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        yield note("compute-sanitizer", "not installed; data races were not checked", "It is part of the CUDA toolkit.")
        return
    for kind in TOOLS:
        command = [tool, "--tool", kind, "--error-exitcode", "9", sys.executable, "-c", PROGRAM]
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
        elif done.returncode or "finished" not in done.stdout:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            yield failed(
                kind, f"could not run: {' '.join(last)}", "Run it by hand, as root if counters are restricted."
            )
        else:
            yield ok(kind, "no errors in the contrastive loss and in enqueue")
