"""Runs of the real trainer that last a second or two, in this process or in one that gets killed."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from conftest import prep_ok
from lab import small

from fastcssl.config.config import ExpectConfig, RunConfig
from fastcssl.config.recipes import Recipe, recipe
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.train.loop import train
from fastcssl.train.session import Outcome


def prepared(out: Path, scenario: str = "class", tasks: int = 2, source: str = "classes=20,train=4,val=2") -> Path:
    number = [] if scenario == "domain" else ["--tasks", tasks]
    prep_ok("build", f"synthetic:{source}", "--scenario", scenario, *number, "--out", out)
    return out


def tiny(method: str = "moco", strategy: str = "pnr", *, run: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    """The demo's recipe with the smallest network, two epochs a task, a line of metrics for every step."""
    found = recipe("demo", method, strategy)
    config = dataclasses.replace(
        found.config,
        epochs=2,
        batch_size=16,
        encoder=EncoderConfig(name="resnet18-w8", stem="cifar"),
        views=dataclasses.replace(found.config.views, size_px=16),
        expect=ExpectConfig(),
        method=small(found.config.method),
        online_probe="off",
        precision="fp32",
        run=RunConfig(log_every=1, num_threads=1, device="cpu", **(run or {})),
    )
    return dataclasses.replace(found, config=dataclasses.replace(config, **changes))


def run(found: Recipe, data: Path, out: Path, **options: Any) -> Outcome:
    torch.set_num_threads(1)
    return train(found, data=data, out=out, **options)


def lines(out: Path, kind: str = "step") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def losses(out: Path) -> list[tuple[int, dict[str, float]]]:
    return [(line["step"], line["terms"]) for line in lines(out)]


def killed(data: Path, out: Path, patch: str, *, method: str = "moco", strategy: str = "pnr") -> None:
    """Trains in a process that saves after every step, and that kills itself where the patch says."""
    program = f"""
import os, signal
from pathlib import Path
import small_runs
def die(): os.kill(os.getpid(), signal.SIGKILL)
{patch}
recipe = small_runs.tiny({method!r}, {strategy!r}, run={{"checkpoint_minutes": 0.0}})
small_runs.run(recipe, Path({str(data)!r}), Path({str(out)!r}))
"""
    folder = str(Path(__file__).parent)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folder}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
