"""Compares our loader's back ends with torchvision, DALI and FFCV, in source images per second with two views each.

    python benchmarks/loader.py --quick                       # the embedded set, less than two minutes
    python benchmarks/loader.py --images DIR --cifar DIR --json loader.jsonl

Photos are prepared once at a short side of 256 px, and every contender reads the same JPEGs from a warm page cache.
Each contender has its own process, with as many cores as threads (or DataLoader workers). The process is stopped while
others are measured, so that work in progress neither disturbs them nor counts for it. "First batch" is the time from
creating the loader to its first batch, with packages already imported. "Other task" is the time from the request for
another task's images to their first batch, minus the normal time of a batch. Peers create a new loader for that.
"""

import contextlib
import math
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from loader_data import Images, prepare_photos, prepare_small
from loader_process import Begun, Job, Waits, advance, begin, measure_waits, settle_in
from loader_rows import CEILINGS, FULL, LARGE, NAMES, SECTIONS, Section, filter_of, is_installed
from loader_tables import show, summarize
from prep import draw
from rich.console import Console
from timing import Case, Child, Failed, environment, interleave, speedup, write_json_lines

PACKAGES = ("fastcssl", "torch", "torchvision", "pillow", "nvidia-dali-cuda130", "ffcv", "numba", "numpy")


@dataclass(frozen=True, kw_only=True)
class Options:
    images: Path | None = None  # A folder of photos at any depth. Without it, the embedded set is used.
    cifar: Path | None = None  # CIFAR-100, raw or prepared, for the 32-px rows. Without it, the embedded set is used.
    json: Path | None = None  # Where to write the numbers, one JSON object per line. The last one is the summary.
    quick: bool = False  # Takes less than two minutes: fewer rows and rounds, two threads only for the full policy.
    smoke: bool = False  # Takes seconds: shows that it runs, but measures nothing.
    rounds: int | None = None  # How many times everything is measured.
    only: str = ""  # Contenders to measure, separated by commas. Empty: all.
    work: Path | None = None  # Where to prepare images. Kept and reused by the next start.
    seed: int = 0  # The seed of the embedded set.


class Scale(NamedTuple):
    level: int  # rows of this level and below are measured
    rounds: int
    slice_seconds: float  # per contender and round; at least two batches
    batch_size: int
    num_drawn: int
    num_drawn_small: int
    repetitions: int  # of the waits


SCALES = {
    "smoke": Scale(0, 1, 0.0, 8, 40, 400, 1),
    "quick": Scale(1, 3, 0.3, 32, 120, 2000, 5),
    "full": Scale(2, 5, 1.0, 64, 480, 10_000, 5),
}


@dataclass(kw_only=True)
class Entry:
    """One contender with one number of threads, and its process."""

    section: Section
    job: Job
    child: Child
    case: Case
    pid: int = 0
    begun: Begun | None = None
    waits: Waits | None = None
    num_batches: int = 2  # per round

    def call(self, function: Any, *args: Any, limit_seconds: float = 240) -> Any:
        """Wakes the process for one call, then stops it again with all its threads and workers."""
        if self.pid:
            os.killpg(self.pid, signal.SIGCONT)
        try:
            return self.child.call(function, *args, limit_seconds=limit_seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGSTOP) if self.pid else None

    def settle_in(self, number: int) -> None:
        try:
            self.pid = self.child.call(settle_in, self.job.contender, self.job.num_threads, number, limit_seconds=240)
            os.killpg(self.pid, signal.SIGSTOP)
        except Failed as failure:
            self.case.failure = str(failure)

    def begin(self, images: Images, slice_seconds: float) -> None:
        if self.case.failure:
            return
        self.job = replace(self.job, manifest=images.manifest, jpegs=images.jpegs)
        try:
            self.begun = begun = self.call(begin, self.job)
        except Failed as failure:
            self.case.failure = str(failure)
            return
        self.num_batches = max(2, math.ceil(slice_seconds / begun.batch_seconds))
        self.case.num_items = self.num_batches * self.job.batch_size
        self.case.num_bytes = round(self.case.num_items * images.mean_bytes)

    def measure_waits(self, repetitions: int) -> None:
        if self.case.failure or self.job.contender in CEILINGS or self.begun is None:
            return
        if self.begun.first_batch_seconds > 1:
            repetitions = 1  # it compiles or is slow, and neither varies much
        with contextlib.suppress(Failed):
            self.waits = self.call(measure_waits, self.job, repetitions)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT) if self.pid else None
        self.child.close(patience_seconds=3)

    @property
    def batch_ms(self) -> float | None:
        return 1e3 * statistics.median(self.case.seconds) / self.num_batches if self.case.seconds else None

    @property
    def first_batch_ms(self) -> float | None:
        return 1e3 * statistics.median(self.waits.first_batch) if self.waits else None

    @property
    def other_task_ms(self) -> float | None:
        """Returns the time lost by switching, compared with the batches right after it, because noise varies."""
        if self.waits is None:
            return None
        return 1e3 * statistics.median(a - b for a, b in zip(self.waits.other_task, self.waits.batch, strict=True))

    def record(self) -> dict[str, Any]:
        about = {
            "section": self.section.key,
            "contender": self.job.contender,
            "filter": filter_of(self.section, self.job.contender),
            "policy": self.job.policy,
            "photometry": self.job.photometry,
            "batch_size": self.job.batch_size,
        }
        measured = {
            "batch_ms": self.batch_ms,
            "first_batch_ms": self.first_batch_ms,
            "first_batch_cold_ms": self.begun and 1e3 * self.begun.first_batch_seconds,
            "other_task_ms": self.other_task_ms,
            "waits": self.waits and self.waits._asdict(),
            "peak_rss_mb": self.begun and self.begun.peak_mb,
            "imports_rss_mb": self.begun and self.begun.imports_mb,
        }
        return {**about, **self.case.record("image"), **measured}


