"""Measures complete training steps, the same step on a batch held in memory, the loader alone, and lightly's MoCo.

    python benchmarks/train.py --quick                        # the embedded set, about a minute
    python benchmarks/train.py --data DIR --json train.jsonl

A step is what fastcssl/train/loop.py does with a batch: forward, backward, optimiser, momentum, banks. Epochs are
endless, and nothing is logged or saved. Every contender has its own process, with as many threads for computing as for
loading, which is stopped while others are measured. The ceiling of complete steps is the slower of loader and held
batch on a GPU, and the sum of both on a CPU, where they share the cores. lightly runs on this environment's torch.
train_lightly.py explains how it trains, and train_process.py what counts as memory."""

import contextlib
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro
from rich.console import Console
from timing import Case, Child, Failed, environment, interleave, write_json_lines
from train_lightly import Found, find_lightly
from train_process import Job, Mode, Peaks, Side, Slice, advance, begin, peaks, settle_in
from train_tables import show, summarize

from dataprep.build import BuildJob, build
from dataprep.encode import Encoding
from dataprep.errors import PrepError
from dataprep.manifest import ManifestError, load_manifest, manifest_path
from dataprep.scenario import Scenario
from dataprep.sources import open_source
from dataprep.table import load_table, rows_of_ids

PACKAGES = ("fastcssl", "torch", "torchvision", "pillow", "numpy")
SMOKE, QUICK, FULL = range(3)


@dataclass(frozen=True, kw_only=True)
class Options:
    data: Path | None = None  # A prepared folder. It replaces the 32-px images if it is an array, else the photos.
    json: Path | None = None  # Where to write the numbers, one JSON object per line. The last one is the summary.
    quick: bool = False  # Takes about a minute: fewer rows and rounds, smaller banks.
    smoke: bool = False  # Takes seconds: shows that it runs, but measures nothing.
    lightly_python: Path | None = None  # A Python of this version that has lightly. Default: this one.
    device: Literal["auto", "cpu", "cuda"] = "auto"  # Where to train.
    threads: int = 2  # Threads for computing, and as many for loading; also the cores of a contender.
    encoder: str | None = None  # Such as resnet18. Default: resnet18 on a GPU, a narrow one on a CPU.
    batch_size: int | None = None
    size_px: int | None = None  # The size of the views of photos.
    rounds: int | None = None  # How many times everything is measured.
    work: Path | None = None  # Where to prepare images. Kept and reused by the next start.
    seed: int = 0  # The seed of the embedded set, the initial weights and the views.


class Scale(NamedTuple):
    level: int  # rows of this level and below are measured
    rounds: int
    slice_seconds: float  # per contender and round; at least two steps
    num_warm_up: int  # steps
    encoder: str
    batch_size: int
    size_px: int
    bank_size: int
    num_drawn: int  # in two tasks with 20 classes in all
    num_drawn_small: int


SCALES = {
    "smoke": Scale(SMOKE, 1, 0.0, 1, "resnet18-w8", 8, 32, 64, 20, 20),
    "quick": Scale(QUICK, 3, 0.6, 4, "resnet18-w8", 64, 64, 16_384, 240, 480),
    "full": Scale(FULL, 5, 2.5, 8, "resnet18-w16", 128, 64, 65_536, 480, 1920),
}


class Row(NamedTuple):
    side: Side
    mode: Mode
    level: int


class WorkLoad(NamedTuple):
    key: str
    title: str
    level: int
    is_small: bool
    strategy: str
    task: int
    policy: str
    rows: tuple[Row, ...]


_STEP, _HELD = Row("ours", "step", SMOKE), Row("ours", "held", SMOKE)
_CEILINGS = (Row("ours", "loader", QUICK), Row("ours", "networks", FULL))
_LIGHTLY = (Row("lightly", "step", SMOKE), Row("lightly", "held", FULL), Row("lightly", "loader", FULL))
_MOCO, _PNR = (_STEP, _HELD, *_CEILINGS, *_LIGHTLY), (_STEP, _HELD, *_CEILINGS)
# Both views of CaSSLe's MoCo have the same distribution, as in lightly. PNR's views differ.
WORK_LOADS = (
    WorkLoad("small", "MoCo, 32-px images in an array", SMOKE, True, "finetune", 0, "cassle-moco-cifar", _MOCO),
    WorkLoad("photos", "MoCo, JPEGs", QUICK, False, "finetune", 0, "cassle-moco-imagenet", _MOCO),
    WorkLoad("pnr", "MoCo + PNR, second task, JPEGs", QUICK, False, "pnr", 1, "pnr-moco-imagenet", _PNR),
)


# ---- Images ----------------------------------------------------------------------------------------------------------


class Images(NamedTuple):
    manifest: Path
    about: str
    num_images: int  # in the first task
    mean_bytes: float
    jpegs: Path | None = None  # the first task's images as single files


