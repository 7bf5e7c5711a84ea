"""A campaign reports what breaks, continues where it stopped, and says what it left out."""

import json
import sys
from pathlib import Path

import pytest

from chaos.__main__ import main
from chaos.campaign import Campaign, discover, run
from chaos.records import Record, counts_of, markdown, read_records

_EXPERIMENT = """
from chaos.experiment import Fault, Outcome

class Made:
    name = {name!r}

    def missing(self):
        return {missing!r}

    def faults(self, seed):
        for number in range(3):
            yield Fault("a kind", f"fault {{number}} of seed {{seed}}", is_quick=number == 0)

    def prepare(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        {prepare}

    def inject(self, fault, folder, scratch):
        assert folder.is_dir() and not list(scratch.iterdir())
        {inject}

EXPERIMENT = Made()
ALONE = {alone}
"""


def _written(root: Path, name: str, *, inject: str = 'return Outcome((), "well")', **more: object) -> None:
    package = root / "made_experiments"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    text = _EXPERIMENT.format(name=name, inject=inject, **{"missing": None, "prepare": "pass", "alone": False, **more})
    (package / f"{name}.py").write_text(text)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("made_experiments")]:
        del sys.modules[name]
    return "made_experiments"


def test_a_campaign_reports_what_breaks_and_what_it_leaves_out(tmp_path: Path, package: str) -> None:
    _written(tmp_path, "good", alone=True)
    _written(tmp_path, "bad", inject='return Outcome(("a byte differs",), "status 0")')
    _written(tmp_path, "wrong", inject='raise ValueError("a mistake of the suite")')
    _written(tmp_path, "unready", prepare='raise OSError("no room")')
    _written(tmp_path, "late", inject='return Outcome((), "over", injected=False)')
    _written(tmp_path, "absent", missing="There is no SLURM here.")
    records = run(Campaign(tmp_path / "out", 1, seed=7, package=package))
    by_name = {(one.experiment, one.name): one for one in records}
    assert all(by_name["good", f"fault {n} of seed 7"].held for n in range(3))
    assert by_name["bad", "fault 2 of seed 7"].broken == ("a byte differs",)
    assert "ValueError: a mistake of the suite" in by_name["wrong", "fault 0 of seed 7"].broken[0]
    assert any("no room" in one.broken[0] for one in records if one.experiment == "unready")
    counts = {row.experiment: (row.num_faults, row.num_broken) for row in counts_of(records)}
    assert counts == {"good": (3, 0), "bad": (3, 3), "wrong": (3, 3), "unready": (2, 2)}  # none of "late"
    page = markdown(tmp_path / "out")
    assert "| bad | a kind | 3 | 3 |" in page
    assert "- absent: There is no SLURM here." in page
    assert "Seed 7" in page and "a byte differs" in page


def test_a_campaign_continues_where_it_stopped(tmp_path: Path, package: str) -> None:
    _written(tmp_path, "good")
    out = tmp_path / "out"
    out.mkdir()
    done = Record("good", "a kind", "fault 1 of seed 0", True, True, (), "an earlier one", 1.0)
    (out / "faults.jsonl").write_text(json.dumps(vars(done)) + '\n{"experiment": "cut off by a ki\n')
    records = run(Campaign(out, 1, seed=0, num_workers=1, package=package))
    assert [one.name for one in records] == [f"fault {n} of seed 0" for n in (1, 0, 2)]
    assert records[0].seen == "an earlier one"
    with pytest.raises(SystemExit, match="seed 0"):
        run(Campaign(out, 1, seed=1, package=package))


def test_the_quick_tier_and_the_time_limit(tmp_path: Path, package: str) -> None:
    _written(tmp_path, "good")
    records = run(Campaign(tmp_path / "quick", 1, seed=0, is_quick=True, num_workers=1, package=package))
    assert [one.name for one in records] == ["fault 0 of seed 0"]
    assert run(Campaign(tmp_path / "over", 0, seed=0, num_workers=1, package=package)) == []


@pytest.mark.parametrize(("is_held", "status"), [(True, 0), (False, 1)])
def test_the_exit_status(is_held: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record("one", "a kind", "a fault", is_held, True, () if is_held else ("a byte differs",), "", 1.0)
    monkeypatch.setattr("chaos.__main__.run", lambda _: [record])
    assert main(["--out", str(tmp_path)]) == status


def test_every_experiment_names_its_faults_once_and_in_one_order() -> None:
    for found in discover():
        first, second = ([*_some(found.experiment.faults(3))] for _ in range(2))
        assert [fault.name for fault in first] == [fault.name for fault in second], found.name
        assert len({fault.name for fault in first}) == len(first), found.name
        assert found.experiment.name == found.name


def _some(faults: object) -> object:
    from itertools import islice

    return islice(faults, 300)  # type: ignore[call-overload]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "faults.jsonl").write_text('{"experiment": "o')
    assert read_records(tmp_path) == []
