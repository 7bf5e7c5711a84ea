"""Whole runs: scenarios, options, exports, and what is refused."""

import dataclasses
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from rich.console import Console
from safetensors.torch import load_file
from small_runs import lines, losses, prepared, run, tiny
from torch import Tensor

from fastcssl import ops
from fastcssl.config.config import ExpectConfig
from fastcssl.errors import Diverged, UserError
from fastcssl.learn import encoder_file, nets
from fastcssl.learn.encoders import EncoderConfig, untrained
from fastcssl.learn.methods import BankConfig
from fastcssl.learn.precision import strides_over_a_pixel
from fastcssl.runs import checkpoint
from fastcssl.runs.checkpoint import CheckpointError
from fastcssl.runs.ownership import own
from fastcssl.train.meter import Meter
from fastcssl.train.watch import Decision, Watch


@pytest.fixture(scope="session")
def two_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("two") / "data")


def _console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=100), text


@pytest.mark.parametrize(
    ("scenario", "tasks", "method", "strategy"),
    [("class", 10, "moco", "pnr"), ("domain", 4, "simclr", "pnr"), ("data", 3, "byol", "cassle")],
)
def test_scenarios_train_through_and_leave_an_encoder_a_task(
    tmp_path: Path, scenario: str, tasks: int, method: str, strategy: str
) -> None:
    source = "classes=20,train=8,val=2" if scenario == "class" else "classes=20,train=4,val=4"
    data = prepared(tmp_path / "data", scenario, tasks, source)
    outcome = run(tiny(method, strategy, epochs=1, online_probe="every=0"), data, tmp_path / "run")
    assert outcome.status == "finished"
    assert [report.task for report in outcome.tasks] == list(range(tasks))
    assert all(0 <= report.accuracy["knn"] <= 1 for report in outcome.tasks)
    files = sorted(path.name for path in (tmp_path / "run/encoders").iterdir())
    assert files == sorted(f"task{number}.safetensors" for number in range(tasks))
    weights = [load_file(tmp_path / f"run/encoders/task{number}.safetensors")["conv1.weight"] for number in (0, 1)]
    assert not torch.equal(*weights)
    terms = {line["task"]: set(line["terms"]) for line in lines(tmp_path / "run")}
    assert terms[0] == {"loss"} and len(terms[1]) == 2


def test_an_exported_encoder_is_torchvisions(tmp_path: Path, two_tasks: Path) -> None:
    found = tiny("byol", "finetune", encoder=nets.EncoderConfig(name="resnet18"), epochs=1)
    run(found, two_tasks, tmp_path / "run", start_from=None)
    path = tmp_path / "run/encoders/task1.safetensors"
    model = torchvision.models.resnet18()
    model.fc = torch.nn.Identity()
    model.load_state_dict(load_file(path), strict=True)
    image = torch.randn(1, 3, 32, 32)
    assert torch.equal(model.eval()(image), encoder_file.load_encoder(path)(image))


def test_joint_training_is_one_task_of_all_images(tmp_path: Path, two_tasks: Path) -> None:
    outcome = run(tiny("simclr", "joint", epochs=1), two_tasks, tmp_path / "run")
    assert [(report.num_images, report.name) for report in outcome.tasks] == [(80, "all 2 tasks")]
    assert (tmp_path / "run/encoders/joint.safetensors").is_file()


def test_the_parity_probe_learns_at_its_own_rate(tmp_path: Path, two_tasks: Path) -> None:
    found = tiny("simclr", "joint", epochs=1, online_probe="every=1,parity", probe_lr=0.7)
    constant = dataclasses.replace(found.config.optim, schedule="constant")
    found = dataclasses.replace(found, config=dataclasses.replace(found.config, optim=constant))
    run(found, two_tasks, tmp_path / "run")
    groups = checkpoint.load(tmp_path / "run/checkpoints/task-0.pt")["parity"]["optimizer"]["param_groups"]
    assert {group["lr"] for group in groups} == {0.7}


def test_only_one_task(tmp_path: Path, two_tasks: Path) -> None:
    outcome = run(tiny("moco", "finetune", only_task=1, epochs=1), two_tasks, tmp_path / "run")
    assert len(outcome.tasks) == 1 and (tmp_path / "run/encoders/task1.safetensors").is_file()


