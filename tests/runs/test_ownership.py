"""One process writes into a run's folder, and it notices when the folder is no longer its own."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from fastcssl.errors import UserError
from fastcssl.runs import ownership
from fastcssl.runs.checkpoint import Checkpoints
from fastcssl.runs.log import RunLog
from fastcssl.runs.ownership import UNLOCKED, FolderLost, RunFolderError, own
from fastcssl.runs.status import Status, write_status


def _status() -> Status:
    return Status(state="running", title="t", task=0, num_tasks=1, epoch=0, num_epochs=1, step=0, num_steps=1)


def test_starting_over_waits_for_nobody_and_renames_no_live_folder(tmp_path: Path) -> None:
    with own(tmp_path / "run"):
        (tmp_path / "run/config.json").write_text("{}")
        for start_over in (False, True):
            with pytest.raises(UserError, match=r"Another process is training in .*run"):
                own(tmp_path / "run", start_over=start_over)
        assert (tmp_path / "run/config.json").exists() and not (tmp_path / "run-1").exists()
    with own(tmp_path / "run", start_over=True):
        assert (tmp_path / "run-1/config.json").exists() and not (tmp_path / "run/config.json").exists()
    with own(tmp_path / "run", start_over=True):  # with nothing in it but the lock, it stays
        assert not (tmp_path / "run-2").exists()


def test_a_folder_renamed_between_opening_and_locking_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: Any) -> None:
        (tmp_path / "run").rename(tmp_path / "run-1")
        (tmp_path / "run").mkdir()

    monkeypatch.setattr(ownership.fcntl, "flock", late)
    with pytest.raises(UserError, match="Another process is training"):
        own(tmp_path / "run")


@pytest.mark.parametrize("how", ["moved", "replaced", "deleted"])
def test_nothing_is_written_into_a_folder_that_is_no_longer_ours(tmp_path: Path, how: str) -> None:
    out = tmp_path / "run"
    with own(out) as guard:
        log = RunLog(out, guard=guard)
        checkpoints = Checkpoints(out / "checkpoints", guard=guard)
        log.event("begun", step=0)
        if how == "deleted":
            (out / ".lock").unlink()
        else:
            out.rename(tmp_path / "elsewhere")
        if how == "replaced":
            own(out).close()
            (out / "checkpoints").mkdir()
        before = sorted(path for path in tmp_path.rglob("*") if "elsewhere" not in path.parts)
        for write in (
            lambda: log.event("more", step=1),
            log.sync,
            lambda: checkpoints.save(1, {"step": 1}),
            lambda: checkpoints.task_end(0, 1, {"step": 1}),
            lambda: write_status(out, _status(), guard),
            lambda: ownership.write_config(ownership.RunFolder(out), {}, guard),
        ):
            with pytest.raises(FolderLost, match="was moved, deleted or replaced"):
                write()
        log.close()
    assert sorted(path for path in tmp_path.rglob("*") if "elsewhere" not in path.parts) == before


def test_a_folder_lost_while_a_checkpoint_is_written_gets_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, fsync = tmp_path / "run", os.fsync

    def lose(descriptor: int) -> None:
        fsync(descriptor)
        if (out / ".lock").exists():
            (out / ".lock").unlink()

    with own(out) as guard:
        checkpoints = Checkpoints(out / "checkpoints", guard=guard)
        monkeypatch.setattr(os, "fsync", lose)
        checkpoints.save(1, {"step": 1})  # periodic: its error is asked for later
        checkpoints.wait()
        with pytest.raises(FolderLost):
            checkpoints.check()
    assert not list((out / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EDQUOT, "Free some space"),
        (errno.EROFS, "Make it writable"),
        (errno.EACCES, "Make it writable"),
        (errno.EIO, "Check the disk"),
    ],
)
def test_an_error_of_the_system_names_file_error_and_remedy(tmp_path: Path, number: int, remedy: str) -> None:
    with pytest.raises(RunFolderError) as caught, UNLOCKED.writing(tmp_path / "file"):
        raise OSError(number, os.strerror(number))
    said = str(caught.value)
    assert f"Cannot write {tmp_path}/file ({os.strerror(number)}). {remedy}" in said
    assert caught.value.__suppress_context__


def test_a_file_system_without_locks_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(ownership.fcntl, "flock", flock)
    with pytest.raises(UserError, match="No locks available"):
        own(tmp_path / "run")