@dataclass(kw_only=True)
class Bench:
    folder: Path
    scale: Scale
    only: frozenset[str]
    entries: dict[tuple[str, str, int], Entry] = field(default_factory=dict)  # by section, contender, threads

    @contextlib.contextmanager
    def started(self, sections: Sequence[Section]) -> Iterator[ThreadPoolExecutor]:
        """Starts the processes of these sections. The pool is done when they have imported their packages."""
        entries: list[Entry] = []
        cores = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(cores) as pool:
            try:
                for section, row in ((each, row) for each in sections for row in each.rows):
                    if (self.only and row.contender not in self.only) or not is_installed(row.contender):
                        continue
                    for num_threads, level in ((1, row.level), (2, row.level_2)):
                        if level <= self.scale.level and num_threads <= cores:
                            entries.append(self._entry(section, row.contender, num_threads))
                            pool.submit(entries[-1].settle_in, len(entries))
                yield pool
            finally:
                pool.shutdown(cancel_futures=True)
                with ThreadPoolExecutor(max(1, len(entries))) as closing:  # in parallel, because some end slowly
                    closing.map(Entry.close, entries)

    def _entry(self, section: Section, contender: str, num_threads: int) -> Entry:
        batch_size = self.scale.batch_size if section.policy == LARGE else 4 * self.scale.batch_size
        entry = Entry(
            section=section,
            job=Job(
                contender=contender,
                policy=section.policy,
                bilinear=section.bilinear,
                photometry=section.photometry,
                num_threads=num_threads,
                batch_size=batch_size,
            ),
            child=Child(self.folder / f"{section.key}-{contender}-{num_threads}.log"),
            case=Case(
                name=NAMES[contender],
                workers=num_threads,
                num_items=batch_size,
                num_bytes=0,
                run=lambda: float(entry.call(advance, entry.num_batches)),
            ),
        )
        self.entries[section.key, contender, num_threads] = entry
        return entry

    def measure(self, section: Section, images: Images, on_step: Callable[[str], None]) -> None:
        entries = [entry for entry in self.entries.values() if entry.section == section]
        for entry in entries:
            on_step(f"{section.key} · warm-up · {entry.case.name} · {entry.case.workers}")
            entry.begin(images, self.scale.slice_seconds)
        interleave(
            [entry.case for entry in entries],
            self.scale.rounds,
            lambda number, case: on_step(
                f"{section.key} · round {number + 1} of {self.scale.rounds} · {case.name} · {case.workers}"
            ),
        )
        for entry in entries:
            if self.scale.level >= FULL or entry.job.contender == section.lead:
                on_step(f"{section.key} · waits · {entry.case.name} · {entry.case.workers}")
                entry.measure_waits(self.scale.repetitions)

    def ratio(self, section: str, ours: str, other: str, threads: int = 1, other_threads: int = 1) -> float | None:
        one, two = self.entries.get((section, ours, threads)), self.entries.get((section, other, other_threads))
        return speedup(one.case, two.case) if one and two else None


def prepare(options: Options, folder: Path, scale: Scale) -> tuple[Images, Images]:
    photos = options.images or folder / "drawn"
    if options.images is None and not photos.exists():
        draw(photos, scale.num_drawn, options.seed)
    cores = len(os.sched_getaffinity(0))
    large = prepare_photos(folder / "photos", photos, cores)
    return large, prepare_small(folder / "small", options.cifar, scale.num_drawn_small, cores)


def main() -> int:
    options = tyro.cli(Options, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    kind = "smoke" if options.smoke else "quick" if options.quick else "full"
    scale = SCALES[kind]
    scale = scale._replace(rounds=options.rounds or scale.rounds)
    console = Console(width=None if sys.stdout.isatty() else 110)
    load_before = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastcssl-bench-")))
        work = options.work or logs
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder=logs, scale=scale, only=frozenset(filter(None, options.only.split(","))))
        # Starts one group of processes at a time, because many would not fit into memory. They import while images are
        # prepared.
        groups = [list(SECTIONS)] if kind == "smoke" else [[section] for section in SECTIONS]
        prepared: tuple[Images, Images] | None = None
        with Console(stderr=True).status("preparing images") as status:
            for group in groups:
                with bench.started(group) as imports:
                    prepared = prepared or prepare(options, work, scale)
                    imports.shutdown()
                    for section in group:
                        bench.measure(section, prepared[section.policy != LARGE], status.update)
        assert prepared is not None
        large, small = prepared
    console.print(
        f"{large.num_images:,} photos ({options.images or 'the embedded set'}), short side 256 px, "
        f"{large.mean_bytes / 1e3:.1f} kB each; {small.num_images:,} images of 32 px "
        f"({options.cifar or 'the embedded set'}).\n"
        f"{scale.rounds} interleaved rounds, warm cache, as many cores as threads; batches of {scale.batch_size} "
        f"photos or {4 * scale.batch_size} 32-px images.",
        highlight=False,
    )
    summary = summarize(bench)
    show(console, bench, summary)
    if options.json is not None:
        about = environment(
            PACKAGES,
            scale=kind,
            rounds=scale.rounds,
            slice_seconds=scale.slice_seconds,
            seed=options.seed,
            images=options.images.name if options.images else "synthetic",
            num_images=large.num_images,
            small_images=options.cifar.name if options.cifar else "synthetic",
            num_small_images=small.num_images,
            load_average_before=round(load_before, 2),
        )
        records = [entry.record() for entry in bench.entries.values()]
        write_json_lines(options.json, [*records, {"environment": about}, {"summary": summary}])
    return 0


if __name__ == "__main__":
    sys.exit(main())
