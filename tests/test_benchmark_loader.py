"""The loader benchmark runs from a clean start, without data, and says what it promises. Speed is never tested here."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "loader.py"
PROMISED = (
    "native_full_vs_torchvision_pil_1t",
    "native_full_vs_dali_cpu_1t",
    "native_geometry_vs_ffcv_1t",
    "native_full_vs_decode_only_1t",
    "native_full_2t_vs_1t",
    "resident_vs_torchvision_pil_1t",
    "native_task_switch_ms",
    "native_first_batch_ms",
)


def test_loader_benchmark(tmp_path: Path) -> None:
    numbers, work = tmp_path / "loader.jsonl", tmp_path / "work"
    command = [SCRIPT, "--smoke", "--json", numbers, "--work", work]
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 110

    *rows, environment, last = map(json.loads, numbers.read_text().splitlines())
    summary = last["summary"]
    missing = set() if len(os.sched_getaffinity(0)) > 1 else {"native_full_2t_vs_1t"}
    for package, key in (("nvidia", "native_full_vs_dali_cpu_1t"), ("ffcv", "native_geometry_vs_ffcv_1t")):
        if importlib.util.find_spec(package) is None:
            missing.add(key)
    for key in PROMISED:
        assert summary[key] is None if key in missing else math.isfinite(summary[key]), key
    assert {"commit", "versions", "cpu", "cores", "seed"} <= environment["environment"].keys()
    for row in rows:
        assert row["failure"] is None, row
        assert row["images_per_s_median"] > 0
        assert row["peak_rss_mb"] > 0
