"""Writes .beton files with FFCV's own DatasetWriter, keeping JPEGs that are already encoded byte for byte.

FFCV's writer hangs when one of its workers fails, so it runs in a separate process:

    BetonWriter  --spawn-->  writing process (FFCV's parent)  --fork-->  FFCV's workers, new ones for each file

The writing process is spawned because the caller may have native threads, which a fork would break. It is kept from
file to file because importing FFCV takes seconds. All of these processes hold one pipe to BetonWriter. The pipe carries
progress and the first failure, and its end of file proves that all of them have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

from dataprep.manifest import settle
from dataprep.writers import beton
from dataprep.writers.beton import BetonError, BetonFile, JpegRecord

_CHUNK = 16  # records that a worker takes at a time; FFCV counts progress in the same steps
_WORKER_DONE = 77  # the exit status of a worker that finished; unlikely to occur by accident
_PROGRESS, _FAILURE, _DONE = b"P", b"E", b"K"
INSTALL = 'Run: apt install libopencv-dev libturbojpeg0-dev pkg-config; then: pip install "fastcssl[ffcv]"'
_Pipe: TypeAlias = "Connection[Any, Any]"
_OnProgress: TypeAlias = Callable[[int], None] | None


class JpegRecords(Protocol):
    """The records to write. They are pickled into the writing process and read in FFCV's forked workers."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> JpegRecord: ...


class _Host(NamedTuple):
    """The arguments with which the writing process starts."""

    parent: int
    jobs: _Pipe
    reports: _Pipe
    num_workers: int


class _Job(NamedTuple):
    """A file to write."""

    part: Path
    records: JpegRecords
    page_size: int


class BetonWriter:
    """Writes one file after another. A failure ends the writing process, and the next file starts a new one."""

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, not {num_workers}")
        self._num_workers = num_workers
        self._child: BaseProcess | None = None
        self._jobs: _Pipe
        self._reports: _Pipe

    def __enter__(self) -> BetonWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, path: Path, records: JpegRecords, *, largest_bytes: int, on_progress: _OnProgress = None) -> None:
        """Writes record i as sample i of `path`. A failure leaves neither a file nor a process behind.

        `largest_bytes` is the size of the largest JPEG. `on_progress` is called with the number of records done.
        """
        if importlib.util.find_spec("ffcv") is None:
            raise BetonError(f"Writing {path} needs the package ffcv, which is not installed. {INSTALL}")
        if (count := len(records)) == 0:
            raise BetonError(f"There are no records to write to {path}, and FFCV cannot store an empty data set.")
        part = path.with_name(path.name + ".part")
        job = _Job(part, records, beton.page_size_for(largest_bytes))
        try:
            self._supervise(job, on_progress)
            if (stored := len(BetonFile(part))) != count:
                raise BetonError(f"FFCV stored {stored} of {count} records in {part}. Write the file again.")
            try:
                settle(part, path)
            except OSError as error:
                raise BetonError(_explain(error, part)) from error
        finally:
            with contextlib.suppress(OSError):
                part.unlink()

    def close(self) -> None:
        """Ends all processes and returns when they have ended."""
        if self._child is not None:
            with self._reports, self._jobs:
                _end(self._reports, self._child)
            self._child = None

    def _supervise(self, job: _Job, on_progress: _OnProgress) -> None:
        try:
            request = ForkingPickler.dumps(job)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}. Are the records picklable?"
            raise BetonError(f"The request to write {job.part} could not be sent: {problem}") from error
        whole = False
        try:
            child = self._started()
            with contextlib.suppress(OSError):  # the process has ended; _follow finds out
                self._jobs.send_bytes(request)
            outcome = _follow(self._reports, child, on_progress)
            whole = outcome == ""
        finally:
            if not whole:
                self.close()
        if outcome != "":
            ending = f"The process that writes {job.part} {_how_it_ended(child.exitcode)}. Run it again."
            raise BetonError(outcome or ending)

    def _started(self) -> BaseProcess:
        if self._child is None:
            context = multiprocessing.get_context("spawn")
            (jobs, self._jobs), (self._reports, reports) = context.Pipe(duplex=False), context.Pipe(duplex=False)
            host = _Host(os.getpid(), jobs, reports, self._num_workers)
            child = context.Process(target=_writing_process, args=(host,))
            with jobs, reports:  # closed here, otherwise the pipe would never reach its end of file
                child.start()
            self._child = child
        return self._child


