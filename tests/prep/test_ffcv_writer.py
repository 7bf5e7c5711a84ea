"""The FFCV writer: what it stores, that FFCV reads it, that no failure hangs or leaves anything behind."""

from __future__ import annotations

import importlib
import io
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from betons import COUNT, HEIGHT, WIDTH, jpeg_of, record_of, write_beton
from conftest import backend
from PIL import Image

from dataprep.writers import beton
from dataprep.writers.beton import BetonError, BetonFile, JpegRecord
from dataprep.writers.ffcv_process import BetonWriter

ffcv = backend("ffcv")

WATCHDOG = 100.0  # seconds; only a hang takes this long

# A module of its own: the writing process imports it, and importing this file would import all of FFCV.
CASES = """
import os, resource, signal, sys, time
from pathlib import Path
from dataprep.writers.beton import BetonError, JpegRecord
from dataprep.writers.ffcv_process import BetonWriter

class Records:
    def __init__(self, notes, trouble):
        self.notes, self.trouble = notes, trouble

    def __len__(self):
        return 64

    def __getitem__(self, index):
        for process in (os.getpid(), os.getppid()):
            (self.notes / str(process)).touch()
        print("noise", file=sys.stderr, flush=True)
        width = 16
        if self.trouble == "sleep":
            time.sleep(600)
        if index == 40:
            if self.trouble == "raise":
                raise ValueError("the sky fell")
            if self.trouble == "kill worker":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.trouble == "leave worker":
                os._exit(0)
            if self.trouble == "kill writer":
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(600)
            if self.trouble == "wide":
                width = 70000
        jpeg = b"\\xff\\xd8" + bytes(100)
        return JpegRecord(jpeg=jpeg, width=width, height=16, label=1, id=1000 + index, domain=0)

if __name__ == "__main__":
    import multiprocessing
    multiprocessing.set_start_method("forkserver")  # the default of Python 3.14
    folder, notes, trouble = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if trouble == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        with BetonWriter(2) as writer:
            writer.write(folder / "x.beton", Records(notes, trouble), largest_bytes=102)
    except BetonError as error:
        print(error)
"""

# Reads a file as any FFCV user would, with this project out of reach.
READER = """
import sys, numpy as np
from ffcv.loader import Loader, OrderOption
from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
from ffcv.fields import RGBImageField
sys.modules["dataprep"] = None
numbers = {name: [IntDecoder()] for name in ("label", "id", "domain")}
loader = Loader(sys.argv[1], batch_size=32, num_workers=1, order=OrderOption.SEQUENTIAL,
                os_cache=True, drop_last=False, pipelines={"image": [SimpleRGBImageDecoder()], **numbers})
assert type(loader.reader.handlers["image"]) is RGBImageField
batches = [[np.array(column) for column in batch] for batch in loader]
np.savez(sys.argv[2], *[np.concatenate(column) for column in zip(*batches)])
"""


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def noted(notes: Path) -> list[int]:
    return [int(note.name) for note in notes.iterdir()]


class Outcome:
    """What one failing attempt came to, as seen the moment it ended."""

    def __init__(self, folder: Path, message: str, notes: Path) -> None:
        self.message = message
        self.files = sorted(file.name for file in folder.iterdir())
        self.processes = len(noted(notes))
        self.running = [process for process in noted(notes) if is_running(process)]


def attempt(trouble: str, root: Path) -> Outcome:
    folder, notes = root / "out", root / "notes"
    folder.mkdir(parents=True)
    notes.mkdir()
    script = [sys.executable, str(root.parent / "beton_cases.py"), str(folder), str(notes)]
    if trouble == "full":
        done = subprocess.run([*script, trouble], capture_output=True, text=True, timeout=WATCHDOG)
        return Outcome(folder, done.stdout + done.stderr, notes)
    if trouble.startswith("signal "):
        number = int(trouble.split()[1])
        with subprocess.Popen([*script, "sleep"], stderr=subprocess.DEVNULL) as process:
            wait_until(lambda: len(noted(notes)) == 3)  # the writing process and two workers
            process.send_signal(number)
            process.wait(WATCHDOG)
        if number != signal.SIGINT:  # then it could not wait for the others itself
            wait_until(lambda: not any(map(is_running, noted(notes))))
        return Outcome(folder, "", notes)
    beton_cases = importlib.import_module("beton_cases")
    (folder / "x.beton").write_bytes(b"an older file")
    try:
        write_beton(folder / "x.beton", beton_cases.Records(notes, trouble), num_workers=2, largest_bytes=102)
    except BetonError as error:
        return Outcome(folder, str(error), notes)
    return Outcome(folder, "no error", notes)