@pytest.mark.parametrize("at_task_start", ["keep", "reset", "prefill"])
def test_banks_at_the_start_of_a_task(
    tmp_path: Path, two_tasks: Path, monkeypatch: pytest.MonkeyPatch, at_task_start: str
) -> None:
    """The bank is larger than a task: 40 images, 64 rows."""
    filled: list[list[int]] = []
    found = tiny(epochs=1)
    method = dataclasses.replace(found.config.method, bank=BankConfig(size=64, at_task_start=at_task_start))
    begin = Meter.__init__

    def look(self: Meter, run_: Any, *rest: Any) -> None:  # called once a task, after the banks were renewed
        filled.append([int(bank.filled) for bank in (*run_.method.banks, *run_.strategy.banks)])
        begin(self, run_, *rest)

    monkeypatch.setattr(Meter, "__init__", look)
    found = dataclasses.replace(found, config=dataclasses.replace(found.config, method=method))
    run(found, two_tasks, tmp_path / "run")
    # Two batches of 16 in task 0; a prefill of the 32 images that whole batches hold.
    expected = {"keep": [32, 32, 0, 0], "reset": [0, 0, 0, 0], "prefill": [32, 32, 32, 32]}
    assert filled == [[0, 0], expected[at_task_start]]


def test_micro_batches_push_each_and_step_once(
    tmp_path: Path, two_tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[int] = []
    fused = ops.info_nce_enqueue

    def record(*arguments: Any, **options: Any) -> Tensor:
        pushed.extend(len(keys) for keys in arguments[4])
        return fused(*arguments, **options)

    monkeypatch.setattr(ops, "info_nce_enqueue", record)
    run(tiny("moco", "finetune", accumulate=4, epochs=1, only_task=0), two_tasks, tmp_path / "run")
    assert pushed == [4] * 4 * 2 * 2  # four parts of a batch, two views, two steps
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2]


def test_micro_batches_of_an_in_batch_method_are_warned_of(tmp_path: Path, two_tasks: Path) -> None:
    console, text = _console()
    run(tiny("simclr", "finetune", accumulate=2, epochs=1, only_task=0), two_tasks, tmp_path / "run", console=console)
    assert "sees only 8 at a time" in text.getvalue()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains(tmp_path: Path, two_tasks: Path, precision: str) -> None:
    run(tiny("moco", "pnr", precision=precision, epochs=1), two_tasks, tmp_path / "half")
    run(tiny("moco", "pnr", precision="fp32", epochs=1), two_tasks, tmp_path / "full")
    for (_, half), (_, full) in zip(losses(tmp_path / "half"), losses(tmp_path / "full"), strict=True):
        assert half.keys() == full.keys()
        assert sum(half.values()) == pytest.approx(sum(full.values()), rel=0.1, abs=0.1)
    assert losses(tmp_path / "half") != losses(tmp_path / "full")


def test_compiled_training_is_the_same(tmp_path: Path, two_tasks: Path) -> None:
    """By the tracer alone, which is what may fail; test_methods compiles the rest of the way.

    A task has a module of its own: the tracer's limit of modules must not end compiling after some tasks.
    """
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        run(tiny("moco", "pnr", epochs=1, compile="eager"), two_tasks, tmp_path / "compiled")
    run(tiny("moco", "pnr", epochs=1), two_tasks, tmp_path / "plain")
    for (_, compiled), (_, plain) in zip(losses(tmp_path / "compiled"), losses(tmp_path / "plain"), strict=True):
        assert compiled == pytest.approx(plain, rel=1e-4, abs=1e-4)


