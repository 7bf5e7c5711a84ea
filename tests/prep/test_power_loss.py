"""What the journal relies on is durable before the journal says so, and is checked when a build continues."""

import json
import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import folder_bytes, picture

from dataprep import _codec
from dataprep.api import build_data, split_data
from dataprep.build import BuildResult
from dataprep.encode import Encoding, encode_all
from dataprep.errors import Interrupted
from dataprep.manifest import sha256_of, write_atomically
from dataprep.part import Part
from dataprep.samples import Sample
from dataprep.writers.ffcv_process import _follow

_SOURCE = "synthetic:size=32,train=8,val=2,format=jpeg"


def build(out: Path, **more: Any) -> BuildResult:
    return build_data(_SOURCE, out, scenario="class", num_tasks=3, formats=["tar", "array"], num_workers=1, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    build(out)
    return out


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build that was stopped after some of its parts."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    journal = out / ".build" / "journal"
    with pytest.raises(Interrupted):
        build(out, should_stop=lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 2)
    assert len(journal.read_bytes().splitlines()) in (2, 3)
    return out


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def first(out: Path, pattern: str) -> Path:
    return sorted(out.glob(pattern))[0]


def drop_rows_entry(out: Path) -> None:
    """Makes the journal that version 0.1 wrote."""
    journal = out / ".build" / "journal"
    lines = [json.loads(line) for line in journal.read_bytes().splitlines()]
    for line in lines:
        line.pop("rows", None)
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))


_LOSSES: dict[str, Callable[[Path], None]] = {
    "nothing": lambda _: None,
    "an empty index": lambda out: first(out, "task-*/*.idx").write_bytes(b"") and None,
    "a missing index": lambda out: first(out, "task-*/*.idx").unlink(),
    "empty rows": lambda out: first(out, ".build/rows/*.npy").write_bytes(b"") and None,
    "changed rows": lambda out: flip(first(out, ".build/rows/*.npy")),
    "a changed tar": lambda out: flip(first(out, "task-*/*.tar")),
    "a changed array": lambda out: flip(first(out, "task-*/*.npy")),
    "zeros in the journal": lambda out: (out / ".build" / "journal").write_bytes(bytes(300) + b"\n") and None,
    "another line in the journal": lambda out: (out / ".build" / "journal").write_bytes(b'{"part": 1}\n[]\n') and None,
    "no checksum of the rows": drop_rows_entry,
    "no checksum and empty rows": lambda out: (
        (
            drop_rows_entry(out),
            first(out, ".build/rows/*.npy").write_bytes(b""),
        )
        and None
    ),
}


@pytest.mark.parametrize("loss", _LOSSES)
def test_what_a_crash_has_damaged_is_built_again(loss: str, stopped: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(stopped, out)
    _LOSSES[loss](out)
    result = build(out)
    assert folder_bytes(out) == folder_bytes(whole)
    assert (result.num_resumed > 0) == (loss in ("nothing", "no checksum of the rows"))


def test_every_rename_is_durable_before_the_journal_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    synced: set[str] = set()
    unsettled: set[str] = set()  # renamed, but the folder is not synced yet
    renamed: set[str] = set()
    fsync, replace = os.fsync, os.replace

    def watch_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.add(path)
        unsettled.difference_update({name for name in unsettled if os.path.dirname(name) == path})
        if path.endswith(".build/journal"):
            assert not unsettled
            for line in Path(path).read_bytes().splitlines():
                part = json.loads(line)
                named = [*part["files"], *(file["index"] for file in part["files"] if file["index"]), part["rows"]]
                assert {str(out / entry["path"]) for entry in named} <= renamed

    def watch_replace(source: Path, target: Path) -> None:
        assert str(source) in synced, f"{source} is renamed before it is synced"
        replace(source, target)
        renamed.add(str(target))
        unsettled.add(str(target))

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    build(out)
    split_data(out, "other", scenario="joint")
    assert not unsettled
    assert {"samples.npy", "keys.txt", "manifest.json", "other.json"} <= {Path(name).name for name in renamed}
    for folder in (out.parent, out, out / ".build", out / ".build" / "rows", out / "task-00"):
        assert str(folder) in synced


def test_a_failed_write_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "x.json", b"content")
    assert not list(tmp_path.iterdir())


def test_the_next_start_finishes_the_clean_up(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    spool = out / ".build" / "spool" / "task-00"
    spool.mkdir(parents=True)
    (spool / "train-00000.tar").write_bytes(b"a second copy")
    assert build(out).was_complete
    assert not (out / ".build").exists()
    assert folder_bytes(out) == folder_bytes(whole)


# ---- Stopping --------------------------------------------------------------------------------------------------------


def test_stopping_does_not_wait_for_the_image_that_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    begun = threading.Event()

    def decode(_: bytes) -> None:
        begun.set()
        release.wait(60)

    monkeypatch.setattr("dataprep.encode.decode_with_pillow", decode)
    sample = Sample(0, "it", 0, -1, False)
    images = encode_all(
        [sample],
        lambda _: b"not a JPEG",
        Encoding(),
        want_jpeg=True,
        want_pixels=False,
        num_threads=1,
        should_stop=begun.is_set,
    )
    with pytest.raises(Interrupted):
        next(images)
    assert not release.is_set()
    release.set()


def test_waiting_for_the_codec_ends() -> None:
    codec = _codec.Transcoder(
        fit="none", size=0, quality=90, check_in_full=True, want_jpeg=True, want_pixels=False, num_threads=1
    )
    codec.submit_pixels(picture(0, 2000, 2000))
    assert codec.pop(0.0) is None
    while (stored := codec.pop(0.01)) is None:
        pass
    assert (stored.width, stored.height) == (2000, 2000)


def test_stopping_does_not_wait_for_the_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealing = threading.Event()

    def seal(*arguments: Any) -> None:
        should_stop = arguments[-1]
        sealing.set()
        while not should_stop():
            time.sleep(0.01)
        raise Interrupted

    monkeypatch.setattr(Part, "seal", seal)
    with pytest.raises(Interrupted):
        build(tmp_path / "out", should_stop=sealing.is_set)
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(Interrupted):
        sha256_of(tmp_path / "file", lambda: True)


def test_stopping_does_not_wait_for_ffcv_to_report() -> None:
    """Importing FFCV takes seconds, in which its process reports nothing."""
    receiver, _sender = multiprocessing.Pipe(duplex=False)
    child = subprocess.Popen(["sleep", "20"])

    def stop(done: int) -> None:
        assert done == 0
        raise Interrupted

    try:
        with pytest.raises(Interrupted):
            _follow(receiver, child, stop)  # type: ignore[arg-type]
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
