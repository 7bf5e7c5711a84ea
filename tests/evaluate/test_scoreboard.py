"""What a person sees of an evaluation."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from made_results import evaluation
from rich.console import Console

from fastcssl.evaluate.options import Evaluated
from fastcssl.evaluate.scoreboard import Scoreboard, matrix, summary
from fastcssl.evaluate.targets import ImageStyle, Target
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.runs.results import Metrics, References


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def printed(what: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def board(clock: Clock, *, terminal: bool = False) -> tuple[Scoreboard, io.StringIO]:
    file = io.StringIO()
    return Scoreboard(Console(file=file, width=100, force_terminal=terminal), clock=clock), file


def test_plain_lines_have_a_rate_and_the_time_left() -> None:
    clock = Clock()
    shown, file = board(clock)
    with shown:
        shown.begin("linear · all · 5 encoders", 10_000)
        for _ in range(40):
            clock.now += 1
            shown.advance(100)
    first, line = file.getvalue().splitlines()
    assert first == "linear · all · 5 encoders: 10,000 images to process"
    assert line == "linear · all · 5 encoders  30 %  100 images/s  ETA 1 min 10 s"


def test_a_resumed_probe_has_the_rate_of_now() -> None:
    clock = Clock()
    shown, _ = board(clock)
    shown.begin("linear", 1000, done=900)
    assert shown.images_per_s == 0 and shown.seconds_left is None
    clock.now += 2
    shown.advance(50)
    assert shown.images_per_s == 25 and shown.seconds_left == pytest.approx(2.0)


def test_a_terminal_gets_a_bar() -> None:
    clock = Clock()
    shown, file = board(clock, terminal=True)
    with shown:
        shown.begin("knn · all · 3 encoders", 100)
        clock.now += 1
        shown.advance(50)
        panel = printed(shown.panel())
    assert "knn · all · 3 encoders" in panel and "50 %" in panel and "50 images/s" in panel and "1 s left" in panel
    assert "knn" in file.getvalue()


def target(folder: str = "runs/pnr") -> Target:
    style = ImageStyle(family="cifar", size_px=32, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    return Target(
        folder=Path(folder),
        checkpoints=(),
        style=style,
        encoder=EncoderConfig(),
        method="moco",
        strategy="pnr",
        recipe="demo",
    )


def outcome(lr: float, last: float = 0.625, *, was_there: bool = False) -> Evaluated:
    made = evaluation(
        settings={"lr": lr, "epochs": 100}, metrics=Metrics(A=[0.5, last], numbers={"S": 0.0, "P": -0.25, "F": 0.15})
    )
    return Evaluated(target=target(), path=Path("runs/pnr/evaluations/x.json"), evaluation=made, was_there=was_there)


def test_the_tables_of_a_run() -> None:
    text = printed(summary([outcome(3.0, was_there=True)]))
    for words in ("runs/pnr", "linear", "62.50", "0.00", "-25.00", "evaluated before", "random encoder"):
        assert words in text, words
    assert "single task" not in text and "--tables" in text
    text = printed(summary([outcome(3.0)], tables=True))
    for words in ("runs/pnr · moco pnr · linear · all", "S 0.00", "P -25.00", "F 15.00", "single task", "random"):
        assert words in text, words
    assert "evaluated before" not in text


def test_no_metric_is_shown_as_minus_zero() -> None:
    made = replace(outcome(3.0), evaluation=evaluation(metrics=Metrics(A=[0.5, 0.5], numbers={"P": -1e-9, "F": -1e-3})))
    text = printed(summary([made], tables=True))
    assert "P 0.00" in text and "F -0.10" in text and "-0.00" not in text


def test_a_grid_has_a_table_for_each_setting_that_differs() -> None:
    text = printed(summary([outcome(3.0), outcome(0.3, last=0.7)]))
    assert "linear, lr 3.0" in text and "linear, lr 0.3" in text and "epochs" not in text


def test_one_row_per_run_and_one_group_of_columns_per_scope() -> None:
    made = [replace(outcome(3.0), evaluation=evaluation(scope=scope)) for scope in ("all", "per-task")]
    other = [replace(one, target=target("runs/cassle")) for one in made]
    lines = printed(summary([*made, *other])).splitlines()
    rows = [line.split()[0] for line in lines if line.strip()]
    assert rows.count("runs/pnr") == rows.count("runs/cassle") == 1
    assert any("all" in line and "per-task" in line for line in lines)


def test_downstream_rows_have_labels() -> None:
    made = evaluation(scope="downstream:pets")
    unseen = [replace(one, seen=[], path=f"encoders/task{one.task}.safetensors") for one in made.checkpoints]
    text = printed(matrix(replace(made, checkpoints=unseen)))
    assert "task 0" in text and "task 1" in text
    text = printed(matrix(replace(made, checkpoints=[replace(one, path="a/their.pth") for one in unseen])))
    assert text.count("their.pth") == 2


def test_the_only_encoder_of_a_joint_run_has_learnt_all_tasks() -> None:
    two = evaluation()
    joint = replace(
        two,
        checkpoints=[replace(two.checkpoints[0], seen=[0, 1], path="encoders/joint.safetensors")],
        top1=two.top1[:1],
        top5=two.top5[:1],
        metrics=Metrics(A=[0.375]),
    )
    text = printed(matrix(joint))
    assert "all tasks" in text and "task 0" not in text


def test_many_tasks_and_missing_metrics() -> None:
    made = evaluation()
    wide = replace(
        made,
        columns=[f"classes {i}-{i + 9}" for i in range(20)],
        top1=[[0.5] * 20] * 2,
        reference=References(),
        metrics=Metrics(A=[0.5, 0.5], missing=["S is not known."]),
    )
    text = printed(matrix(wide), width=160)
    assert "task 11" in text and "task 12" not in text and "..." in text and "forgetting" not in text
    shown = replace(outcome(3.0), evaluation=wide)
    twice = printed(summary([shown, replace(shown, target=target("runs/cassle"))], tables=True), width=160)
    assert twice.count("S is not known.") == 1 and twice.count("linear · all") == 2
