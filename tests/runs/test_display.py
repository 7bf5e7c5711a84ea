"""What a person sees of a run: on a terminal, in a log, at the end, and from another process."""

import io
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from fastcssl.runs.display import Display, RunHeader, TaskPlan, duration, final_table, number
from fastcssl.runs.log import EpochReport, ProbeReport, RunLog, StepReport, TaskReport
from fastcssl.runs.ownership import RunFolderError
from fastcssl.runs.status import Status, _birth, read_status, sparkline, summary, write_status

HEADER = RunHeader(recipe="in100-class5", method="moco", strategy="pnr", data="/data/in100", device="cuda:0")
PLAN = [TaskPlan(name=f"classes {20 * t + 1}-{20 * t + 20}", num_epochs=500, steps_per_epoch=100) for t in range(5)]
WHERE = [("encoders", Path("runs/a/encoders")), ("metrics", "runs/a/metrics.jsonl")]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 80, **options: Any) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, **options)


def log_file() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(renderable: RenderableType, width: int = 80) -> str:
    """As plain text, and no line wider than the terminal."""
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    text = written(console)
    assert max(map(len, text.splitlines())) <= width
    return text


def step_report(step: int, **changes: Any) -> StepReport:
    values = {
        "step": step,
        "task": (step - 1) // 50_000,
        "epoch": (step - 1) % 50_000 // 100,
        "batch": (step - 1) % 100,
        "lr": 0.412,
        "loss": 3.214,
        "terms": {"plasticity": 1.71, "stability": 1.504},
        "images_per_s": 1834.4,
        "data_wait_share": 0.004,
    }
    return StepReport(**{**values, **changes})


def epoch_report(step: int, **changes: Any) -> EpochReport:
    at = step_report(step)
    values = {name: getattr(at, name) for name in ("step", "task", "epoch", "lr", "images_per_s", "data_wait_share")}
    return EpochReport(**{**values, "loss": 3.3, "terms": {"moco": 3.3}, "seconds": 12.0, **changes})


def task_report(task: int, **changes: Any) -> TaskReport:
    values = {
        "step": 50_000 * (task + 1),
        "task": task,
        "name": PLAN[task].name,
        "num_images": 25_861,
        "num_epochs": 500,
        "loss": 3.1 + task / 10,
        "images_per_s": 1834.0,
        "data_wait_share": 0.004,
        "seconds": 4321.0,
        "accuracy": {"knn": 0.612, "linear": 0.7015},
    }
    return TaskReport(**{**values, **changes})


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_shows_every_value_at_any_width(width: int) -> None:
    clock = Clock()
    display = Display(HEADER, PLAN, step=50_000, console=terminal(width), clock=clock)
    display.step(step_report(50_001, loss=3.0, terms={"plasticity": 1.5, "stability": 1.5}))
    clock.now = 100.0
    display.step(step_report(50_002, device_idle_share=0.031))
    clock.now = 100.5
    display.probe(ProbeReport(step=50_000, task=0, accuracy={"knn": 0.612}))
    text = shown(display.panel(), width)
    for words in ("in100-class5 · moco · pnr", "task 2/5", "run", "classes 21-40", "1/500", "0.412", "1,834 images/s"):
        assert words in text
    for pattern in (r"loss +3\.214 +3\.107", r"plasticity +1\.710 +1\.605", r"stability +1\.504 +1\.502"):
        assert re.search(pattern, text)
    assert "0.4 % for data" in text and "3.1 % of the GPU" in text and re.search(r"k-NN +61\.2", text)
    # One step in 100.5 s: 49,998 of the task and 199,998 of the run are left.
    assert "58 d 3 h left" in text and "232 d 15 h left" in text and "20 %" in text


def test_a_probe_that_is_repeated_after_a_resume_shows_once() -> None:
    display = Display(HEADER, PLAN, console=terminal())
    for task, accuracy in ((0, {"knn": 0.6}), (0, {"linear": 0.7}), (1, {"knn": 0.5}), (1, {"knn": 0.5})):
        display.probe(ProbeReport(step=1, task=task, accuracy=accuracy))
    text = shown(display.panel())
    assert re.search(r"k-NN +60\.0  50\.0 +│", text) and re.search(r"linear +70\.0 +│", text)


