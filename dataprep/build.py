"""Builds a data set: splits the samples into tasks, encodes them in order and writes them as parts.

A part is a run of consecutive samples of one task and split. Every streamed format writes it as one shard. A part is
sealed (synced, checksummed, renamed and recorded in the journal) in the background while the next one is written.
Therefore a build that is killed loses at most two parts, and the next start writes them again byte for byte.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from dataprep.encode import Encoded, Encoding, encode_all
from dataprep.errors import Interrupted, PrepError, output_error
from dataprep.journal import (
    FOLDER,
    JobIdentity,
    Journal,
    SealedFile,
    SealedPart,
    finish_removal,
    part_name,
    refuse_other_job,
)
from dataprep.manifest import (
    DEFAULT_NAME,
    SPLITS,
    Manifest,
    SplitName,
    load_manifest,
    make_folder,
    sha256_of,
)
from dataprep.part import Part
from dataprep.progress import ImageMeter, counted
from dataprep.samples import Sample
from dataprep.scenario import Assignment, Scenario, randperm, split
from dataprep.sources import Source
from dataprep.splits import assemble, order_name
from dataprep.writers import DerivedFormat, DerivedWriter, Format, StreamedFormat, formats

_POLL_SECONDS = 0.2
_SHUFFLE_SEED = 1  # seeds the order inside a task, which is part of the format and not a setting


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuildJob:
    """Everything a build needs to know, with every default filled in."""

    source: Source
    scenario: Scenario
    encoding: Encoding
    formats: tuple[str, ...]
    out: Path
    shard_mb: int = 256
    limit_per_class: int | None = None
    max_corrupt: float = 0.001
    num_workers: int = 1

    def identity(self) -> JobIdentity:
        """Returns the settings that may not change when the build is started again in the same folder."""
        return JobIdentity(
            source=self.source.kind,
            fingerprint=self.source.samples.fingerprint(),
            scenario=self.scenario.kind,
            num_tasks=self.scenario.num_tasks,
            order=order_name(self.scenario),
            formats=self.formats,
            resize=str(self.encoding.resize),
            quality=self.encoding.quality,
            check=self.encoding.check,
            shard_mb=self.shard_mb,
            limit_per_class=self.limit_per_class,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """The manifest that a build wrote, and what each task cost."""

    manifest: Manifest
    seconds_by_task: tuple[float, ...]
    quarantined_by_task: tuple[int, ...]
    num_resumed: int  # samples that an earlier start had already sealed
    was_complete: bool = False


def build(job: BuildJob, console: Console, should_stop: Callable[[], bool] = lambda: False) -> BuildResult:
    """Runs or resumes a build and returns its result.

    `should_stop` is called several times per second. (An exception raised in a signal handler could interrupt the code
    anywhere, even while it holds a lock.)
    """
    known = formats()
    chosen = [known[name] for name in job.formats]
    for format in chosen:
        if isinstance(format, DerivedFormat):
            format.require()
    plan = split(job.source.samples, job.source.classes, job.source.domains, job.scenario)
    try:
        has_journal = (job.out / FOLDER / "journal").exists()
        if (job.out / f"{DEFAULT_NAME}.json").exists() and not has_journal:
            return _already_built(job)
        if has_journal:
            console.print("Checking what is already stored.", highlight=False)
        with Journal(job.out, job.identity(), should_stop) as journal:
            return _Builder(job, plan, chosen, journal, console, should_stop).run()
    except OSError as error:
        raise output_error(job.out, error) from error


def _already_built(job: BuildJob) -> BuildResult:
    manifest = load_manifest(job.out)
    encoding, scenario = manifest.encoding, manifest.scenario
    there = JobIdentity(
        source=manifest.source.kind,
        fingerprint=manifest.source.fingerprint,
        scenario=scenario.kind,
        num_tasks=scenario.num_tasks,
        order=scenario.order,
        formats=tuple(manifest.formats),
        resize=encoding.resize,
        quality=encoding.quality,
        check=encoding.check,
        shard_mb=encoding.shard_mb,
        limit_per_class=encoding.limit_per_class,
    )
    refuse_other_job(job.out, there.to_json(), job.identity())
    finish_removal(job.out)
    total = manifest.source.num_train + manifest.source.num_val
    none = (0,) * len(manifest.tasks)
    return BuildResult(
        manifest=manifest, seconds_by_task=none, quarantined_by_task=none, num_resumed=total, was_complete=True
    )


class _Builder:
    def __init__(
        self,
        job: BuildJob,
        plan: Assignment,
        chosen: list[Format],
        journal: Journal,
        console: Console,
        should_stop: Callable[[], bool],
    ) -> None:
        self.job, self.plan, self.journal, self.should_stop = job, plan, journal, should_stop
        self.derived = [f for f in chosen if isinstance(f, DerivedFormat)]
        self.streamed = [f for f in chosen if isinstance(f, StreamedFormat)]
        self.spools_tar = bool(self.derived) and all(f.name != "tar" for f in self.streamed)
        if self.spools_tar:
            tar = formats()["tar"]
            assert isinstance(tar, StreamedFormat)
            self.streamed.append(tar)
        self.size = self._sealed_size()
        self.num_corrupt = sum(len(part.quarantine) for part in journal.parts)
        total = len(job.source.samples)
        self.max_corrupt = max(1, int(job.max_corrupt * total)) if job.max_corrupt > 0 else 0
        resumed = sum(part.num_consumed for part in journal.parts)
        resumed_bytes = sum(file.bytes for part in journal.parts for file in part.files)
        self.num_resumed = sum(part.num_consumed for part in journal.parts if not part.is_derived)
        self.meter = ImageMeter(console, total * (1 + len(self.derived)), resumed=resumed, resumed_bytes=resumed_bytes)
        self.sealer = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self.sealing: Future[None] | None = None

    def run(self) -> BuildResult:
        num_tasks = len(self.plan.tasks)
        with self.meter:
            try:
                for task in range(num_tasks):
                    for name in SPLITS:
                        self.meter.label(f"task {task + 1} of {num_tasks} · {name}")
                        self._stream(task, name)
                self._await_seal()
                for format in self.derived:
                    with contextlib.closing(format.derive(self.job.num_workers)) as writer:
                        for task in range(num_tasks):
                            for name in SPLITS:
                                self.meter.label(f"task {task + 1} of {num_tasks} · {name} · {format.name}")
                                self._derive(format, writer, task, name)
            finally:
                self.sealer.shutdown(wait=True)
        if not any(part.files for part in self.journal.parts):
            raise PrepError(
                f"None of the {counted(self.num_corrupt, 'image')} can be decoded, so there is nothing to store. "
                "Check the source."
            )
        manifest = assemble(self.job, self.plan, self.journal)
        by_task = [[part for part in self.journal.parts if part.task == task] for task in range(num_tasks)]
        self.journal.remove()
        return BuildResult(
            manifest=manifest,
            seconds_by_task=tuple(sum(part.seconds for part in parts) for parts in by_task),
            quarantined_by_task=tuple(sum(len(part.quarantine) for part in parts) for parts in by_task),
            num_resumed=self.num_resumed,
        )

    def _rows(self, task: int, name: SplitName) -> npt.NDArray[np.int64]:
        """Returns the samples of a task and split in the order in which they are stored."""
        samples = self.job.source.samples
        rows = np.flatnonzero((self.plan.task_S == task) & (samples.is_val_S == (name == "val")))
        return rows[randperm(len(rows), _SHUFFLE_SEED)]

    def _sealed_size(self) -> tuple[int, int] | None:
        for part in self.journal.parts:
            if part.files and not part.is_derived:
                row = self.journal.rows(part)[0]
                return int(row["width"]), int(row["height"])
        return None

    def _stream(self, task: int, name: SplitName) -> None:
        """Encodes and writes the samples that are not sealed yet, part by part."""
        sealed = self.journal.of(task, name)
        rows = self._rows(task, name)[sum(part.num_consumed for part in sealed) :]
        number = len(sealed)
        part: Part | None = None
        encoded_all = self._encoded(rows)
        try:
            for encoded in encoded_all:
                if self.should_stop():
                    raise Interrupted
                if part is None:
                    part = self._new_part(task, name, number)
                if encoded.fault:
                    part.quarantine(encoded)
                    self._spend_corrupt(encoded)
                    self.meter.advance()
                    continue
                if part.overflows(encoded):
                    self._seal(part)
                    number += 1
                    part = self._new_part(task, name, number)
                self._check_one_size(encoded)
                part.add(encoded)
                self.meter.advance(1, len(encoded.jpeg) or encoded.width * encoded.height * 3)
            if part is not None:
                self._seal(part)
        except BaseException:
            if part is not None:
                part.abandon()
            raise
        finally:
            encoded_all.close()

    def _encoded(self, rows: npt.NDArray[np.int64]) -> Any:
        samples, source = self.job.source.samples, self.job.source
        ordered: Iterator[Sample] = (samples[row] for row in rows.tolist())
        return encode_all(
            ordered,
            source.payload,
            self.job.encoding,
            want_jpeg=any(f.stores == "jpeg" for f in self.streamed),
            want_pixels=any(f.stores == "pixels" for f in self.streamed),
            num_threads=self.job.num_workers,
            should_stop=self.should_stop,
        )

    def _new_part(self, task: int, name: SplitName, number: int) -> Part:
        stem = part_name(task, name, number)
        targets = {}
        for format in self.streamed:
            spooled = self.spools_tar and format.name == "tar"
            folder = self.journal.folder / "spool" if spooled else self.job.out
            targets[format] = folder / (stem + format.suffix)
        return Part(task, name, number, targets, limit_bytes=self.job.shard_mb * 1_000_000)

    def _check_one_size(self, encoded: Encoded) -> None:
        if all(format.stores == "jpeg" for format in self.streamed):
            return
        size = (encoded.width, encoded.height)
        self.size = self.size or size
        if size != self.size:
            raise PrepError(
                f"{encoded.sample.key} is {size[0]} x {size[1]} pixels, but other images are {self.size[0]} x "
                f"{self.size[1]}, and the array format stores images of one size. "
                "Use --resize square:N, or --formats tar."
            )

    def _spend_corrupt(self, encoded: Encoded) -> None:
        self.num_corrupt += 1
        if self.num_corrupt > self.max_corrupt:
            raise PrepError(
                f"{counted(self.num_corrupt, 'corrupt image')} found; the last one is {encoded.sample.key} "
                f"({encoded.fault}). --max-corrupt {self.job.max_corrupt:g} allows {self.max_corrupt}. "
                "Repair or remove such images, or raise --max-corrupt, and run the same command again."
            )

    def _seal(self, part: Part) -> None:
        """Seals a part in the background while encoding continues. At most one part is being sealed at a time."""
        self._await_seal()
        self.sealing = self.sealer.submit(self._seal_now, part)

    def _await_seal(self) -> None:
        if self.sealing is not None:
            sealing, self.sealing = self.sealing, None
            while not wait([sealing], timeout=_POLL_SECONDS).done:
                if self.should_stop():
                    raise Interrupted
            sealing.result()

    def _seal_now(self, part: Part) -> None:
        try:
            sealed = part.seal(
                self.job.out, self.journal.rows_path(part.task, part.split, part.number), self.should_stop
            )
        except BaseException:
            part.abandon()
            raise
        self.journal.seal(sealed)

    def _derive(self, format: DerivedFormat, writer: DerivedWriter, task: int, name: SplitName) -> None:
        if self.journal.derived(task, name, format.name) is not None:
            return
        parts = self.journal.of(task, name)
        tars = [self.job.out / file.path for part in parts for file in part.files if file.format == "tar"]
        rows = [self.journal.rows(part) for part in parts if part.files]
        count = sum(map(len, rows))
        if not count:
            return
        began = time.monotonic()
        path = self.job.out / (part_name(task, name, None) + format.suffix)
        make_folder(path.parent)
        done = 0

        def on_progress(now_done: int) -> None:
            nonlocal done
            if self.should_stop():
                raise Interrupted
            self.meter.advance(now_done - done)
            done = now_done

        writer.write(path, tars, rows, on_progress)
        on_progress(count)
        file = SealedFile(
            path=path.relative_to(self.job.out).as_posix(),
            format=format.name,
            bytes=path.stat().st_size,
            sha256=sha256_of(path, self.should_stop),
            count=count,
        )
        self.journal.seal(
            SealedPart(
                task=task,
                split=name,
                number=None,
                num_consumed=count,
                num_passed_through=0,
                num_warnings=0,
                seconds=time.monotonic() - began,
                files=[file],
            )
        )
