"""Epochs per task (--epochs 3,1): the schedule, resuming, the forecast, the status and the reports follow the list."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small_runs import lines, losses, prepared, run, tiny

import fastcssl.train.loop as loop
from fastcssl.cli import train as command
from fastcssl.data.loader import Stream
from fastcssl.errors import UserError
from fastcssl.evaluate.targets import open_targets
from fastcssl.learn.optim import lr_at, lr_peak
from fastcssl.runs.checkpoint import CheckpointError
from fastcssl.runs.status import read_status
from fastcssl.train.forecast import forecast, shown
from fastcssl.train.watch import Decision, Watch

STEPS = 2  # per epoch: 40 images in a task, batches of 16


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("epochs") / "data")


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("epochs") / "whole"
    assert run(tiny(epochs=(3, 1)), data, out).status == "finished"
    return out


def test_every_task_has_its_epochs(whole: Path) -> None:
    assert [line["task"] for line in lines(whole)] == [0] * 3 * STEPS + [1] * STEPS
    assert [line["num_epochs"] for line in lines(whole, "task")] == [3, 1]
    status = read_status(whole)
    assert (status.step, status.num_steps, status.epoch, status.num_epochs) == (8, 8, 0, 1)


def test_every_task_has_its_own_schedule(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[float] = []
    real = loop.set_lr
    monkeypatch.setattr(loop, "set_lr", lambda optimizer, lr: (used.append(lr), real(optimizer, lr)))
    optim = dataclasses.replace(tiny().config.optim, schedule="cosine", schedule_unit="step")
    run(tiny("simclr", "finetune", epochs=(3, 1), optim=optim), data, tmp_path / "run")
    peak = lr_peak(optim, 16)
    wanted = [lr_at(optim, peak, number / STEPS, epochs) for epochs in (3, 1) for number in range(epochs * STEPS)]
    assert used == pytest.approx(wanted) and len(set(wanted)) > 4
    assert [line["lr"] for line in lines(tmp_path / "run")] == pytest.approx(wanted)


def test_no_epoch_is_drawn_twice(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = Stream.epoch, []

    def epoch(self: Stream, number: int, *rest: Any, **more: Any) -> Any:
        seen.append(number)
        return real(self, number, *rest, **more)

    monkeypatch.setattr(Stream, "epoch", epoch)
    run(tiny("simclr", "finetune", epochs=(3, 1)), data, tmp_path / "run")
    assert seen == [0, 1, 2, 3]  # random draws count epochs over all tasks


def test_equal_numbers_are_one_number(data: Path, tmp_path: Path) -> None:
    run(tiny(epochs=(2, 2)), data, tmp_path / "list")
    run(tiny(epochs=2), data, tmp_path / "number")
    assert losses(tmp_path / "list") == losses(tmp_path / "number")
    saved = json.loads((tmp_path / "number/config.json").read_text())
    assert saved["config"]["epochs"] == 2  # older versions read a number


@pytest.mark.parametrize("stop_at", [3, 5, 7])
def test_a_stopped_run_resumes_with_its_list(
    whole: Path, data: Path, tmp_path: Path, stop_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        decide = Watch.decide
        stopping = {stop_at: Decision.STOP}
        patched.setattr(Watch, "decide", lambda self, step, *a, **k: stopping.get(step, decide(self, step, *a, **k)))
        assert run(tiny(epochs=(3, 1)), data, tmp_path / "run").status == "stopped"
    with pytest.raises(CheckpointError, match=r"epochs: \[3, 1\] in the checkpoint, 3 now"):
        run(tiny(epochs=3), data, tmp_path / "run")
    assert run(tiny(epochs=[3, 1]), data, tmp_path / "run").status == "finished"
    assert losses(tmp_path / "run") == losses(whole)


def test_a_single_task_takes_its_own_number(data: Path, tmp_path: Path) -> None:
    run(tiny(epochs=(1, 3), only_task=1), data, tmp_path / "only")
    assert len(lines(tmp_path / "only")) == 3 * STEPS


def test_the_command_takes_a_list(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["demo", "moco", "pnr", "--data", str(data), "--out", str(tmp_path / "run"), "--epochs", "2,1"]
    words += ["--batch-size", "16", "--encoder.name", "resnet18-w8", "--views.size-px", "16", "--method.hidden", "16"]
    words += ["--method.dim", "8", "--method.bank.size", "32", "--expect.num-tasks", "2", "--device", "cpu"]
    assert command.main([*words, "--num-threads", "1", "--online-probe", "off"]) == 0
    assert [line["num_epochs"] for line in lines(tmp_path / "run", "task")] == [2, 1]
    (target,) = open_targets([tmp_path / "run"], architecture=None, family="cifar", size_px=None, out=None)
    assert "--epochs 2,1" in target.flags  # of the commands that train references
    assert command.main(["demo", "moco", "pnr", "--list", "--epochs", "2,1"]) == 0
    assert "2,1" in capsys.readouterr().out


def test_the_forecast_counts_them(data: Path) -> None:
    found = forecast(tiny(epochs=(3, 1)).config, data, 1, torch.device("cpu"), measure=False)
    assert [task.num_steps for task in found.tasks] == [3 * STEPS, STEPS] and found.num_steps == 4 * STEPS
    console = Console(file=io.StringIO(), width=200)
    console.print(shown(found))
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "0 classes 1-10 40 3 2 6 1 classes 11-20 40 1 2 2 all 80 8" in text
    assert "16 images, 2 views of 16 px each" in text
    assert "the warm-up of 2 epochs does not end within 1" in text


@pytest.mark.parametrize(
    ("strategy", "epochs", "says"),
    [
        ("pnr", (3, 1, 2), "--epochs 3,1,2 has 3 numbers, but .* is split into 2 tasks. Give one number for each task"),
        ("pnr", (3,), "--epochs 3 has 1 number, but .* is split into 2 tasks"),
        ("joint", (3, 1), "--epochs 3,1: joint trains all tasks as one. Give a single number, such as --epochs 3."),
    ],
)
def test_a_list_that_does_not_fit_is_a_sentence(
    data: Path, tmp_path: Path, strategy: str, epochs: tuple[int, ...], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        run(tiny("moco", strategy, epochs=epochs), data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("text", "says"), [("2,x", "--epochs 2,x: give a number, or one"), ("2,0", "epochs is 2,0")])
def test_numbers_that_are_none_are_a_sentence(text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = command.main(["demo", "moco", "pnr", "--data", "nowhere", "--epochs", text])
    except SystemExit as end:  # by the parser
        status = int(end.code or 0)
    said = capsys.readouterr()
    assert status == 2 and says in said.err + said.out