def test_before_the_first_step_of_a_task() -> None:
    display = Display(HEADER, PLAN, console=terminal())
    assert "classes 1-20: starting" in shown(display.panel())
    display.step(step_report(50_000))
    display.task(1)
    text = shown(display.panel())
    assert "classes 21-40: starting" in text and "task 2/5" in text and "3.214" not in text


def test_one_term_is_not_shown_twice_and_many_find_room() -> None:
    display = Display(HEADER, PLAN, console=terminal())
    display.step(step_report(1, terms={"moco": 3.214}))
    assert "moco " not in shown(display.panel()).replace("· moco ·", "")
    display.step(step_report(2, terms={f"term{i}": float(i) for i in range(9)}))
    assert re.search(r"term8 +8\.000", shown(display.panel(), 60))


def test_what_deserves_a_look_is_coloured() -> None:
    def colours(**changes: Any) -> str:
        display = Display(HEADER, PLAN, console=terminal(color_system="standard"))
        display.step(step_report(1, **changes))
        display._console.print(display.panel())
        return written(display._console)

    assert "\x1b[1;33m12.0 % for data" in colours(data_wait_share=0.12)
    assert "\x1b[1;33m" not in colours(data_wait_share=0.09)
    assert re.search(r"\x1b\[1;31m *nan", colours(loss=math.nan))


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    display = Display(HEADER, PLAN, console=terminal(color_system="standard"))
    display.step(step_report(1, data_wait_share=0.5))
    display._console.print(display.panel())
    text = written(display._console)
    assert "50.0 % for data" in text
    assert not re.search(r"\x1b\[[\d;]*\b3[0-7]\b", text)


def test_on_a_terminal_notes_scroll_by_and_the_table_takes_the_place_of_the_panel() -> None:
    console = terminal(color_system=None)
    with Display(HEADER, PLAN, console=console) as display:
        display.task(0)
        display.step(step_report(1))
        display.note("checkpoint at step 1")
        display.epoch_end(epoch_report(100))
        display.task_end(task_report(0))
        before = written(console)
        display.finish([task_report(0)], WHERE)
    text = written(console)
    assert "\x1b[?25l" in before and text.endswith("\n")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back
    assert "checkpoint at step 1" in before and "task 1/5 done  classes 1-20  loss 3.100  k-NN 61.2 %" in before
    assert "epoch 1/500  loss" not in text  # that is for logs
    after = text[text.rindex("\x1b[2K") :]  # erased line by line
    assert "runs/a/encoders" in after and "in100-class5" not in after


def test_an_error_leaves_the_last_panel_and_a_whole_terminal() -> None:
    console = terminal(color_system=None)
    with pytest.raises(ZeroDivisionError), Display(HEADER, PLAN, console=console) as display:
        display.step(step_report(1))
        raise ZeroDivisionError
    text = written(console)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "3.214" in text[text.rindex("\x1b[2K") :]
    assert sys.stdout is not None and "rich" not in type(sys.stdout).__module__


def test_a_log_gets_a_line_every_half_minute_and_at_ends() -> None:
    clock, console = Clock(), log_file()
    with Display(HEADER, PLAN, console=console, clock=clock) as display:
        display.task(0)
        for step in range(1, 100):
            clock.now = float(step)
            display.step(step_report(step))
        display.epoch_end(epoch_report(100))
        display.note("2 samples were replaced", warning=True)
        display.task_end(task_report(0, accuracy={"knn": 0.612}))
    header, first, *lines = written(console).splitlines()
    assert header == "in100-class5 · moco · pnr · /data/in100 · cuda:0"
    shared = "lr 0.412  1834 images/s  waited 0.4 %"
    start = f"task 1/5  epoch 1/500  loss 3.214 (plasticity 1.710, stability 1.504)  {shared}"
    assert first == start  # nothing is known of the time left
    assert lines[:3] == [f"{start}  ETA 2 d 21 h"] * 3  # 250,000 steps, one a second
    assert lines[3] == f"task 1/5  epoch 1/500  loss 3.300  {shared}  ETA 2 d 21 h"
    assert lines[4:] == [
        "2 samples were replaced",
        "task 1/5 done  classes 1-20  loss 3.100  k-NN 61.2 %  1834 images/s  1 h 12 min",
    ]


