"""A disk may fail at any call of a run: one sentence, the first error, nothing lost, and the same command finishes."""

import errno
import io
import itertools
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from faults import Faults, injected
from rich.console import Console
from small_runs import losses, prepared, run, tiny

from fastcssl.config.recipes import Recipe
from fastcssl.errors import UserError

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT)


def _recipe() -> Recipe:
    return tiny("simclr", "finetune", epochs=1, batch_size=20, run={"checkpoint_minutes": 0.0})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("disk") / "data", source="classes=20,train=2,val=1")


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    run(_recipe(), data, out)
    return out


@pytest.fixture(scope="module")
def points(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Every call that touches the run's folder; of calls that differ only in a number, the first."""
    out = tmp_path_factory.mktemp("points") / "run"
    with injected(Faults(out)) as faults:
        run(_recipe(), data, out)
    found = {re.sub(r"\d+", "", point): point for point in reversed(faults.seen)}
    assert len(found) > 35, faults.seen
    return sorted(found.values())


def _ended(data: Path, out: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> str:
    """Trains with a fault. Returns what was said: the error of the run, or its warnings."""
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    text = io.StringIO()
    with injected(faults):
        try:
            run(_recipe(), data, out, console=Console(file=text, width=1000))
        except UserError as error:
            assert error.__suppress_context__ or error.__context__ is None, "a chained traceback"
            return str(error)
        finally:
            assert not unraisable, unraisable
    return text.getvalue()


def _check_whole(out: Path, whole: Path) -> None:
    assert losses(out) == losses(whole)
    for name in ("task0", "task1"):
        file = f"encoders/{name}.safetensors"
        assert (out / file).read_bytes() == (whole / file).read_bytes()
    assert not [path for path in out.rglob("*") if path.suffix in (".part", ".partial")]


def test_every_call_may_fail_once(
    tmp_path: Path, data: Path, whole: Path, points: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (point, error) in enumerate(zip(points, itertools.cycle(ERRORS))):
        out = tmp_path / str(number)
        faults = Faults(out, point, error)
        said = _ended(data, out, faults, monkeypatch)
        assert faults.has_failed, point
        if not point.startswith(("unlink", "open .lock", "mkdir . ")):
            assert re.search(rf"\({os.strerror(error)}\)|: {os.strerror(error)}\.", said), (point, said)
        if not (out / "encoders/task1.safetensors").exists():  # it ended with the sentence; otherwise with a warning
            assert "\n" not in said and run(_recipe(), data, out).status == "finished"
        _check_whole(out, whole)


def test_a_disk_that_stays_full_does_not_hide_the_first_error(
    tmp_path: Path, data: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (point, file) in enumerate(
        {
            "open encoders/task0.safetensors.part 1": "encoders/task0.safetensors",
            "write metrics.jsonl 2": "metrics.jsonl",
            "write checkpoints/task-0.pt.partial 1": "task-0.pt",
            "open config.json.part 1": "config.json",
            "mkdir checkpoints 1": "checkpoints",
        }.items()
    ):
        out = tmp_path / str(number)
        said = _ended(data, out, Faults(out, point, lasting=True), monkeypatch)
        assert file in said.partition("No space left on device")[0], (point, said)
        assert "Free some space" in said and "\n" not in said
        assert run(_recipe(), data, out).status == "finished"
        _check_whole(out, whole)
