"""benchmarks/launches.py: counts beside the earlier ones, and a last line with the summary."""

import json
from pathlib import Path

import fake_cuda
from smokes import smoke


def test_launches_do_not_creep_up(tmp_path: Path) -> None:
    fake_cuda.environment()  # skips where the fake card cannot be built
    done = smoke("launches", "--only", "moco/pnr", "simclr/finetune", numbers=tmp_path / "launches.jsonl", width=200)
    # MoCo + PNR with a ResNet-18. Lower these when a change lowers them; to raise one, give a reason.
    assert done.summary == {
        "ops_per_step_1": 598,
        "host_syncs_per_step_1": 0,
        "collectives_per_step_1": 0,
        "ops_per_step_8": 866,
        "host_syncs_per_step_8": 0,
        "collectives_per_step_8": 66,
    }
    assert [(row["name"], row["ranks"]) for row in done.lines] == [
        (name, ranks) for ranks in (1, 8) for name in ("moco/pnr", "simclr/finetune")
    ]
    assert json.loads(done.said.splitlines()[-1])["summary"] == done.summary
    row = next(line for line in done.said.splitlines() if "moco/pnr" in line).split()
    assert row[1:5] == ["598", "1098", "0", "0"]
