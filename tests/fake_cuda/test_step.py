"""Whole training steps of every method under every strategy on a fake card, alone and as one of eight ranks.

The forward and backward passes, the optimiser, the slow network and the banks run on "cuda:0" under CUDA's autocast.
An operation that needs a value on the host, mixes devices or copies between host and device fails. The kernels
themselves do not run, nor does DDP.
"""

import json
from typing import Any

import pytest

import fake_cuda

PROGRAM = "fake_cuda.count_steps"


def rows(*arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in fake_cuda.run("-m", PROGRAM, *arguments).splitlines()]


@pytest.mark.parametrize("ranks", [1, 8])
def test_no_step_waits_for_the_card(ranks: int) -> None:
    found = rows("--ranks", str(ranks), "--small")
    assert len(found) >= 48
    assert not [row for row in found if "error" in row]
    assert not [row for row in found if row["host_syncs"]]
    assert all(row["convolutions_in"] == ["torch.bfloat16"] for row in found), "autocast was off"
    assert all((row["collectives"] > 0) == (ranks > 1) for row in found)


# What is replaced, by what, and what the harness says then.
DEFECTS = {
    "torch's SyncBatchNorm": (
        "fastcssl.learn.methods.synchronised",
        "lambda module, world: torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)",
        "DynamicOutputShapeException",
    ),
    "a value read in every step": (
        "fastcssl.learn.methods.moco.Moco.after_step",
        "lambda self, *_: float(self.banks[0].filled)",
        "DataDependentOutputException",
    ),
    "a copy from the host": (
        "fastcssl.learn.methods.moco.Moco.after_step",
        "lambda self, *_: torch.zeros(3).to('cuda')",
        "between host and device",
    ),
    "a mask that selects rows": (
        "fastcssl.learn.methods.moco.Moco.after_step",
        "lambda self, *_: self.banks[0].rows_KD[self.banks[0].rows_KD[:, 0] > 0]",
        "DynamicOutputShapeException",
    ),
    "tensors of two devices": (
        "fastcssl.learn.methods.moco.Moco.after_step",
        "lambda self, *_: self.banks[0].rows_KD + torch.zeros(self.banks[0].rows_KD.shape)",
        "found at least two devices",
    ),
}
PLANT = f"""
import json, sys, torch
from unittest import mock
from {PROGRAM} import counted_or_failed
for target, replacement in json.loads(sys.argv[1]):
    with mock.patch(target, eval(replacement)):
        print(json.dumps(counted_or_failed("moco/pnr", 8, small=True)))
"""


def test_planted_defects_are_found() -> None:
    planted = json.dumps([(target, replacement) for target, replacement, _ in DEFECTS.values()])
    found = [json.loads(line) for line in fake_cuda.run(PLANT, planted).splitlines()]
    for (defect, (_, _, says)), row in zip(DEFECTS.items(), found, strict=True):
        assert says in row.get("error", "") + " ".join(row.get("causes", [])), (defect, row)
