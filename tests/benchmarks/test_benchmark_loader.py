"""The loader benchmark runs from a clean start, without data, and says what it promises. Speed is never tested here."""

import importlib.util
import math
import os
from pathlib import Path

from smokes import smoke

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
    done = smoke("loader", "--smoke", "--work", tmp_path / "work", numbers=tmp_path / "loader.jsonl")
    rows, summary = done.lines, done.summary
    missing = set() if len(os.sched_getaffinity(0)) > 1 else {"native_full_2t_vs_1t"}
    for package, key in (("nvidia", "native_full_vs_dali_cpu_1t"), ("ffcv", "native_geometry_vs_ffcv_1t")):
        if importlib.util.find_spec(package) is None:
            missing.add(key)
    for key in PROMISED:
        assert summary[key] is None if key in missing else math.isfinite(summary[key]), key
    for row in rows:
        assert row["failure"] is None, row
        assert row["images_per_s_median"] > 0
        assert row["peak_rss_mb"] > 0
