"""The metrics file across crashes and resumes, where else metrics go, and the arithmetic of speed."""

import json
import math
import os
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import backend

from fastcssl.runs import timing
from fastcssl.runs.log import (
    EpochReport,
    ProbeReport,
    RunLog,
    RunLogError,
    StepReport,
    TaskReport,
    read_reports,
)
from fastcssl.runs.ownership import RunFolderError
from fastcssl.runs.timing import DeviceIdle, Rates

STEPS_PER_EPOCH = 5


def step_report(step: int, **changes: Any) -> StepReport:
    """A run of one task whose epochs have five steps; `step` counts from 1."""
    epoch, batch = divmod(step - 1, STEPS_PER_EPOCH)
    values = {
        "step": step,
        "task": 0,
        "epoch": epoch,
        "batch": batch,
        "lr": 0.3 / step,
        "loss": 1 / (step + 2) + 0.1,
        "terms": {"plasticity": 1 / (step + 2), "stability": 0.1},
        "images_per_s": 1834.5,
        "data_wait_share": 0.004,
    }
    return StepReport(**{**values, **changes})


def lines_of(folder: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def run(folder: Path, first: int, last: int, resume_step: int | None = None) -> None:
    """Steps `first` to `last`, with what is written at the ends of epochs, also when resumed exactly there."""
    log = RunLog(folder, resume_step=resume_step)
    for step in range(first, last + 1):
        if step > (resume_step or 0):
            log.write(step_report(step))
        if step % STEPS_PER_EPOCH == 0:
            end_epoch(log, step)
    log.close()


def end_epoch(log: RunLog, step: int) -> None:
    log.write(
        EpochReport(
            step=step,
            task=0,
            epoch=step // STEPS_PER_EPOCH - 1,
            lr=0.1,
            loss=0.5 * step,
            terms={"plasticity": 0.25 * step},
            images_per_s=1.0,
            data_wait_share=0.0,
            seconds=2.0,
        )
    )
    log.write(ProbeReport(step=step, task=0, accuracy={"knn": 0.25}))


def test_lines_hold_what_was_reported(tmp_path: Path) -> None:
    with RunLog(tmp_path / "new" / "run") as log:
        log.write(step_report(1))
        log.write(step_report(2, device_idle_share=0.25))
        log.event("checkpoint", step=2, stall_s=0.5)
        log.write(
            TaskReport(
                step=2,
                task=0,
                name="nan",  # a class may be called so
                num_images=10,
                num_epochs=1,
                loss=1.5,
                images_per_s=9.0,
                data_wait_share=0.0,
                seconds=3.0,
                accuracy={"knn": 0.5},
            )
        )
    first, second, event, task = lines_of(tmp_path / "new" / "run")
    assert list(first)[:2] == ["kind", "step"] and first["kind"] == "step"
    assert first["terms"] == {"plasticity": 1 / 3, "stability": 0.1} and first["batch"] == 0
    assert "device_idle_share" not in first and second["device_idle_share"] == 0.25
    assert event == {"kind": "event", "step": 2, "what": "checkpoint", "stall_s": 0.5}
    assert task["accuracy"] == {"knn": 0.5} and task["num_images"] == 10
    assert read_reports(tmp_path / "new" / "run", StepReport) == [
        step_report(1),
        step_report(2, device_idle_share=0.25),
    ]
    assert read_reports(tmp_path / "new" / "run", TaskReport)[0].name == "nan"
    assert read_reports(tmp_path / "nothing", TaskReport) == []


def test_a_line_is_there_once_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    log = RunLog(tmp_path)
    log.write(step_report(1))
    assert [line["step"] for line in lines_of(tmp_path)] == [1] and not synced
    log.sync()
    assert len(synced) == 1
    log.close()


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    rng = random.Random(5)
    values = [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(500)]
    values += [0.1, -0.0, 5e-324, sys.float_info.max, 1 / 3, 2.0**53 + 2]
    with RunLog(tmp_path) as log:
        for number, value in enumerate(values):
            log.write(step_report(number + 1, loss=value, terms={"one": value}))
    for value, report in zip(values, read_reports(tmp_path, StepReport), strict=True):
        for read in (report.loss, report.terms["one"]):
            assert struct.pack("<d", read) == struct.pack("<d", value) or (math.isnan(read) and math.isnan(value))


def test_what_is_not_finite_is_text_that_float_takes(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write(step_report(1, loss=math.nan, terms={"up": math.inf, "down": -math.inf}))
    (line,) = lines_of(tmp_path)
    assert (line["loss"], line["terms"]) == ("nan", {"up": "inf", "down": "-inf"})
    (report,) = read_reports(tmp_path, StepReport)
    assert math.isnan(report.loss) and report.terms == {"up": math.inf, "down": -math.inf}


def test_tensors_and_numpy_scalars_are_numbers(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write(step_report(1, loss=torch.tensor(1 / 3, dtype=torch.float64), terms={"a": np.float32(0.5)}))
        log.event("probe", step=1, confusion=[np.int64(3), (torch.tensor(4),)])
    step, event = lines_of(tmp_path)
    assert step["loss"] == 1 / 3 and step["terms"] == {"a": 0.5} and event["confusion"] == [3, [4]]


@pytest.mark.parametrize("checkpoint", [0, 3, 5, 7, 10, 12])
def test_a_resumed_run_reads_as_one_uninterrupted(tmp_path: Path, checkpoint: int) -> None:
    run(tmp_path / "whole", 1, 20)
    run(tmp_path / "resumed", 1, 12)
    with (tmp_path / "resumed" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 2, "ta')
    run(tmp_path / "resumed", max(checkpoint, 1), 20, resume_step=checkpoint)
    assert (tmp_path / "resumed" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert sorted(path.name for path in (tmp_path / "resumed").iterdir()) == ["metrics.jsonl"]


@pytest.mark.parametrize("num_lost", [0, 1, 2])
def test_a_checkpoint_may_be_older_than_the_lines_of_its_step(tmp_path: Path, num_lost: int) -> None:
    run(tmp_path / "whole", 1, 15)
    run(tmp_path / "resumed", 1, 10)
    file = tmp_path / "resumed" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[: len(lines) - num_lost]))  # killed after the checkpoint, before these
    run(tmp_path / "resumed", 10, 15, resume_step=10)
    assert file.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_what_a_power_cut_leaves_is_dropped(tmp_path: Path) -> None:
    run(tmp_path, 1, 4)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(
            b'\0\0\0\n[1]\n{"kind": "step"}\n\xff\n' + json.dumps({"kind": "event", "step": 4, "what": "x"}).encode()
        )
    RunLog(tmp_path, resume_step=4).close()
    assert [line["kind"] for line in lines_of(tmp_path)] == ["step"] * 4 + ["event"]
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")  # whole, but for its line's end


def test_a_new_run_begins_empty(tmp_path: Path) -> None:
    run(tmp_path, 1, 4)
    RunLog(tmp_path, resume_step=None).close()
    assert lines_of(tmp_path) == []


def test_the_silent_log_takes_everything_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with RunLog.silent() as log:
        assert isinstance(log, RunLog)
        log.write(step_report(1))
        log.event("checkpoint", step=1)
        log.sync()
    public = {name for name in vars(RunLog) if not name.startswith("_")}
    assert public == {"silent", "write", "event", "sync", "close"}  # a new one must be silenced, too
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr() == ("", "")


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunFolderError, match=r"Cannot write .*file \(File exists\)\. Check the disk or use another --out"
    ):
        RunLog(tmp_path / "file")


def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    with log._file, open("/dev/full", "w") as full:  # what is written there meets a full disk
        os.dup2(full.fileno(), log._file.fileno())
        with pytest.raises(
            RunFolderError, match=r"Cannot write .*No space left.* Free some space .* run the same command again"
        ):
            log.write(step_report(1))
        with pytest.raises(RunFolderError, match="No space left"):
            log.close()


@pytest.mark.parametrize(
    ("option", "module", "package"),
    [("tensorboard", "torch.utils.tensorboard", "tensorboard"), ("wandb", "wandb", "wandb")],
)
def test_a_missing_package_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, module: str, package: str
) -> None:
    run(tmp_path, 1, 4)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RunLogError, match=f"pip install {package}"):
        RunLog(tmp_path, **{option: True})
    assert len(lines_of(tmp_path)) == 4  # refused before anything was touched