def prepare(
    options: Options, folder: Path, scale: Scale, loads: Sequence[WorkLoad], *, files: bool
) -> dict[bool, Images]:
    """Returns the images that these work loads need, by `is_small`. With `files`, photos are also single files."""
    found: dict[bool, Images] = {}
    try:
        if options.data is not None:
            images = _images(manifest_path(options.data), options.data.resolve().name)
            found["array" in load_manifest(images.manifest).formats] = images
        for is_small in {load.is_small for load in loads} - found.keys():
            drawn = scale.num_drawn_small if is_small else scale.num_drawn
            found[is_small] = _drawn(folder, is_small, max(drawn, 2 * scale.batch_size), options)
        for load in loads:
            if load.task >= len(load_manifest(found[load.is_small].manifest).tasks):
                about = found[load.is_small].about
                raise SystemExit(
                    f"{about} has one task, but {load.key} is measured in the second. Use fastcssl-prep split."
                )
    except (ManifestError, PrepError) as error:
        raise SystemExit(str(error)) from None
    if files and False in found:
        found[False] = found[False]._replace(jpegs=_extract(found[False].manifest, folder / "jpegs"))
    return found


def _drawn(folder: Path, is_small: bool, count: int, options: Options) -> Images:
    size, format = ("32", "array") if is_small else ("mixed", "tar")
    job = BuildJob(
        source=open_source(f"synthetic:size={size},classes=20,train={math.ceil(count / 20)},val=0,seed={options.seed}"),
        scenario=Scenario(kind="data", num_tasks=2),
        encoding=Encoding(),
        formats=(format,),
        out=folder / f"{format}-{count}-{options.seed}",
        num_workers=options.threads,
    )
    build(job, Console(quiet=True))
    return _images(manifest_path(job.out), "the embedded set")


def _images(path: Path, about: str) -> Images:
    manifest = load_manifest(path)
    format = next((name for name in ("array", "tar") if name in manifest.formats), None)
    if format is None:
        raise SystemExit(
            f"{about} was prepared as {', '.join(manifest.formats)}. Prepare it with --formats tar or array."
        )
    table = load_table(manifest, path.parent)
    mean_bytes = float(table[f"{format}_bytes"][table["is_stored"]].mean())
    return Images(path, about, manifest.tasks[0].train.count, mean_bytes)


def _extract(path: Path, target: Path) -> Path:
    target.mkdir(exist_ok=True)
    manifest = load_manifest(path)
    table = load_table(manifest, path.parent)
    ids: Any = list(manifest.tasks[0].train.iter_ids())
    for row in table[rows_of_ids(table, ids)]:
        with (path.parent / manifest.shards[row["tar_shard"]].path).open("rb") as shard:
            shard.seek(row["tar_place"])
            (target / f"{row['id']:07d}.jpg").write_bytes(shard.read(row["tar_bytes"]))
    return target