def test_a_log_has_no_escape_codes_and_no_panel() -> None:
    console = log_file()
    with Display(HEADER, PLAN, console=console) as display:
        display.step(step_report(1, device_idle_share=0.5))
        display.probe(ProbeReport(step=1, task=0, accuracy={"knn": 0.5}))
        display.note("[red]not markup[/red]", warning=True)
        display.finish([task_report(t) for t in range(5)], WHERE)
    text = written(console)
    assert "\x1b" not in text and "╭" not in text and "idle 50.0 %" in text and "[red]not markup[/red]" in text
    assert "epochs" in text and "1:12:01" in text  # all columns, wider than 80


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = terminal()
    with Display(HEADER, PLAN, console=console) as display:
        display.step(step_report(1))
    assert "epoch 1/500  loss 3.214" in written(console) and "╭" not in written(console)


def test_a_quiet_display_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(HEADER, PLAN, quiet=True) as display:
        display.task(0)
        display.step(step_report(1))
        display.note("a note")
        display.task_end(task_report(0))
        display.finish([task_report(0)], WHERE)
    assert capsys.readouterr() == ("", "")


def test_the_time_left_follows_the_last_minutes() -> None:
    clock = Clock()
    display = Display(HEADER, PLAN, console=terminal(), clock=clock)
    assert display.seconds_left is None
    clock.now = 1000.0  # compiling is not counted
    for step in range(1, 1001):
        display.step(step_report(step))
        clock.now += 10.0 if step < 500 else 1.0
    assert display.seconds_left == pytest.approx(249_000, rel=0.01)


def test_the_final_table() -> None:
    tasks = [task_report(0), task_report(1, data_wait_share=0.17), task_report(2, accuracy={"knn": 0.5})]
    text = shown(final_table(tasks, WHERE), 100)
    first, second, third, total = (
        next(line.split() for line in text.splitlines() if name in line.split())
        for name in ("1-20", "21-40", "41-60", "all")
    )
    assert first == ["0", "classes", "1-20", "25,861", "500", "3.100", "61.2", "70.2", "1,834", "0.4", "%", "1:12:01"]
    assert second[-3:-1] == ["17.0", "%"] and third[6:8] == ["50.0", "-"]
    assert total == ["all", "77,583", "3:36:03"]
    assert re.search(r"encoders +runs/a/encoders *\n", text) and re.search(r"metrics +runs/a/metrics.jsonl", text)
    assert "k-NN" not in shown(final_table([task_report(0, accuracy={})], []))