def test_another_strategy_starts_from_a_shared_task(tmp_path: Path, two_tasks: Path) -> None:
    """As if it had trained the first task itself."""
    run(tiny("moco", "finetune", epochs=1), two_tasks, tmp_path / "shared", resume="auto")
    run(tiny("moco", "pnr", epochs=1), two_tasks, tmp_path / "whole")
    outcome = run(tiny("moco", "pnr", epochs=1), two_tasks, tmp_path / "branch", start_from=f"{tmp_path}/shared@0")
    assert outcome.status == "finished" and len(outcome.tasks) == 2
    assert losses(tmp_path / "branch") == losses(tmp_path / "whole")[2:]
    for task in (0, 1):  # its evaluation needs the first task's too
        mine, same = (
            load_file(tmp_path / folder / f"encoders/task{task}.safetensors") for folder in ("branch", "whole")
        )
        assert mine.keys() == same.keys() and all(torch.equal(mine[key], same[key]) for key in mine)
    with pytest.raises(CheckpointError, match=r"optim\.lr"):
        other = tiny("moco", "pnr", epochs=1)
        optim = dataclasses.replace(other.config.optim, lr=0.123)
        other = dataclasses.replace(other, config=dataclasses.replace(other.config, optim=optim))
        run(other, two_tasks, tmp_path / "refused", start_from=f"{tmp_path}/shared@0")
    with pytest.raises(UserError, match=r"finished tasks 0, 1"):
        run(tiny(), two_tasks, tmp_path / "refused", start_from=f"{tmp_path}/shared@7")


def test_the_run_folder_says_what_was_trained(tmp_path: Path, two_tasks: Path) -> None:
    console, text = _console()
    run(tiny("moco", "pnr", epochs=1, online_probe="every=1"), two_tasks, tmp_path / "run", console=console)
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["config"]["method"]["bank"]["size"] == 40
    assert saved["sources"]["optim.lr"]
    for words in ("k-NN", "classes 11-20", str(tmp_path / "run/encoders")):
        assert words in text.getvalue()
    assert len(lines(tmp_path / "run", "probe")) == 2
    assert {event["what"] for event in lines(tmp_path / "run", "event")} == {"checkpoint", "probe", "finished"}
    assert all(event["stall_s"] >= 0 for event in lines(tmp_path / "run", "event") if event["what"] == "checkpoint")


