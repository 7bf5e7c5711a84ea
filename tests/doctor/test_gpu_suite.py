"""tests/gpu, seen from a machine without a card: it is collected, skips cleanly, and what can be rehearsed passes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# What a user's card is to show, by the words of the tests' names.
PROMISED = (
    "errors_stay_within_the_budget",
    "around_the_end",
    "sweep_reads_the_old_rows",
    "graph_replays_sweep_and_enqueue",
    "banks_are_equal_on_both_ranks",
    "buffers_live_as_long",
    "fused_photometry_is_plain_torchs",
    "dalis_mixed_decoder",
    "run_is_the_cpus_in_distribution",
    "nothing_waits_for_the_card",
    "no_step_waits_for_the_card",
    "two_ranks_train_as_one_does",
    "epoch_under_torchs_sanitizer",
    "resident_crops_beside_a_busy_stream",
    "reserved_memory_does_not_grow",
)


def gpu_tests(*options: str, **env: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", *options]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=settings)


def test_it_is_collected() -> None:
    done = gpu_tests("--collect-only", "-m", "gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in PROMISED:
        assert words in done.stdout, words
    assert "deselected" not in done.stdout  # every test there is marked


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card, on which they run")
def test_every_test_skips_without_a_card() -> None:
    done = gpu_tests("-m", "gpu", "-rs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ skipped in", done.stdout.splitlines()[-1].strip("= ")), done.stdout
    assert "needs a CUDA device" in done.stdout


def test_nothing_runs_unless_asked_for() -> None:
    done = gpu_tests("-rs", "-k", "around_the_end")
    assert done.returncode == 0 and "with -m gpu" in done.stdout and "passed" not in done.stdout


def test_rehearsal_on_the_cpu() -> None:
    """The same tests with the CPU as their device: what is wrong in a test itself shows here."""
    chosen = "around_the_end or old_rows or masks or photometry or sees_nothing or strided or same_bits"
    whole = "(no_step_waits and moco and fp32) or (train_as_one and moco)"
    done = gpu_tests("-m", "gpu", "-k", f"({chosen}) or (budget and 0.2) or {whole}", FASTCSSL_GPU_TESTS_ON="cpu")
    chosen = "around_the_end or old_rows or masks or photometry or sees_nothing or strided or same_bits or busy_stream"
    done = gpu_tests("-m", "gpu", "-k", f"({chosen}) or (budget and 0.2)", FASTCSSL_GPU_TESTS_ON="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 40, done.stdout