def _explain(error: BaseException, part: Path) -> str:
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, ImportError):
        return f"Writing {part} needs the package ffcv, which cannot be loaded ({reason}). {INSTALL}"
    if isinstance(error, OSError):
        return f"{part} could not be written ({reason}). Free some space or choose another folder, then run it again."
    return f"FFCV failed while writing {part} ({reason}). Run it again; if it persists, report this message."


def _how_it_ended(status: int | None) -> str:
    if status is None or status >= 0:
        return f"ended early with status {status}"
    memory = "; the memory may have run out" if status == -signal.SIGKILL else ""
    return f"was ended by signal {-status} ({signal.strsignal(-status)}){memory}"


def _follow(receiver: _Pipe, child: BaseProcess, on_progress: _OnProgress) -> str | None:
    """Passes progress on until the end. Returns "" for success, a sentence for a failure, None for a silent crash.

    `on_progress` is called several times per second, even if there is none, because it may raise to end the work.
    """
    done = 0
    while True:
        try:  # does not reap the child, because its id must stay valid until _end
            ended = os.waitid(os.P_PID, child.pid or 0, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        except ChildProcessError:
            ended = True
        if receiver.poll(0.2):  # after the check above, so that no last message is missed
            try:
                message = receiver.recv_bytes()
            except EOFError:
                return None
            if message[:1] != _PROGRESS:
                return message[1:].decode(errors="replace")
            done = int(message[1:])
        elif ended:
            return None
        if on_progress is not None:
            on_progress(done)


def _end(receiver: _Pipe, child: BaseProcess) -> None:
    """Ends the writing process and its workers, and returns when they have ended."""

    def await_end_of_pipe(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with contextlib.suppress(EOFError, OSError):
            while receiver.poll(max(0.0, deadline - time.monotonic())):
                receiver.recv_bytes()

    child.terminate()  # the process then ends and reaps its workers
    await_end_of_pipe(1.0)
    child.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):  # no process group: it had no workers yet
        os.killpg(child.pid or 0, signal.SIGKILL)
        await_end_of_pipe(10.0)  # limited, because a dead network disk can block even a killed process
        child.join(10.0)
        for _ in range(50):  # a process closes its files slightly before it ends
            os.killpg(child.pid or 0, 0)
            time.sleep(0.02)
    child.join(10.0)


# The rest of this file runs in the writing process and in FFCV's workers.


def _send(host: _Host, kind: bytes, text: str = "") -> None:
    try:  # shorter than PIPE_BUF, so that messages of several processes cannot mix
        host.reports.send_bytes(kind + text.encode(errors="replace")[:3500])
    except OSError:
        os._exit(1)  # the receiver is gone


def _die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies, however the parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # 1 is PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


def _writing_process(host: _Host) -> None:
    _die_with(host.parent)
    os.setsid()  # a process group of its own: it can be killed together and gets no Ctrl-C from the terminal
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    multiprocessing.set_start_method("fork", force=True)  # FFCV needs fork; Python 3.14 has another default
    workers: list[BaseProcess] = []

    def stop(*_: object) -> NoReturn:
        for worker in workers:
            worker.kill()
            worker.join()
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    part = Path("a .beton file")
    try:
        while True:
            job: _Job = host.jobs.recv()
            part = job.part
            _run_ffcv(host, job, workers)
            for worker in workers:
                worker.join(10.0)
                worker.kill()
                worker.join()
            workers.clear()
            _send(host, _DONE)
    except EOFError:  # no more files
        pass
    except BaseException as error:
        _send(host, _FAILURE, _explain(error, part))
    stop()


class _WholeWrites(io.FileIO):
    """Writes all bytes or raises an error. FFCV ignores short writes, which happen on a nearly full disk."""

    def write(self, data: Any, /) -> int:
        rest = memoryview(data)
        while rest:
            rest = rest[super().write(rest) :]
        return len(data)


def _import_writer() -> Any:
    """Returns FFCV's writer module, imported without the slow compilation of code that only FFCV's reader needs."""
    config: Any = importlib.import_module("numba.core.config")
    jit_disabled = config.DISABLE_JIT
    config.DISABLE_JIT = 1
    writer: Any = importlib.import_module("ffcv.writer")
    config.DISABLE_JIT = jit_disabled
    return writer


def _ffcv_dataset(host: _Host, job: _Job) -> Any:
    """Returns the job's records as the indexed dataset that FFCV's workers read."""

    class Dataset:
        def __getitem__(self, index: int) -> tuple[JpegRecord, int, int, int]:
            try:
                record = job.records[index]
                problem = beton.why_not_storable(record, job.page_size)
            except BaseException as error:
                problem = f"could not be read ({type(error).__name__}: {error}); repair it or leave it out"
            if problem:  # sent from here, because FFCV may wait for other workers before it reports an error
                _send(host, _FAILURE, f"Record {index} {problem}.")
                os._exit(1)
            return record, record.label, record.id, record.domain

    return Dataset()


def _jpeg_field() -> Any:
    """Returns an FFCV field that stores a JPEG unchanged. Readers see FFCV's RGBImageField."""
    # Imported from its own module, because `ffcv.writer` still has the replacement made for the last file.
    rgb_image_field: Any = importlib.import_module("ffcv.fields").RGBImageField

    class JpegField(rgb_image_field):  # type: ignore[misc]
        def encode(self, destination: Any, image: JpegRecord, malloc: Any) -> None:
            destination["mode"] = beton.JPEG_MODE
            destination["width"], destination["height"] = image.width, image.height
            destination["data_ptr"], storage = malloc(len(image.jpeg))
            memoryview(storage)[:] = image.jpeg

    return JpegField


def _run_ffcv(host: _Host, job: _Job, workers: list[BaseProcess]) -> None:
    """Writes one file. Replaces parts of FFCV's module that have no hooks, which is safe in this separate process."""
    writer = _import_writer()
    memory_allocator: Any = importlib.import_module("ffcv.memory_allocator").MemoryAllocator
    handlers: dict[int, Any] = writer.TYPE_ID_HANDLER
    owner, is_whole = os.getpid(), threading.Event()
    watch = threading.Thread(target=_watch, args=(host, job, workers, is_whole), daemon=True)

    class Allocator(memory_allocator):  # type: ignore[misc]
        def __enter__(self) -> None:
            self.fp = _WholeWrites(self.fname, "ab")

    class Worker(multiprocessing.Process):
        def start(self) -> None:
            super().start()
            workers.append(self)

        def run(self) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _die_with(owner)
            try:
                super().run()
            except BaseException as error:
                _send(host, _FAILURE, _explain(error, job.part))
                os._exit(1)
            raise SystemExit(_WORKER_DONE)

    class Progress:  # replaces FFCV's progress bar, which FFCV creates after it has started the last worker
        def __init__(self, **_: Any) -> None:
            self.done = 0
            watch.start()

        def update(self, more: int) -> None:
            self.done += int(more)
            _send(host, _PROGRESS, str(self.done))

        def close(self) -> None: ...

    def shared_memory(*, size: int, **_: Any) -> SimpleNamespace:
        # FFCV's named memory would outlive a killed process and is scarce in containers. Forks need no name.
        return SimpleNamespace(buf=mmap.mmap(-1, size), close=lambda: None, unlink=lambda: None)

    handlers[beton.RGB_TYPE_ID] = _jpeg_field()
    writer.MemoryAllocator, writer.Process, writer.tqdm = Allocator, Worker, Progress
    writer.shared_memory = SimpleNamespace(SharedMemory=shared_memory)
    columns = {name: handlers[type_id]() for name, type_id in beton.FIELDS.items()}
    output = writer.DatasetWriter(str(job.part), columns, job.page_size, host.num_workers)
    output.from_indexed_dataset(_ffcv_dataset(host, job), indices=range(len(job.records)), chunksize=_CHUNK)
    is_whole.set()
    watch.join()  # so that it reports nothing about this file during the next one


def _watch(host: _Host, job: _Job, workers: list[BaseProcess], is_whole: threading.Event) -> None:
    """Reports workers that ended before their work was done, which FFCV does not notice."""
    running = list(workers)
    while running and not is_whole.wait(0.1):
        for worker in [worker for worker in running if worker.exitcode is not None]:
            running.remove(worker)
            if worker.exitcode != _WORKER_DONE:
                how = f"{_how_it_ended(worker.exitcode)}. Use fewer workers or run it again."
                _send(host, _FAILURE, f"A worker process writing {job.part} {how}")
