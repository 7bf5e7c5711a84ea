"""benchmarks/launches.py: counts beside the earlier ones, and a last line with the summary."""

import json
import subprocess
import sys
from pathlib import Path

import fake_cuda

SCRIPT = Path(__file__).parents[2] / "benchmarks/launches.py"


def test_launches_do_not_creep_up(tmp_path: Path) -> None:
    fake_cuda.environment()  # skips where the fake card cannot be built
    command = [
        sys.executable,
        str(SCRIPT),
        "--only",
        "moco/pnr",
        "simclr/finetune",
        "--json",
        str(tmp_path / "l.jsonl"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])["summary"]
    # MoCo + PNR with a ResNet-18. Lower these when a change lowers them; to raise one, give a reason.
    assert summary == {
        "ops_per_step_1": 598,
        "host_syncs_per_step_1": 0,
        "collectives_per_step_1": 0,
        "ops_per_step_8": 866,
        "host_syncs_per_step_8": 0,
        "collectives_per_step_8": 66,
    }
    lines = [json.loads(line) for line in (tmp_path / "l.jsonl").read_text().splitlines()]
    assert [(row["name"], row["ranks"]) for row in lines[:4]] == [
        (name, ranks) for ranks in (1, 8) for name in ("moco/pnr", "simclr/finetune")
    ]
    assert lines[-1]["summary"] == summary
    row = next(line for line in done.stdout.splitlines() if "moco/pnr" in line).split()
    assert row[1:5] == [str(summary["ops_per_step_1"]), "1098", "0", "0"]
