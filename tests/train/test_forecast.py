"""What --dry-run says, against numbers counted by hand."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import prep_ok
from rich.console import Console

import fastcssl.train.forecast as forecasting
from fastcssl.config.config import Config
from fastcssl.config.recipes import recipe
from fastcssl.data.backends import LoaderError
from fastcssl.errors import UserError
from fastcssl.learn.encoder_file import save_encoder
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.learn.nets import build_encoder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("forecast") / "data"
    prep_ok("build", "synthetic:train=8,val=2", "--scenario", "class", "--tasks", 3, "--out", out)
    return out


def demo(method: str = "moco", strategy: str = "pnr", **changes: Any) -> Config:
    config = recipe("demo", method, strategy).config
    if method == "moco":
        bank = dataclasses.replace(config.method.bank, size=64)  # type: ignore[attr-defined]
        config = dataclasses.replace(config, method=dataclasses.replace(config.method, bank=bank, hidden=256, dim=64))  # type: ignore[call-arg]
    optim = dataclasses.replace(config.optim, lr=0.6, warmup_epochs=2, warmup_start_lr=0.003, schedule="warmup-cosine")
    small = {"encoder": EncoderConfig(name="resnet18-w8", stem="cifar"), "batch_size": 16, "epochs": 10, "optim": optim}
    return dataclasses.replace(config, **{**small, **changes})


def text_of(made: forecasting.Forecast) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(forecasting.shown(made))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    return " ".join(" ".join(lines).split())


def test_a_measured_forecast_shows_everything(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasting, "_LOADER_SECONDS", 0.05)
    monkeypatch.setattr(forecasting, "_ENOUGH_SECONDS", 0.0)
    torch.set_num_threads(1)
    made = forecasting.forecast(demo(epochs=7), data, 1, CPU)
    text = text_of(made)
    # 80 images a task: 5 steps an epoch, 35 a task.
    assert "classes 1-10 80 7 5 35" in text and "all 240 105" in text
    assert "learning rate 0.0375 (0.6 x 16 / 256), from 0.003 in 2 epochs, then a cosine to 0 over 7 epochs" in text
    for word in ("memory about", "disk about", "activations", "loader resident", "images/s", "without loading", "time"):
        assert word in text
    assert "scaled from 4 to 16 images" in text
    assert made.speed is not None and made.seconds is not None
    assert made.seconds == pytest.approx(105 * (made.speed.seconds_per_step + 16 / made.speed.images_per_s_loaded))


def test_a_warm_up_that_does_not_end_is_said(data: Path) -> None:
    made = forecasting.forecast(demo(epochs=2), data, 1, CPU, measure=False)
    assert "the warm-up of 2 epochs does not end within 2" in text_of(made)
    assert "not measured" in text_of(made)


def test_forecast_counts_what_is_there(data: Path, tmp_path: Path) -> None:
    config = demo()
    made = forecasting.forecast(config, data, 2, CPU, measure=False)
    assert made.speed is None and made.seconds is None
    assert made.local_batch == 8 and made.lr_peak == pytest.approx(0.6 * 16 / 256)
    assert [(task.num_images, task.num_steps) for task in made.tasks] == [(80, 50)] * 3
    # In a second task PNR has two banks of its own; each bank is 64 x 64 floats and two counters.
    assert made.memory["banks"] == 4 * (64 * 64 * 4 + 2 * 8)
    encoder = build_encoder(config.encoder, seed=0)
    projector = 64 * 256 + 256 + 256 * 64 + 64
    predictor = 64 * 2048 + 2048 + 2 * 2048 + 2048 * 64 + 64
    assert made.num_parameters == sum(p.numel() for p in encoder.parameters()) + projector + predictor
    assert made.memory["optimiser"] == 2 * 4 * made.num_parameters  # AdamW keeps two numbers for each
    save_encoder(tmp_path / "encoder.safetensors", encoder, config.encoder, {})
    on_disk = (tmp_path / "encoder.safetensors").stat().st_size
    assert made.disk["encoders"] == pytest.approx(3 * on_disk, rel=0.1)
    # Activations grow with the micro-batch alone.
    double = dataclasses.replace(config, batch_size=32)
    twice = forecasting.forecast(double, data, 2, CPU, measure=False)
    assert twice.memory["activations"] == pytest.approx(2 * made.memory["activations"], rel=0.05)
    parts = dataclasses.replace(double, accumulate=2)
    halves = forecasting.forecast(parts, data, 2, CPU, measure=False)
    assert halves.memory["activations"] == made.memory["activations"]


def test_forecast_of_joint_training_is_one_task(data: Path) -> None:
    made = forecasting.forecast(demo("byol", "joint"), data, 1, CPU, measure=False)
    assert [(task.name, task.num_images, task.steps_per_epoch) for task in made.tasks] == [("all 3 tasks", 240, 15)]
    assert "banks" not in made.memory


def test_time_is_what_the_slower_one_takes_beside_a_gpu() -> None:
    speed = forecasting.Speed(seconds_per_step=0.5, num_measured=8, num_wanted=8, images_per_s_loaded=80.0)
    assert speed.seconds(10, 8, torch.device("cpu")) == pytest.approx(6.0)  # they share the cores
    assert speed.seconds(10, 8, torch.device("cuda")) == pytest.approx(5.0)
    assert speed.seconds(10, 80, torch.device("cuda")) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("changes", "world_size", "says"),
    [
        ({"batch_size": 81}, 1, "fewer than one batch of 81"),
        ({"batch_size": 66}, 1, "--method.bank.size 66 or more"),
        ({"accumulate": 3}, 1, "Use a multiple of 3"),
        ({}, 3, "Use a multiple of 3"),
        ({}, 16, "less than 2 images"),
    ],
)
def test_what_training_would_refuse(changes: dict[str, Any], world_size: int, says: str, data: Path) -> None:
    with pytest.raises(UserError, match=says):
        forecasting.forecast(demo(**changes), data, world_size, CPU, measure=False)


def test_a_loader_that_cannot_read_the_data(data: Path) -> None:
    with pytest.raises(LoaderError, match="reads tar"):
        forecasting.forecast(demo(loader="native"), data, 1, CPU, measure=False)