def read_with_ffcv(path: Path) -> None:
    """Leaves what FFCV's Loader reads in an .npz beside the file, or what it complains of in an .err."""
    command = [sys.executable, "-I", "-c", READER, str(path), str(path.with_suffix(".npz"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG)
    path.with_suffix(".err").write_text(done.stderr)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + WATCHDOG / 2
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


TROUBLES = ["raise", "wide", "kill worker", "leave worker", "kill writer", "full"]
SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]


@pytest.fixture(scope="module")
def outcomes(even: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    """All failures and a reader, two at a time: each starts a process that needs seconds to import FFCV."""
    root = tmp_path_factory.mktemp("failures")
    (root / "beton_cases.py").write_text(CASES)
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    todo.put("read")
    for trouble in [*TROUBLES, *(f"signal {int(number)}" for number in SIGNALS)]:
        todo.put(trouble)
    results: dict[str, Outcome] = {}

    def work() -> None:
        while not todo.empty():
            try:
                trouble = todo.get_nowait()
            except queue.Empty:
                return
            if trouble == "read":
                read_with_ffcv(even)
            else:
                results[trouble] = attempt(trouble, root / trouble.replace(" ", "_"))

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        paths = [str(Path(beton.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        others = multiprocessing.active_children()  # the session's ranks
        threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + WATCHDOG
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for process in set(multiprocessing.active_children()) - set(others):  # only after a hang
            process.kill()
        yield results


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("raise", ["Record 40 ", "ValueError: the sky fell", "leave it out"]),
        ("wide", ["Record 40 ", "id 1040", "70000x16", "resize"]),
        ("kill worker", ["worker", "signal 9", "fewer workers"]),
        ("leave worker", ["worker", "status 0"]),
        ("kill writer", ["process that writes", "signal 9"]),
        ("full", ["x.beton.part", "File too large", "Free some space"]),
    ],
)
def test_failure_is_a_sentence_and_leaves_nothing(outcomes: dict[str, Outcome], trouble: str, words: list[str]) -> None:
    assert trouble in outcomes, "it hung"
    outcome = outcomes[trouble]
    assert [word for word in words if word not in outcome.message] == [], outcome.message
    assert "noise" not in outcome.message  # what the processes print stays with them
    assert outcome.processes >= 2
    assert outcome.running == []
    assert outcome.files == ([] if trouble == "full" else ["x.beton"])  # the older file, not a partial one


@pytest.mark.parametrize("number", SIGNALS)
def test_no_process_survives_the_caller(outcomes: dict[str, Outcome], number: signal.Signals) -> None:
    outcome = outcomes[f"signal {int(number)}"]
    assert outcome.processes == 3
    assert outcome.running == []
    if number == signal.SIGINT:
        assert outcome.files == []


def test_two_workers_keep_bytes_and_order(even: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert list(BetonFile(even)) == [record_of(index) for index in range(COUNT)]
    assert BetonFile(even).page_size == 8 << 20
    assert capfd.readouterr().err == ""


def test_one_worker_mixed_sizes_and_a_large_record(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    records = [record_of(0, jpeg=jpeg_of(0, 9 + i, 200 - i), width=9 + i, height=200 - i) for i in range(40)]
    records[7] = record_of(7, jpeg=jpeg_of(7) + bytes(9 << 20), label=-1, domain=-(1 << 63), id=(1 << 63) - 1)
    path = tmp_path / "mixed.beton"
    write_beton(path, records, num_workers=1, largest_bytes=max(len(record.jpeg) for record in records))
    assert list(BetonFile(path)) == records
    assert BetonFile(path).page_size == 16 << 20
    assert capfd.readouterr() == ("", "")  # FFCV's progress bar stays away


def test_one_process_writes_several_files(tmp_path: Path) -> None:
    few = [record_of(index) for index in range(20)]
    many = [record_of(index) for index in range(60)]
    wide = [record_of(0, width=70_000)]
    with BetonWriter(2) as writer:
        others, processes = set(multiprocessing.active_children()), set[multiprocessing.process.BaseProcess]()
        for name, records in (("first", few), ("second", many)):
            seen: list[int] = []
            writer.write(tmp_path / f"{name}.beton", records, largest_bytes=20_000, on_progress=seen.append)
            assert seen[-1] == len(records)
            processes |= set(multiprocessing.active_children()) - others
        assert len(processes) == 1
        with pytest.raises(BetonError, match="70000x"):
            writer.write(tmp_path / "third.beton", wide, largest_bytes=20_000)
        assert not set(multiprocessing.active_children()) - others
        writer.write(tmp_path / "third.beton", few, largest_bytes=20_000)  # by a new one
    assert not set(multiprocessing.active_children()) - others
    for name, records in (("first", few), ("second", many), ("third", few)):
        assert list(BetonFile(tmp_path / f"{name}.beton")) == records
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.usefixtures("outcomes")
def test_ffcv_reads_every_sample(even: Path) -> None:
    arrays = even.with_suffix(".npz")
    assert arrays.exists(), even.with_suffix(".err").read_text()
    images, labels, ids, domains = np.load(arrays).values()
    expected = [record_of(index) for index in range(COUNT)]
    assert labels.ravel().tolist() == [record.label for record in expected]
    assert ids.ravel().tolist() == [record.id for record in expected]
    assert domains.ravel().tolist() == [record.domain for record in expected]
    exact = np.stack([np.asarray(Image.open(io.BytesIO(record.jpeg))) for record in expected]).astype(int)
    assert images.shape == (COUNT, HEIGHT, WIDTH, 3)
    difference = np.abs(images - exact)
    # FFCV decodes with libjpeg-turbo's fast transform; measured here: at most 8, 1.15 on average.
    assert difference.max() <= 16
    assert difference.mean() < 2.0


def test_refusals_before_any_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.beton"
    with pytest.raises(BetonError, match="no records"):
        write_beton(path, [], num_workers=1, largest_bytes=1)
    with pytest.raises(ValueError, match="num_workers"):
        write_beton(path, [record_of(0)], num_workers=0, largest_bytes=1)

    class Unpicklable(list[JpegRecord]):
        pass

    with pytest.raises(BetonError, match="picklable"):
        write_beton(path, Unpicklable([record_of(0)]), num_workers=1, largest_bytes=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(BetonError, match=r"libturbojpeg0-dev.*pip install \"fastcssl\[ffcv\]\""):
        write_beton(path, [record_of(0)], num_workers=1, largest_bytes=1)
    assert os.listdir(tmp_path) == []