@pytest.mark.parametrize(("width", "gone"), [(80, {"epochs"}), (60, {"epochs", "images", "waited", "task"})])
def test_a_narrow_final_table_leaves_columns_out_instead_of_cutting_them(width: int, gone: set[str]) -> None:
    text = shown(final_table([task_report(t) for t in range(5)], []), width)
    headings = {"task", "name", "images", "epochs", "loss", "k-NN", "linear", "images/s", "waited", "time"}
    assert set(text.splitlines()[1].split()) == headings - gone
    assert "…" not in text and "classes 81-100" in text and "1:12:01" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (601, "10 min"), (4321, "1 h 12 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers_are_short() -> None:
    values = (3.2144, -1.5, 0.0, 0.00123, 12345.6, 1.5e9, math.nan, math.inf)
    assert [number(value) for value in values] == [
        "3.214", "-1.500", "0.000", "1.2e-03", "12346", "1.5e+09", "nan", "inf",
    ]  # fmt: skip


STATUS = Status(
    state="running",
    title=str(HEADER),
    task=1,
    num_tasks=5,
    epoch=13,
    num_epochs=500,
    step=51_300,
    num_steps=250_000,
    seconds_left=4381.0,
)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """In its second task, with a loss that falls."""
    with RunLog(tmp_path) as log:
        log.write(step_report(50_000, loss=99.0))
        log.write(ProbeReport(step=50_000, task=0, accuracy={"knn": 0.612}))
        for step in range(50_001, 50_065):
            log.write(step_report(step, loss=6400.0 / (step - 50_000)))
    return tmp_path


def summary_of(folder: Path, age: float = 0.0, width: int = 80, **changes: Any) -> str:
    write_status(folder, replace(STATUS, **changes))
    return shown(summary(folder, now=read_status(folder).updated + age), width)


@pytest.mark.parametrize("width", [60, 80])
def test_the_summary_of_a_running_run(run_folder: Path, width: int) -> None:
    text = summary_of(run_folder, age=3.0, width=width)
    for words in ("in100-class5 · moco · pnr", "● running on", f"process {os.getpid()}", "seen 3 s ago", "21 %"):
        assert words in text
    for pattern in ("task +2/5", "epoch +14/500", "step +51,300/250,000", r"loss +100\.000  █▄▃▂", r"k-NN +61\.2"):
        assert re.search(pattern, text)
    assert "1,834 images/s" in text and "0.4 % for data" in text
    assert "1 h 12 min left" in text and "×" not in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"state": "stopped"}, "stopped 1 min 5 s ago; run the same command to resume"),
        ({"state": "failed", "message": "The loss is nan at step 51300."}, "The loss is nan at step 51300."),
        ({"state": "failed"}, "failed 1 min 5 s ago"),
        ({"state": "finished", "started": -4321.0}, "finished after 1 h 12 min"),  # before the test
        # The machine's clock was set back, or forward, while it trained.
        ({"state": "finished", "started": 18_000.0}, "finished after 0 s"),
        ({"state": "finished", "started": 18_000.0, "seconds": 4321.0}, "finished after 1 h 12 min"),
        ({"state": "finished", "started": -18_000.0, "seconds": 4321.0}, "finished after 1 h 12 min"),
        ({"pid": 2**22 + 1}, "was killed; run the same command to resume"),
        ({"born": "1"}, "was killed; run the same command to resume"),  # its number went to another process
        ({"host": "elsewhere", "pid": 2**22 + 1}, "running on elsewhere"),
    ],
)
def test_the_summary_of_every_state(run_folder: Path, changes: dict[str, Any], says: str) -> None:
    if "started" in changes:
        changes = {**changes, "started": time.time() + changes["started"]}
    text = summary_of(run_folder, age=65.0, **changes)
    assert says in text
    assert ("left" in text) == (changes.get("state") != "finished")


def test_a_run_without_a_sign_of_life(run_folder: Path) -> None:
    assert "running on elsewhere, but no sign of life for 20 min" in summary_of(run_folder, age=1200, host="elsewhere")


def test_a_run_that_has_not_logged_yet(tmp_path: Path) -> None:
    text = summary_of(tmp_path, task=0, epoch=0, step=0, seconds_left=None)
    assert "running on" in text and re.search("step +0/250,000", text) and "loss" not in text


def test_a_killed_process_counts_as_gone_before_it_is_reaped() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        status = replace(STATUS, pid=process.pid, born=_birth(process.pid))
        assert status.is_alive
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert status.is_alive is False
    assert status.is_alive is False and STATUS.is_alive


def test_the_status_file_comes_back(tmp_path: Path) -> None:
    write_status(tmp_path, replace(STATUS, updated=0.0))
    read = read_status(tmp_path)
    assert read.updated > STATUS.started - 1 and replace(read, updated=STATUS.updated) == STATUS
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("content", ["", "[1]", '{"state": "running"}', "nonsense", "null"])
def test_a_damaged_status_is_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "status.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"status\.json cannot be read"):
        summary(tmp_path)


def test_the_last_epoch_of_a_finished_run_is_not_exceeded(tmp_path: Path) -> None:
    counts = {"task": 1, "num_tasks": 1, "epoch": 1, "num_epochs": 1, "step": 4, "num_steps": 4}
    write_status(tmp_path, Status(state="finished", title="t", **counts))
    console = Console(file=io.StringIO(), width=100)
    console.print(summary(tmp_path))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1/1" in said and "2/1" not in said


def test_what_is_not_a_run_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"is not a run: it has no status\.json\. Give the folder"):
        summary(tmp_path)
    with pytest.raises(RunFolderError, match="does not exist"):
        summary(tmp_path / "missing")


def test_sparklines() -> None:
    assert sparkline([]) == "" and sparkline([2.0]) == "▁" and sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([7.0, 0.0, math.nan, 3.0, math.inf]) == "█▁×▄×"
    long = sparkline([float(value) for value in range(1000)])
    assert len(long) == 32 and long[0] == "▁" and long[-1] == "█" and list(long) == sorted(long)


def test_reading_a_status_needs_no_torch() -> None:
    code = "import sys, fastcssl.runs.status; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