# ---- Contenders ------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Entry:
    """One contender in one work load, and its process."""

    load: WorkLoad
    job: Job
    child: Child
    case: Case
    pid: int = 0
    num_batches: int = 2  # per round
    slices: list[Slice] = field(default_factory=list)
    peaks: Peaks | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Wakes the process for one call, then stops it again with all its threads and workers."""
        if self.pid:
            os.killpg(self.pid, signal.SIGCONT)
        try:
            return self.child.call(function, *args, limit_seconds=240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGSTOP) if self.pid else None

    def settle_in(self, number: int) -> None:
        try:
            self.pid = self.child.call(settle_in, self.job, number, limit_seconds=240)
            os.killpg(self.pid, signal.SIGSTOP)
        except Failed as failure:
            self.case.failure = str(failure)

    def begin(self, images: Images, slice_seconds: float) -> None:
        self.job = replace(self.job, manifest=images.manifest, jpegs=images.jpegs)
        try:
            batch_seconds = self.call(begin, self.job) if not self.case.failure else math.inf
        except Failed as failure:
            self.case.failure = str(failure)
            return
        self.num_batches = max(2, math.ceil(slice_seconds / batch_seconds))
        self.case.num_items = self.num_batches * self.job.batch_size
        reads = self.job.mode in ("step", "loader")
        self.case.num_bytes = round(self.case.num_items * images.mean_bytes) if reads else 0

    def run(self) -> float:
        self.slices.append(self.call(advance, self.num_batches))
        return self.slices[-1].seconds

    def measure_peaks(self) -> None:
        if not self.case.failure:
            with contextlib.suppress(Failed):
                self.peaks = self.call(peaks)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT) if self.pid else None
        self.child.close(patience_seconds=3)

    def record(self) -> dict[str, Any]:
        keys = ("side", "mode", "strategy", "policy", "size_px", "encoder", "stem", "bank_size", "batch_size", "device")
        measured = {
            "wait_share": [each.wait_share for each in self.slices],
            "loss": [each.loss for each in self.slices],
            "peak_mb": self.peaks and self.peaks.total_mb,
            "peaks": self.peaks and self.peaks._asdict(),
        }
        about = {"work_load": self.load.key, **{key: getattr(self.job, key) for key in keys}}
        return {**about, **self.case.record("image"), **measured}


@dataclass(kw_only=True)
class Bench:
    folder: Path
    scale: Scale
    options: Options
    device: str
    lightly: Found
    entries: dict[tuple[str, Side, Mode], Entry] = field(default_factory=dict)

    @contextlib.contextmanager
    def started(self, loads: Sequence[WorkLoad]) -> Iterator[ThreadPoolExecutor]:
        """Starts the processes of these work loads. The pool is done when they have imported their packages."""
        entries: list[Entry] = []
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            try:
                for load in loads:
                    for row in load.rows:
                        if row.level <= self.scale.level and not (row.side == "lightly" and self.lightly.missing):
                            entries.append(self._entry(load, row))
                            pool.submit(entries[-1].settle_in, len(entries))
                yield pool
            finally:
                pool.shutdown(cancel_futures=True)
                with ThreadPoolExecutor(max(1, len(entries))) as closing:
                    closing.map(Entry.close, entries)

    def _entry(self, load: WorkLoad, row: Row) -> Entry:
        scale, options = self.scale, self.options
        entry = Entry(
            load=load,
            job=Job(
                side=row.side,
                mode=row.mode,
                strategy=load.strategy,
                task=load.task,
                policy=load.policy,
                size_px=32 if load.is_small else scale.size_px,
                stem="cifar" if load.is_small else "imagenet",
                encoder=scale.encoder,
                bank_size=scale.bank_size,
                batch_size=scale.batch_size,
                num_threads=options.threads,
                num_warm_up=scale.num_warm_up,
                device=self.device,
                seed=options.seed,
                packages=self.lightly.packages if row.side == "lightly" else (),
            ),
            child=Child(self.folder / f"{load.key}-{row.side}-{row.mode}.log"),
            case=Case(
                name=f"{row.side}, {row.mode}",
                workers=options.threads,
                num_items=scale.batch_size,
                num_bytes=0,
                run=lambda: entry.run(),
            ),
        )
        self.entries[load.key, row.side, row.mode] = entry
        return entry

    def measure(self, load: WorkLoad, images: Images, on_step: Callable[[str], None]) -> None:
        entries = [entry for entry in self.entries.values() if entry.load == load]
        for entry in entries:
            on_step(f"{load.key} · warm-up · {entry.case.name}")
            entry.begin(images, self.scale.slice_seconds)
        rounds = self.scale.rounds
        cases = [entry.case for entry in entries]
        interleave(cases, rounds, lambda n, case: on_step(f"{load.key} · round {n + 1} of {rounds} · {case.name}"))
        for entry in entries:
            entry.measure_peaks()


def main() -> int:
    options = tyro.cli(Options, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    options = replace(options, threads=min(options.threads, len(os.sched_getaffinity(0))))
    kind = "smoke" if options.smoke else "quick" if options.quick else "full"
    device = options.device
    if device == "auto":  # torch knows too, but importing it takes seconds
        device = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    scale = SCALES[kind]
    if device == "cuda" and kind != "smoke":
        scale = scale._replace(encoder="resnet18", batch_size=128, size_px=224)
    given = {key: getattr(options, key) for key in ("encoder", "batch_size", "size_px", "rounds")}
    scale = scale._replace(**{key: value for key, value in given.items() if value is not None})
    load_before = os.getloadavg()[0]
    lightly = find_lightly(options.lightly_python)
    loads = [load for load in WORK_LOADS if load.level <= scale.level]
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastcssl-bench-")))
        work = options.work or logs
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder=logs, scale=scale, options=options, device=device, lightly=lightly)
        # Starts one group of processes at a time, because many might not fit into memory. They import while images are
        # prepared.
        groups = [[load] for load in loads] if kind == "full" else [loads]
        images: dict[bool, Images] | None = None
        with Console(stderr=True).status("preparing images") as status:
            for group in groups:
                with bench.started(group) as imports:
                    images = images or prepare(options, work, scale, loads, files=not lightly.missing)
                    imports.shutdown()
                    for load in group:
                        bench.measure(load, images[load.is_small], status.update)
    assert images is not None
    summary = summarize(bench)
    show(Console(width=None if sys.stdout.isatty() else 110), bench, images, summary)
    if options.json is not None:
        about = environment(
            PACKAGES,
            scale=kind,
            rounds=scale.rounds,
            slice_seconds=scale.slice_seconds,
            seed=options.seed,
            device=device,
            threads=options.threads,
            images={load.key: images[load.is_small].about for load in loads},
            num_images={load.key: images[load.is_small].num_images for load in loads},
            omp_wait_policy=os.environ.get("OMP_WAIT_POLICY"),  # it matters how threads wait when they share cores
            load_average_before=round(load_before, 2),
        )
        about["versions"]["lightly"] = lightly.version
        records = [entry.record() for entry in bench.entries.values()]
        write_json_lines(options.json, [*records, {"environment": about}, {"summary": summary}])
    return 0


if __name__ == "__main__":
    sys.exit(main())