def test_tensorboard(tmp_path: Path) -> None:
    backend("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    with RunLog(tmp_path, tensorboard=True) as log:
        log.write(step_report(1))
        log.write(ProbeReport(step=1, task=0, accuracy={"knn": 0.5}))
    (file,) = (tmp_path / "tensorboard").iterdir()
    tags = {value.tag for event in EventFileLoader(str(file)).Load() for value in event.summary.value}
    assert {"step/loss", "step/terms/plasticity", "step/lr", "probe/accuracy/knn"} <= tags


class FakeWandb(ModuleType):
    Error = type("Error", (Exception,), {})
    Settings = SimpleNamespace

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.refusal: Exception | None = None

    def init(self, **options: Any) -> Any:
        if self.refusal:
            raise self.refusal
        self.runs.append(options)
        return SimpleNamespace(log=self.logged.append, finish=lambda: None, define_metric=lambda *_, **__: None)


def test_wandb_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for resume_step in (None, 1):
        with RunLog(tmp_path, resume_step=resume_step, wandb=True, wandb_project="p", config={"lr": 1}) as log:
            log.write(step_report(2, loss=math.inf))
    first, second = fake.runs
    assert first["id"] == second["id"] and first["resume"] == "allow" and first["project"] == "p"
    assert first["config"] == {"lr": 1} and "mode" not in first  # WANDB_MODE decides
    assert fake.logged[0]["steps_done"] == 2 and fake.logged[0]["step/loss"] == math.inf
    fake.refusal = fake.Error("no key")
    with pytest.raises(RunLogError, match=r"no key.*WANDB_MODE=offline"):
        RunLog(tmp_path, wandb=True)


def test_rates_over_the_window_and_over_all() -> None:
    rates = Rates(window=2)
    assert (rates.images_per_s, rates.wait_share, rates.mean_images_per_s, rates.mean_wait_share) == (0, 0, 0, 0)
    rates.step(100, 3.0, 4.0)
    rates.step(100, 0.5, 1.0)
    rates.step(200, 0.0, 3.0)
    assert rates.images_per_s == 300 / 4 and rates.wait_share == 0.5 / 4
    assert rates.mean_images_per_s == 400 / 8 and rates.mean_wait_share == 3.5 / 8
    assert (rates.num_images, rates.seconds, rates.wait_seconds) == (400, 8.0, 3.5)


class FakeEvent:
    """A device whose clock the test turns: events pass once it has reached them."""

    times: ClassVar[Iterator[float]]
    now: ClassVar[float]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        assert stream == "stream of cuda:0"
        self.at = next(self.times)

    def query(self) -> bool:
        return self.at <= self.now

    def elapsed_time(self, later: "FakeEvent") -> float:
        assert later.query(), "read before it has passed"
        return later.at - self.at


def test_device_idle_counts_the_gaps_between_finished_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    # Begin and end of four steps: gaps of 1 and 5 ms, and one of 50 that a probe took.
    FakeEvent.times = iter([0.0, 9.0, 10.0, 20.0, 25.0, 30.0, 80.0, 100.0])
    idle = DeviceIdle(torch.device("cuda:0"))
    FakeEvent.now = -1.0  # the device has not begun
    for _ in range(2):
        idle.begin()
        idle.end()
    assert idle.share is None
    FakeEvent.now = 26.0  # in the third step
    idle.begin()
    idle.end()
    assert idle.share == 1 / 20
    idle.pause()
    FakeEvent.now = 100.0
    idle.begin()
    idle.end()
    assert idle.share == 6 / (30 + 20)


@pytest.mark.parametrize(
    ("case", "launch_ms", "now", "launched_ms"),
    [
        ("the card finished with the host", 19, 10.0, 20),
        ("the card computed longer than the host launched", 9, 10.0, 0),
        ("the card still had the step before to do", 19, 8.0, 0),
    ],
)
def test_steps_at_the_hosts_pace_are_told_from_the_models(
    case: str, launch_ms: float, now: float, launched_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    FakeEvent.times = iter([0.0, 9.0, 10.0, 30.0])  # the second step takes the card 20 ms
    clock = iter([0.0, 0.0, 1.0, 1.0 + launch_ms / 1000])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    idle = DeviceIdle(torch.device("cuda:0"))
    FakeEvent.now = -1.0
    idle.begin()
    idle.end()
    FakeEvent.now = now
    idle.begin()
    FakeEvent.now = 30.0
    idle.end()
    assert idle.launch_seconds == pytest.approx(launched_ms / 1000), case


def test_device_idle_is_unknown_on_a_cpu() -> None:
    idle = DeviceIdle(torch.device("cpu"))
    idle.begin()
    idle.end()
    assert idle.share is None
