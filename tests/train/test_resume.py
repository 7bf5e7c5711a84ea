"""Killed anywhere, a run goes on from its last checkpoint, and its losses are those of a run that nobody killed."""

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small_runs import killed, lines, losses, prepared, run, tiny

from fastcssl.errors import UserError
from fastcssl.runs.checkpoint import CheckpointError, latest, load
from fastcssl.runs.status import read_status, summary

# Where the process kills itself.
PLACES = {
    "in prefetch": """
from fastcssl.data.backends import resident
real, seen = resident.BACKEND.run, [0]
def run(self, plan, first):
    for crops in real(self, plan, first):
        seen[0] += 1
        if seen[0] == 8: die()
        yield crops
resident.BACKEND.run = run
""",
    "in a checkpoint write": """
from fastcssl.runs import checkpoint
finish, written = checkpoint._DigestingFile.finish, [0]
def stop(self, step):
    written[0] += 1
    if step == 7: self._file.flush(); die()
    return finish(self, step)
checkpoint._DigestingFile.finish = stop
""",
    "between tasks": """
from fastcssl.train.session import Session
end = Session.end_task
def stop(self, report, state):
    end(self, report, state)
    die()
Session.end_task = stop
""",
    "before the end of a task is saved": """
from fastcssl.train.session import Session
def stop(self, report, state): die()
Session.end_task = stop
""",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("resume") / "data")


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    run(tiny(), data, out)
    return out


def _has_its_true_teacher(state: dict[str, Any], ended: dict[str, Any]) -> None:
    """In the middle of task 1 it is the network that task 0 ended with; the references take the half-trained one."""
    assert state["position"]["task"] == 1
    frozen = state["strategy_copies"]["frozen"]
    for key, value in frozen.items():
        assert torch.equal(value, ended["method"][f"online.{key}"]), key
    assert not torch.equal(frozen["encoder.conv1.weight"], state["method"]["online.encoder.conv1.weight"])


@pytest.mark.parametrize("place", PLACES)
def test_killed_and_resumed_bit_for_bit(tmp_path: Path, data: Path, whole: Path, place: str) -> None:
    killed(data, tmp_path / "run", PLACES[place])
    before = latest(tmp_path / "run/checkpoints")
    assert before is not None and 0 < before.step < 8, "it died before it could save, or not at all"
    if "prefetch" in place or "write" in place:
        _has_its_true_teacher(before.state, load(tmp_path / "run/checkpoints/task-0.pt"))
    assert run(tiny(), data, tmp_path / "run").status == "finished"
    assert losses(tmp_path / "run") == losses(whole)
    assert [line["step"] for line in lines(tmp_path / "run", "task")] == [4, 8]
    epochs = [(line["step"], line["loss"]) for line in lines(tmp_path / "run", "epoch")]
    assert epochs == [(line["step"], line["loss"]) for line in lines(whole, "epoch")]
    for name in ("task0", "task1"):
        file = f"encoders/{name}.safetensors"
        assert (tmp_path / "run" / file).read_bytes() == (whole / file).read_bytes()
    assert not list((tmp_path / "run/checkpoints").glob("*.partial"))


