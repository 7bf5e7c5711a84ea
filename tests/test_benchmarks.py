"""Benchmarks run from a clean start, without data, and say what they promise. Speed itself is never tested here."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_prep_benchmark(tmp_path: Path) -> None:
    numbers, work = tmp_path / "prep.jsonl", tmp_path / "work"
    work.mkdir()
    command = [BENCHMARKS / "prep.py", "--smoke", "--workers", "1", "--json", numbers, "--work", work]
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert not list(work.iterdir())

    *cases, environment, last = map(json.loads, numbers.read_text().splitlines())
    summary = last["summary"]
    promised = ["tar_vs_pillow", "passthrough_mb_per_s", "passthrough_full_mb_per_s", "peak_rss_growth_mb"]
    if importlib.util.find_spec("ffcv"):
        promised.append("tar_vs_ffcv_writer")
    else:
        assert summary["tar_vs_ffcv_writer"] is None
    for key in promised:
        assert math.isfinite(summary[key]), key
    assert {"commit", "versions", "cpu", "cores", "seed"} <= environment["environment"].keys()
    for case in cases:
        assert case["failure"] is None
        assert case["images_per_s_median"] > 0
