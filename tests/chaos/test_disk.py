"""Whether the reconstruction of a disk keeps what was synced and loses the rest, and whether the recorder sees all."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from chaos import disk
from chaos.disk import LOSSES, after, interesting, read_record, write_state
from chaos.experiments.power_loss import compiled_recorder

_PROGRAM = """
import os, shutil, sys
from pathlib import Path
import numpy as np

out = Path("out")
out.mkdir()
with (out / "a.part").open("wb") as file:
    file.write(b"x" * 5000)
    file.flush()
    os.fsync(file.fileno())
os.replace(out / "a.part", out / "a")
folder = os.open(out, os.O_RDONLY)
os.fsync(folder)
with (out / "a").open("ab") as file:
    file.write(b"y" * 700)
np.save(out / "b.npy", np.arange(9))
(out / "c").mkdir()
(out / "c" / "d").write_text("d")
os.link(out / "c" / "d", out / "e")
shutil.rmtree(out / "c")
with (out / "f").open("wb") as file:
    file.truncate(10)
"""


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[disk.Event]:
    home = tmp_path_factory.mktemp("recorded")
    (home / "record").mkdir()
    (home / "work").mkdir()
    environment = {
        **os.environ,
        "LD_PRELOAD": str(compiled_recorder(home)),
        "CHAOS_RECORD": str(home / "record"),
        "CHAOS_RECORD_ROOT": str(home / "work"),
    }
    subprocess.run([sys.executable, "-c", _PROGRAM], cwd=home / "work", env=environment, check=True)
    return read_record(home / "record", home / "work")


def _left(events: list[disk.Event], loss: str, folder: Path, count: int | None = None) -> dict[str, bytes]:
    folder.mkdir()
    write_state(after(events, len(events) if count is None else count), LOSSES[loss], folder, random.Random(0))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_operation_is_recorded(events: list[disk.Event]) -> None:
    seen = [(event.what, event.path, event.second) for event in events if event.what not in ("dirty", "sync")]
    assert seen == [
        ("mkdir", "out", ""),
        ("create", "out/a.part", ""),
        ("rename", "out/a.part", "out/a"),
        ("create", "out/b.npy", ""),
        ("mkdir", "out/c", ""),
        ("create", "out/c/d", ""),
        ("link", "out/c/d", "out/e"),
        ("remove", "out/c/d", ""),
        ("remove", "out/c", ""),
        ("create", "out/f", ""),
    ]
    assert [event.path for event in events if event.what == "sync"] == ["out/a.part", "out"]


def test_what_was_synced_stays(events: list[disk.Event], tmp_path: Path) -> None:
    assert _left(events, "nothing but what was synced", tmp_path / "left") == {"out/a": b"x" * 5000}


def test_names_outlive_content(events: list[disk.Event], tmp_path: Path) -> None:
    left = _left(events, "all names, dirty files empty", tmp_path / "left")
    assert left == {"out/a": b"x" * 5000, "out/b.npy": b"", "out/e": b"", "out/f": b""}
    zeros = _left(events, "all names, dirty files of zeros", tmp_path / "zeros")
    assert zeros["out/a"] == b"x" * 5000 + bytes(700)
    assert zeros["out/e"] == b"\0" and len(zeros["out/b.npy"]) == 128 + 9 * 8


def test_before_the_folder_is_synced_its_names_may_be_lost(events: list[disk.Event], tmp_path: Path) -> None:
    renamed = next(number for number, event in enumerate(events, 1) if event.what == "rename")
    assert _left(events, "nothing but what was synced", tmp_path / "none", renamed) == {}
    assert _left(events, "all names, dirty files empty", tmp_path / "all", renamed) == {"out/a": b"x" * 5000}


def test_safe_content_is_never_lost(events: list[disk.Event], tmp_path: Path) -> None:
    synced = next(number for number, event in enumerate(events, 1) if (event.what, event.path) == ("sync", "out"))
    moments = [count for count, _ in interesting(events) if count >= synced]
    assert len(moments) > 8
    for count in moments:
        for number, loss in enumerate(LOSSES):
            left = _left(events, loss, tmp_path / f"{count}-{number}", count)
            assert left["out/a"][:5000] == b"x" * 5000, (count, loss)