# ---- Bad input and faults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch_size": 64}, "40 training images, fewer than one batch of 64"),
        ({"accumulate": 3}, "cannot be shared equally by 1 x 3"),
        ({"batch_size": 41}, "fewer than one batch"),
        ({"only_task": 2}, "tasks 0 to 1"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path: Path, two_tasks: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        run(tiny(**changes), two_tasks, tmp_path / "run")


def test_a_bank_smaller_than_a_batch_is_refused(tmp_path: Path, two_tasks: Path) -> None:
    found = tiny()
    method = dataclasses.replace(found.config.method, bank=BankConfig(size=8))
    found = dataclasses.replace(found, config=dataclasses.replace(found.config, method=method))
    with pytest.raises(UserError, match=r"8 rows, fewer than a batch of 16.*--method\.bank\.size 16"):
        run(found, two_tasks, tmp_path / "run")


def test_data_split_for_other_tasks_is_refused_with_the_command(tmp_path: Path, two_tasks: Path) -> None:
    found = tiny()
    expect = ExpectConfig(scenario="class", num_tasks=5)
    found = dataclasses.replace(found, config=dataclasses.replace(found.config, expect=expect))
    with pytest.raises(UserError, match=r"5 class tasks.*2 class tasks.*fastcssl-prep split .* --tasks 5"):
        run(found, two_tasks, tmp_path / "run")


def test_pn1_needs_negatives(tmp_path: Path, two_tasks: Path) -> None:
    found = tiny("byol", "pnr")
    strategy = dataclasses.replace(found.config.strategy, pn1=False)
    found = dataclasses.replace(found, config=dataclasses.replace(found.config, strategy=strategy))
    with pytest.raises(UserError, match="byol has no negatives"):
        run(found, two_tasks, tmp_path / "run")


def test_a_loss_that_is_not_finite_stops_with_a_saved_state(
    tmp_path: Path, two_tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = Watch.decide

    def poison(self: Watch, step: int, terms: dict[str, torch.Tensor], *, last: bool) -> Decision:
        return decide(self, step, {k: v * float("nan") if step == 3 else v for k, v in terms.items()}, last=last)

    with monkeypatch.context() as patch:
        patch.setattr(Watch, "decide", poison)
        with pytest.raises(Diverged, match=r"not finite at step 3 \(loss nan\).*failed-step-00000003"):
            run(tiny("moco", "finetune"), two_tasks, tmp_path / "run")
    assert (tmp_path / "run/checkpoints/failed-step-00000003.pt").is_file()
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "failed"
    # It is never resumed from: the next start begins again, and finishes.
    assert run(tiny("moco", "finetune"), two_tasks, tmp_path / "run").status == "finished"


def test_a_full_disk_spoils_neither_the_run_nor_the_last_checkpoint(
    tmp_path: Path, two_tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint._write_file

    def full(path: Path, step: int, *args: Any) -> None:
        if step == 3:
            raise OSError(28, "No space left on device")
        write(path, step, *args)

    monkeypatch.setattr(checkpoint, "_write_file", full)
    console, text = _console()
    outcome = run(tiny(run={"checkpoint_minutes": 0.0}), two_tasks, tmp_path / "run", console=console)
    assert outcome.status == "finished"
    assert "No space left on device" in text.getvalue() and "step-00000002.pt is still intact" in text.getvalue()


def test_a_corrupt_image_is_replaced_and_told_once(tmp_path: Path) -> None:
    data = prepared(tmp_path / "data", source="classes=20,train=4,val=2,size=mixed")
    table = np.load(data / "samples.npy", allow_pickle=False)
    sample = table[~table["is_val"]][0]
    shard = data / json.loads((data / "manifest.json").read_text())["shards"][int(sample["tar_shard"])]["path"]
    with shard.open("r+b") as file:
        file.seek(int(sample["tar_place"]))
        file.write(bytes(64))
    console, text = _console()
    assert run(tiny("simclr", "finetune"), data, tmp_path / "run", console=console).status == "finished"
    told = " ".join(text.getvalue().split())
    assert told.count("1 stored image could not be decoded") == 1 and f"such as sample {sample['id']} in" in told
    (event,) = [line for line in lines(tmp_path / "run", "event") if line["what"] == "replaced"]
    assert event["count"] == 1 and list(event["samples"]) == [str(sample["id"])]


def test_two_processes_do_not_share_a_folder(tmp_path: Path, two_tasks: Path) -> None:
    for resume in ("auto", "never"):  # to start over must not rename the folder of a run that is training
        with own(tmp_path / "run"), pytest.raises(UserError, match="Another process is training"):
            run(tiny(), two_tasks, tmp_path / "run", resume=resume)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_stopping_after_a_task_that_does_not_exist_is_refused(tmp_path: Path, two_tasks: Path) -> None:
    with pytest.raises(UserError, match="--stop-after-task 2: this run has 2 tasks, 0 to 1"):
        run(tiny(run={"stop_after_task": 2}), two_tasks, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_stops_and_the_next_start_goes_on(
    tmp_path: Path, two_tasks: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    whole = run(tiny(), two_tasks, tmp_path / "whole")
    decide = Watch.decide

    def interrupt(self: Watch, step: int, terms: dict[str, torch.Tensor], *, last: bool) -> Decision:
        if step == 5:
            os.kill(os.getpid(), number)
        return decide(self, step, terms, last=last)

    with monkeypatch.context() as patch:
        patch.setattr(Watch, "decide", interrupt)
        outcome = run(tiny(), two_tasks, tmp_path / "run")
    assert (outcome.status, outcome.signal) == ("stopped", number)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")[:5]
    again = run(tiny(), two_tasks, tmp_path / "run")
    assert again.status == "finished" and len(again.tasks) == len(whole.tasks)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_no_bfloat16_where_torch_strides_over_a_single_pixel() -> None:
    """A gradient of weights that only met padding is what happened to be in memory."""
    stems = {"imagenet": (16, 17), "cifar": (2, 3)}
    for stem, (small, enough) in stems.items():
        encoder = untrained(EncoderConfig(name="resnet18-w8", stem=stem), 32)  # type: ignore[arg-type]
        assert strides_over_a_pixel(encoder, small) and not strides_over_a_pixel(encoder, enough)
        assert encoder.training and not any(layer._forward_pre_hooks for layer in encoder.modules())


def test_that_bfloat16_is_refused_where_it_is_asked_for(two_tasks: Path, tmp_path: Path) -> None:
    asked = tiny(precision="bf16", encoder=EncoderConfig(name="resnet18-w8"))
    with pytest.raises(UserError, match="images of 16 px to a single pixel"):
        run(asked, two_tasks, tmp_path / "run")
