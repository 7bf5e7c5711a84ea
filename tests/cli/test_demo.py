"""The demo's parts, on a few images: what it measures is whole, and what it says follows from it."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from fastcssl.cli import demo
from fastcssl.cli.demo_parts import STYLES, DemoBudget, LoaderRace, ResumedRun
from fastcssl.cli.demo_screen import PartLines, sentences, share_of, show
from fastcssl.cli.exit_codes import Ended
from fastcssl.errors import UserError
from fastcssl.runs.status import Status, write_status

TINY = DemoBudget(
    source="synthetic:set=forms,classes=10,train=32,val=8",
    changes={
        "epochs": (2, 1, 1, 4),
        "batch_size": 8,
        "encoder.name": "conv4-w8",
        "method.hidden": 32,
        "method.dim": 16,
        "method.bank.size": 32,
        "run.log_every": 1,
        "run.num_threads": 1,
        "run.device": "cpu",
    },
    checkpoint_minutes=0.0,
    photos="synthetic:set=forms,classes=10,train=1,val=1,size=64,format=jpeg",
    batch_size=4,
    round_s=0.01,
    num_rounds=2,
)
FOUND = demo.DemoFindings(
    seed=5,
    tasks=["photo", "neon"],
    chance=0.05,
    thumbnails=[0.1, 0.2],
    random=[0.2, 0.2],
    finetune=[[0.4, 0.3], [0.3, 0.6]],
    pnr=[[0.4, 0.3], [0.4, 0.5]],
    S={"finetune": 0.05, "pnr": 0.04},
    S_knn={"finetune": 0.1, "pnr": 0.0},
    resumed=ResumedRun(killed_after_step=7, num_losses=9, num_equal=9, encoders_equal=True),
    loader=LoaderRace(native=900.0, torchvision=100.0),
    seconds=1.0,
)


@pytest.mark.usefixtures("one_thread")
def test_the_whole_demo_on_a_few_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the killed process: other threads, other rounding
    monkeypatch.setattr(demo, "problems", lambda _: [])  # so few steps teach nothing
    out = tmp_path / "demo"
    console = Console(record=True, width=120, file=io.StringIO())
    assert demo.demonstrate(demo.DemoOptions(out=out), TINY, console) == 0
    figures = json.loads((out / demo.FIGURES).read_text())
    num_tasks = len(figures["tasks"])
    assert figures["tasks"] == list(STYLES)
    for table in (figures["finetune"], figures["pnr"]):
        assert [len(row) for row in table] == [num_tasks] * num_tasks
    assert figures["finetune"][0] == figures["pnr"][0]  # they share the first task
    assert len(figures["random"]) == len(figures["thumbnails"]) == num_tasks
    assert set(figures["A"]) == {"thumbnails", "random", "finetune", "pnr"} and set(figures["S"]) == {"finetune", "pnr"}
    assert set(figures["S_knn"]) == {"finetune", "pnr"}
    resumed = figures["resumed"]
    assert resumed["encoders_equal"] and resumed["num_losses"] == resumed["num_equal"] == 4 * 10
    assert figures["loader"]["native"] > 0 and figures["loader"]["torchvision"] > 0
    for name in ("report/index.html", "sheet.png", "views.png", "resumed.log"):
        assert (out / name).stat().st_size, name
    said = console.export_text()
    assert said.count("MoCo + PNR") == 1 and "identical to the last bit" in said
    before, _, after = said.partition("top-1 in %")
    assert [line[0] for line in before.splitlines() if line.strip()] == ["✓"] * 6  # a line for each part
    assert "loss " not in after and "images/s" not in after  # the only table


def test_sentences_follow_the_numbers() -> None:
    learns, remembers, resumes, fast = sentences(FOUND)
    assert "A is 45.0 %" in learns and "2.2 times" in learns and "20.0 %" in learns and "chance is 5.0 %" in learns
    assert remembers.startswith("PNR forgets less: ") and "10.0 points" in remembers and "0.0 with PNR" in remembers
    assert "identical to the last bit" in resumes and "9 losses" in resumes
    assert "9.0 times" in fast


@pytest.mark.parametrize(
    ("of_pnr", "lead"), [(0.09, "No clear difference"), (0.11, "No clear difference"), (0.2, "PNR forgot more")]
)
def test_the_second_sentence_claims_only_what_was_measured(of_pnr: float, lead: str) -> None:
    remembers = sentences(dataclasses.replace(FOUND, S_knn={"finetune": 0.1, "pnr": of_pnr}))[1]
    assert remembers.startswith(lead) and "10.0 points" in remembers and f"{100 * of_pnr:.1f} with PNR" in remembers


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_ending_fits_the_terminal(width: int) -> None:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    with PartLines(console).part("Images"):
        pass
    show(FOUND, Path("demo"), console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= min(width, 96)
    assert sum(line.startswith(("1 ", "2 ", "3 ", "4 ")) for line in lines) == 4  # a hanging number for each sentence
    assert not any("…" in line for line in lines)


def test_a_log_has_one_line_for_each_sentence() -> None:
    console = Console(width=80, file=io.StringIO())
    show(FOUND, Path("demo"), console)
    written = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line[:3] for line in written if line[:1] in "1234" and line[1:3] == ". "] == ["1. ", "2. ", "3. ", "4. "]


def test_a_part_that_fails_is_not_ticked_off() -> None:
    console = Console(width=80, file=io.StringIO())
    with pytest.raises(UserError, match="broken"), PartLines(console).part("Images"):
        raise UserError("broken")
    assert not console.file.getvalue()  # type: ignore[attr-defined]


def test_progress_counts_from_the_first_task_that_a_run_was_given(tmp_path: Path) -> None:
    share = share_of(tmp_path)
    assert share() is None  # the folder is not a run yet
    shares = []
    for step in (40, 70, 100):
        state = Status(state="running", title="", task=0, num_tasks=2, epoch=0, num_epochs=1, step=step, num_steps=100)
        write_status(tmp_path, state)
        shares.append(share())
    assert shares == [0.0, 0.5, 1.0]


def test_a_demo_that_shows_nothing_fails_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo.problems(FOUND) == []
    unlearnt = dataclasses.replace(FOUND, pnr=[[0.2, 0.2], [0.2, 0.2]])
    for half in ({"num_equal": 8}, {"encoders_equal": False}, {"num_losses": 0, "num_equal": 0}):
        differs = dataclasses.replace(FOUND, resumed=dataclasses.replace(FOUND.resumed, **half))
        assert "not identical" in demo.problems(differs)[0]
        assert "last bit" not in sentences(differs)[2]
    out = tmp_path / "demo"
    out.mkdir()
    monkeypatch.setattr(demo, "_measured", lambda *_: (out.mkdir(), unlearnt)[1])
    with pytest.raises(Ended, match=r"not better than its baselines: A is 20.0 %.* 20.0 %") as ended:
        demo.demonstrate(demo.DemoOptions(out=out), TINY, Console(quiet=True))
    assert ended.value.status == 1
    assert json.loads((out / demo.FIGURES).read_text())["A"]["pnr"] == 0.2


def test_only_an_older_demo_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    (tmp_path / "data").mkdir()  # as a demo has one, too
    with pytest.raises(UserError, match="holds more than an older demo, which would be deleted"):
        demo.demonstrate(demo.DemoOptions(out=tmp_path), TINY, Console(quiet=True))
    assert (tmp_path / "thesis.tex").exists()
