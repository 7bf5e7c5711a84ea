"""What bounded a run: from timings made up for each case, and from a real run's own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import lines, prepared, run, tiny

from fastcssl.data.backends import usual_threads
from fastcssl.data.loader import Loader, LoaderConfig
from fastcssl.data.policies import policy
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.runs.bottleneck import NAMES, Machine, verdict
from fastcssl.runs.timing import LOADER, MAIN, StageTimes, total

GPU = Machine(device="cuda", precision="bf16", num_threads=4, num_cores=16)
CPU = Machine(device="cpu", num_threads=2, num_cores=2)


def times(main: dict[str, float], loader: dict[str, float] | None = None, **device: float) -> list[dict[str, Any]]:
    return [{"main": main, "loader": loader or {}, "device": device}]


@pytest.mark.parametrize(
    ("expected", "measured", "machine", "advice"),
    [
        ("disk", times({"wait": 9, "model": 1}, {"read": 30, "decode": 5, "crop": 3}), CPU, "faster disk"),
        ("decode", times({"wait": 6, "model": 4}, {"read": 1, "decode": 20, "crop": 6}), CPU, "--resize"),
        ("decode", times({"wait": 6, "model": 4}, {"decode": 20, "crop": 6}, idle=7), GPU, "--num-threads 16"),
        ("augmentation", times({"wait": 6, "model": 4}, {"decode": 5, "crop": 4, "photometric": 4}), CPU, "cores"),
        ("augmentation", times({"augment": 6, "model": 4}), Machine(augment="torch"), "--augment fused"),
        ("transfer", times({"wait": 0.1, "model": 9.9}, idle=8, transfer=7), GPU, "--loader resident"),
        ("host", times({"wait": 0.1, "model": 9.9}, idle=8, transfer=0.5), GPU, "--compile inductor"),
        ("host", times({"wait": 0.1, "model": 9.9}, idle=1, launch=7), GPU, "--compile inductor"),
        ("model", times({"wait": 0.1, "model": 9.9}, idle=1, launch=2), GPU, "--compile inductor"),
        ("model", times({"wait": 1, "model": 9}, {"decode": 5}), CPU, "GPU"),
        ("model", times({"wait": 8, "model": 2}, {"decode": 5}, idle=0.5, transfer=3), GPU, "--compile inductor"),
        ("model", times({"model": 9}), Machine(device="cuda"), "--precision bf16"),
        ("probe", times({"wait": 1, "model": 3, "probe": 5}), CPU, "--online-probe"),
        ("checkpoint", times({"model": 3, "checkpoint": 5}), CPU, "--checkpoint-minutes"),
        ("strategy", times({"model": 3, "strategy": 5}), CPU, "budget"),
        ("data", times({"wait": 6, "model": 4}), Machine(loader="dali"), "cores"),
        ("data", times({"wait": 6, "model": 4}), Machine(loader="ffcv"), "--loader auto"),
    ],
)
def test_each_stage_is_named_with_a_setting_that_helps(
    expected: str, measured: list[dict[str, Any]], machine: Machine, advice: str
) -> None:
    found = verdict(measured, machine)
    assert found is not None
    assert found.stage == expected
    assert sum(found.shares.values()) == pytest.approx(1)
    assert advice in found.advice
    assert found.sentence.startswith(f"Bottleneck: {NAMES[expected]}")


def test_waiting_counts_as_a_whole_before_it_is_split() -> None:
    """Neither decoding nor augmentation alone took as long as the model, but waiting for both did."""
    found = verdict(times({"wait": 55, "model": 45}, {"decode": 60, "crop": 40}), CPU)
    assert found is not None and found.stage == "decode"
    assert found.shares == pytest.approx({"model": 0.45, "decode": 0.33, "augmentation": 0.22})
    begin = (
        "Bottleneck: decoding. The run waited for data 55 % of the time (decoding 33 %, augmentation 22 %); the model"
    )
    assert found.sentence.startswith(f"{begin} 45 %. ")
    model = verdict(times({"wait": 1, "model": 9}, {"decode": 6, "crop": 4}), CPU)
    assert model is not None
    begin = "Bottleneck: the model (90 % of the time; decoding 6 %, augmentation 4 %). "
    assert model.sentence.startswith(begin)


def test_tasks_are_added_up_and_nothing_measured_is_no_verdict() -> None:
    assert total([*times({"model": 1.0}), *times({"model": 2.0, "wait": 1.0}), {}])["main"] == {"model": 3, "wait": 1}
    assert verdict([], CPU) is None
    assert verdict([{}, *times({"model": 0.0})], CPU) is None


def test_counters_that_begin_anew_go_on_from_the_saved_sums() -> None:
    first = StageTimes()
    first.follow("loader", {"decode": 5.0})
    first.follow("loader", {"decode": 7.0})
    first.step(4.0, {"wait": 1.0, "augment": 0.5, "probe": 0.0})
    first.step(1.0, {"wait": 1.25})  # clocks that disagree by a hair make no negative time
    again = StageTimes()
    again.follow("loader", {"decode": 0.0})
    again.load(first.state())
    again.follow("loader", {"decode": 1.5})
    assert again.loader == {"decode": 3.5}
    assert again.main == {"wait": 2.25, "augment": 0.5, "probe": 0.0, "model": 2.5}


def test_the_engine_times_its_stages(tmp_path: Path) -> None:
    data = Prepared.open(prepared(tmp_path / "data"))
    config = LoaderConfig(policy=policy("pnr-moco-cifar"), batch_size=16, num_threads=2)
    with Loader(data, config) as loader:
        assert loader.stage_seconds() == dict.fromkeys(LOADER, 0.0)
        stream = loader.open(Selection(tasks=(0,)))
        for _ in stream.epoch(0):
            pass
        spent = loader.stage_seconds()
        assert all(np.isfinite(seconds) and seconds > 0 for seconds in spent.values())
        for _ in stream.epoch(1):
            pass
        assert all(loader.stage_seconds()[name] > spent[name] for name in LOADER)
        assert stream.wait_seconds > 0 and stream.device_seconds == {}


def test_a_real_run_says_what_bounded_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = prepared(tmp_path / "data"), tmp_path / "run"
    run(tiny(online_probe="every=0"), data, out)
    machine = Machine(**json.loads((out / "config.json").read_text())["machine"])
    assert (machine.device, machine.loader, machine.num_threads, machine.precision) == ("cpu", "resident", 1, "fp32")
    tasks = lines(out, "task")
    for task in tasks:
        main = task["stages"]["main"]
        assert set(main) <= set(MAIN) and set(task["stages"]["loader"]) == set(LOADER)
        # The parts of its steps are the time of its steps; the probe comes on top.
        assert main["model"] + main["wait"] + main["augment"] == pytest.approx(task["seconds"], rel=0.01)
        assert main["probe"] > 0
    found = verdict([task["stages"] for task in tasks], machine)
    assert found is not None
    assert " ".join(found.sentence.split()) in " ".join(capsys.readouterr().out.split())
    epochs = lines(out, "epoch")
    assert epochs[1]["stages"]["main"]["model"] > epochs[0]["stages"]["main"]["model"]


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    found = []
    for ranks in ("1", "8", "100"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        found.append(usual_threads())
    assert found == [64, 8, 1]