def test_a_finished_run_is_finished(data: Path, whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    outcome = run(tiny(), data, whole)
    assert outcome.status == "finished" and len(outcome.tasks) == 2
    assert (whole / "metrics.jsonl").read_bytes() == before
    status = read_status(whole)
    assert status.updated - status.started >= sum(task.seconds for task in outcome.tasks) > 0


def test_stopping_after_a_task_and_going_on(tmp_path: Path, data: Path, whole: Path) -> None:
    outcome = run(tiny(run={"stop_after_task": 0}), data, tmp_path / "run")
    assert (outcome.status, outcome.signal, len(outcome.tasks)) == ("stopped", 0, 1)
    before = losses(tmp_path / "run")
    for _ in range(2):
        text = io.StringIO()
        console = Console(file=text, width=200)
        outcome = run(tiny(run={"stop_after_task": 0}), data, tmp_path / "run", console=console)
        assert (outcome.status, outcome.signal, len(outcome.tasks)) == ("stopped", 0, 1)
        assert "Nothing to train: task 0 is done; to continue, leave out --stop-after-task 0" in text.getvalue()
        assert losses(tmp_path / "run") == before
    console = Console(file=io.StringIO(), width=200)
    console.print(summary(tmp_path / "run"))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "run the same command" not in said and "leave out --stop-after-task 0" in said
    assert run(tiny(), data, tmp_path / "run").status == "finished"
    assert losses(tmp_path / "run") == losses(whole)


def test_a_changed_configuration_is_refused_by_its_keys(data: Path, whole: Path) -> None:
    found = tiny()
    optim = dataclasses.replace(found.config.optim, lr=0.01)
    changed = dataclasses.replace(found, config=dataclasses.replace(found.config, optim=optim, epochs=3))
    with pytest.raises(CheckpointError) as caught:
        run(changed, data, whole)
    assert "optim.lr" in str(caught.value) and "epochs: 2 in the checkpoint, 3 now" in str(caught.value)
    # What does not change the training may differ.
    assert run(tiny(run={"keep_checkpoints": 5}), data, whole).status == "finished"


def test_a_changed_manifest_is_refused(tmp_path: Path, data: Path) -> None:
    moved = tmp_path / "data"
    shutil.copytree(data, moved)
    run(tiny(run={"stop_after_task": 0}), moved, tmp_path / "run")
    manifest = json.loads((moved / "manifest.json").read_text())
    manifest["scenario"]["order"] = "seed 7"
    (moved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="its manifest has changed"):
        run(tiny(), moved, tmp_path / "run")


def test_starting_over_keeps_the_old_run_aside(tmp_path: Path, data: Path) -> None:
    run(tiny(run={"stop_after_task": 0}), data, tmp_path / "run")
    outcome = run(tiny("moco", "cassle", run={"stop_after_task": 0}), data, tmp_path / "run", resume="never")
    assert outcome.status == "stopped"
    assert (tmp_path / "run-1/checkpoints/task-0.pt").is_file() and (tmp_path / "run/checkpoints/task-0.pt").is_file()


COMMAND = ("demo", "moco", "pnr", "--batch-size", "16", "--method.bank.size", "64", "--encoder.name", "resnet18-w8")
COMMAND += ("--expect.num-tasks", "0", "--epochs", "2", "--num-threads", "1", "--log-every", "1", "--device", "cpu")


def _train_command(data: Path, out: Path, *more: str, ranks: int = 1) -> list[str]:
    module = ["-m", "fastcssl.cli.train", *COMMAND, "--data", str(data), "--out", str(out), *more]
    if ranks > 1:
        module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *module]
    return [sys.executable, *module]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}


def _wait_for_step(out: Path, step: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if (out / "metrics.jsonl").is_file() and len((out / "metrics.jsonl").read_text().splitlines()) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"no step {step}: {process.communicate()}")


def test_the_command_stops_on_sigterm_with_its_status_and_goes_on(tmp_path: Path, data: Path) -> None:
    command = _train_command(data, tmp_path / "run", "--epochs", "200")
    process = subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, out + err
    assert "run the same command to resume" in out and "Traceback" not in err
    found = latest(tmp_path / "run/checkpoints")
    assert found is not None and found.step == lines(tmp_path / "run")[-1]["step"]


def test_a_dead_rank_ends_the_run_with_a_sentence_and_nothing_is_lost(tmp_path: Path, data: Path) -> None:
    """Two ranks; the second is killed in the middle. The next start with one rank goes on from the checkpoint."""
    command = _train_command(data, tmp_path / "run", "--epochs", "40", "--checkpoint-minutes", "0", ranks=2)
    process = subprocess.Popen(
        command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _wait_for_step(tmp_path / "run", 6, process)
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        assert len(children) >= 2
        os.kill(int(children[-1]), signal.SIGKILL)
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1, out + err
    assert "rank was lost" in err and "run the same command" in err.lower()
    found = latest(tmp_path / "run/checkpoints")
    assert found is not None and found.step >= 1
    resumed = subprocess.run(
        _train_command(data, tmp_path / "run", "--epochs", "40", "--stop-after-task", "0"),
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert resumed.returncode == 0, resumed.stderr
    steps = [line["step"] for line in lines(tmp_path / "run")]
    assert steps == list(range(1, 81))
