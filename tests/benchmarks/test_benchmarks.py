"""Benchmarks run from a clean start, without data, and say what they promise. Speed itself is never tested here."""

import importlib.util
import math
import re
from pathlib import Path

from smokes import BENCHMARKS, smoke


def test_no_script_goes_untried() -> None:
    """Whatever can be started is started by a test, in a process of its own."""
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert scripts - set(re.findall(r'\bsmoke\(\s*"(\w+)"', tests)) == set()
    assert scripts >= {"bench", "evaluate", "kernel", "loader", "prep", "quality", "sweep", "train"}


def test_cost_model_alone() -> None:
    done = smoke("kernel_model")
    for words in ("predicted, never measured", "A5000", "A100", "RTX 4090", "H100", "B200", "RTX 5090"):
        assert words in done.said


def test_prep_benchmark(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    args = ("--smoke", "--workers", 1, "--work", work)
    done = smoke("prep", *args, numbers=tmp_path / "prep.jsonl", width=100)
    assert not list(work.iterdir())
    cases, summary = done.lines, done.summary
    promised = ["tar_vs_pillow", "passthrough_mb_per_s", "passthrough_full_mb_per_s", "peak_rss_growth_mb"]
    if importlib.util.find_spec("ffcv"):
        promised.append("tar_vs_ffcv_writer")
    else:
        assert summary["tar_vs_ffcv_writer"] is None
    for key in promised:
        assert math.isfinite(summary[key]), key
    for case in cases:
        assert case["failure"] is None
        assert case["images_per_s_median"] > 0
