"""Compares our tar writer with FFCV's DatasetWriter and a Pillow loop: same photos, resize, quality and workers.

    python benchmarks/prep.py --quick                         # the embedded set, about a minute
    python benchmarks/prep.py --images DIR --json prep.jsonl

Files are read once beforehand, so the page cache is warm. The time includes the start and end of worker threads or
processes and, for ours, the complete build: checksums, fsync, table and manifest (the others sync and check nothing).
It excludes starting Python, imports and listing files. Every contender runs in a process that is warmed up once. FFCV
needs about 0.4 s to start its workers, which favours ours on few images: quote the full form, not --quick.
"""

import contextlib
import dataclasses
import importlib.util
import io
import itertools
import multiprocessing
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from PIL import Image
from rich.console import Console
from rich.table import Table
from timing import Case, Child, Failed, environment, interleave, peak_rss_mb, speedup, write_json_lines

from dataprep import _codec
from dataprep.build import BuildJob, build
from dataprep.encode import Check, Encoding, Resize
from dataprep.samples import NO_DOMAIN, Samples
from dataprep.scenario import Scenario
from dataprep.sources import Source, open_source

SIDE_PX, QUALITY, SHARD_MB = 256, 90, 256
AIM = 1.5  # times the speed of FFCV's writer
CHUNK = 16  # images per task of a worker process; FFCV's 100 would leave workers idle at the end of small sets
ENLARGED = 2.7  # the embedded set has sides of 96 to 256 px, but images to resize to 256 must be larger
PACKAGES = ("fastcssl", "ffcv", "pillow", "opencv-python", "numpy", "torch")
TAR, PILLOW = "tar (ours), bicubic short 256", "Pillow loop, bicubic short 256"
FFCV, FFCV_MAX = "FFCV writer, PIL bicubic short 256", "FFCV writer, max_resolution 500"
HEADER, FULL, COPY = "tar (ours), --check header", "tar (ours), --check full", "copy into one file, fsync"
DECODE, DECODE_8 = "read and decode alone", "read and decode alone, at 1/8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    images: Path | None = None  # A folder of JPEGs at any depth. Without it, the embedded set is used.
    json: Path | None = None  # Where to write the numbers, one JSON object per line. The last one is the summary.
    quick: bool = False  # Takes about a minute: fewer images and rounds.
    smoke: bool = False  # Takes seconds: shows that it runs, but measures nothing.
    workers: str = "1,2"  # The numbers of workers to measure, separated by commas.
    rounds: int | None = None  # How many times everything is measured.
    num_images: int | None = None  # Images to re-encode per round. Files are repeated if there are fewer.
    work: Path | None = None  # Where to write. The speed of this disk limits the pass-through rows.
    seed: int = 0  # The seed of the embedded set.


class Scale(NamedTuple):
    rounds: int
    num_images: int
    pass_mb: int
    num_drawn: int


SCALES = {"full": Scale(5, 1024, 256, 240), "quick": Scale(3, 256, 64, 120), "smoke": Scale(1, 16, 1, 20)}


class Written(NamedTuple):
    seconds: float
    num_bytes: int


def timed(function: Callable[..., None], path: Path, *args: Any) -> Written:
    """Runs a contender in its own process, and returns the time and the size of its output, which is deleted."""
    try:
        began = time.perf_counter()
        function(path, *args)
        seconds = time.perf_counter() - began
        files = path.rglob("*.tar") if path.is_dir() else filter(Path.exists, [path])
        return Written(seconds, sum(file.stat().st_size for file in files))
    finally:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def write_tar(path: Path, files: list[str], workers: int, resize: str, check: Check, shard_mb: int) -> None:
    samples = Samples.collect((f"{i:07d}/{Path(file).name}", 0, NO_DOMAIN, False) for i, file in enumerate(files))
    photos: dict[str, Any] = {
        "classes": ("photo",),
        "domains": (),
        "samples": samples,
        "payload": lambda s: str(files[s.id]),
    }
    job = BuildJob(
        source=Source(kind="folder", **photos),
        scenario=Scenario(kind="joint", num_tasks=1),
        encoding=Encoding(resize=Resize.parse(resize), quality=QUALITY, check=check),
        formats=("tar",),
        out=path,
        shard_mb=shard_mb,
        num_workers=workers,
        max_corrupt=0,
    )
    build(job, Console(quiet=True))


def read_with_pillow(file: str, side_px: int | None) -> Image.Image:
    with Image.open(file) as image:
        if side_px is None:
            return image.convert("RGB")
        ratio = side_px / min(image.size)
        size = int(image.width * ratio + 0.5), int(image.height * ratio + 0.5)
        # libjpeg shrinks while decoding, down to twice the final size. Ours does the same, so the work is equal.
        image.draft("RGB", (2 * size[0], 2 * size[1]))
        return image.convert("RGB").resize(size, Image.Resampling.BICUBIC)


def jpeg_with_pillow(file: str) -> bytes:
    buffer = io.BytesIO()
    read_with_pillow(file, SIDE_PX).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def write_with_pillow(path: Path, files: list[str], workers: int) -> None:
    with multiprocessing.get_context("fork").Pool(workers) as pool, tarfile.open(path, "w") as tar:
        for i, jpeg in enumerate(pool.imap(jpeg_with_pillow, files, chunksize=CHUNK)):
            for suffix, content in (("jpg", jpeg), ("cls", b"0")):
                member = tarfile.TarInfo(f"{i:010d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


class Photos:
    """An indexable data set, as FFCV's documentation requires."""

    def __init__(self, files: list[str], side_px: int | None) -> None:
        self.files, self.side_px = files, side_px

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return read_with_pillow(self.files[index], self.side_px), 0


def write_with_ffcv(path: Path, files: list[str], workers: int, max_resolution: int | None) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.rgb_image import IMAGE_MODES
    from ffcv.writer import DatasetWriter

    # The first lookup compiles for half a second. Doing it here, in the warm-up, avoids it in every worker.
    IMAGE_MODES["jpg"]
    image = RGBImageField(write_mode="jpg", max_resolution=max_resolution, jpeg_quality=QUALITY)
    writer = DatasetWriter(str(path), {"image": image, "label": IntField()}, num_workers=workers)
    writer.from_indexed_dataset(Photos(files, SIDE_PX if max_resolution is None else None), chunksize=CHUNK)


def copy_into_one(path: Path, files: list[str]) -> None:
    with path.open("wb", buffering=1 << 20) as target:
        for file in files:
            with open(file, "rb", buffering=0) as source:
                target.write(source.read())
        target.flush()
        os.fsync(target.fileno())


def decode_all(_: Path, files: list[str], workers: int, reduction: int) -> None:
    def decode(first: int) -> None:
        for file in files[first::workers]:
            with open(file, "rb", buffering=0) as source:
                _codec.decode(source.read(), reduction)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(decode, range(workers)))


def draw(folder: Path, count: int, seed: int) -> None:
    folder.mkdir()
    source = open_source(f"synthetic:size=mixed,classes=20,train={-(-count // 20)},val=0,seed={seed}")
    for sample in list(source.samples)[:count]:
        payload = source.payload(sample)
        assert isinstance(payload, bytes)
        image = Image.open(io.BytesIO(payload))
        size = round(image.width * ENLARGED), round(image.height * ENLARGED)
        image.resize(size, Image.Resampling.BICUBIC).save(folder / f"{sample.id:05d}.jpg", quality=92)


def find_photos(folder: Path) -> tuple[list[str], list[str]]:
    """Returns all JPEGs, and those that need a resize. Reading them also fills the page cache."""
    everything, large = [], []
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg")):
        file = path.read_bytes()
        if not file.startswith(b"\xff\xd8\xff"):
            continue
        everything.append(str(path))
        if min(Image.open(io.BytesIO(file)).size) > SIDE_PX:
            large.append(str(path))
    if not large:
        raise SystemExit(f"{folder} holds no JPEG whose short side is above {SIDE_PX} px. Give another --images.")
    return everything, large


def take(files: list[str], count: int) -> list[str]:
    return list(itertools.islice(itertools.cycle(files), count))


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cases: dict[tuple[str, int], Case] = {}  # by name and workers
        self.stored: dict[tuple[str, int], int] = {}  # bytes
        self.children: dict[str, Child] = {}

    def add(
        self, name: str, workers: int, files: list[str], home: str, function: Callable[..., None], *args: Any
    ) -> None:
        """Adds a contender and warms it up. `home` names its process, so one that hangs does not affect the others."""
        if home not in self.children:
            self.children[home] = Child(self.folder / f"{home}.log")
        call, path = self.children[home].call, self.folder / f"{home}.out"
        limit_seconds = 60 + 0.2 * len(files)  # ten times what a slow machine needs

        def run() -> float:
            written: Written = call(timed, function, path, files, *args, limit_seconds=limit_seconds)
            self.stored[name, workers] = written.num_bytes
            return written.seconds

        num_bytes = sum(os.path.getsize(file) for file in files)
        case = Case(name=name, workers=workers, num_items=len(files), num_bytes=num_bytes, run=run)
        self.cases[name, workers] = case
        try:
            # Imports and first calls are not timed.
            call(timed, function, path, files[:CHUNK], *args, limit_seconds=180)
        except Failed as failure:
            case.failure = str(failure)

    def bytes_per_image(self, case: Case) -> float | None:
        return self.stored.get((case.name, case.workers), 0) / case.num_items or None

    def ratio(self, name: str, workers: int, other: str, **how: bool) -> float | None:
        if (other, workers) not in self.cases:
            return None
        return speedup(self.cases[name, workers], self.cases[other, workers], **how)


def measure(bench: Bench, everything: list[str], large: list[str], scale: Scale, workers: Sequence[int]) -> None:
    resized = take(large, scale.num_images)
    mean_bytes = sum(os.path.getsize(file) for file in everything) / len(everything)
    passed = take(everything, max(int(scale.pass_mb * 1e6 / mean_bytes), CHUNK))
    some = take(everything, scale.num_images)
    add = bench.add
    for n in workers:
        add(TAR, n, resized, "tar", write_tar, n, f"short:{SIDE_PX}", "full", SHARD_MB)
        if importlib.util.find_spec("ffcv"):
            add(FFCV, n, resized, "ffcv", write_with_ffcv, n, None)
            add(FFCV_MAX, n, resized, "ffcv", write_with_ffcv, n, 500)
        add(PILLOW, n, resized, "pillow", write_with_pillow, n)
        add(DECODE, n, resized, "decode", decode_all, n, 1)
        add(HEADER, n, passed, "tar", write_tar, n, "none", "header", SHARD_MB)
        add(FULL, n, passed, "tar", write_tar, n, "none", "full", SHARD_MB)
        add(DECODE_8, n, some, "decode", decode_all, n, 8)
        # It always has one thread, but is measured with each n, so that the sides of a ratio run close together.
        add(COPY, n, passed, "copy", copy_into_one)
    with Console(stderr=True).status("") as shown:
        interleave(
            list(bench.cases.values()),
            scale.rounds,
            lambda number, case: shown.update(f"round {number + 1} of {scale.rounds} · {case.name} · {case.workers}"),
        )


def peak_mb(folder: Path, files: list[str], workers: int) -> float:
    with contextlib.closing(Child(folder / "memory.log")) as child:
        # Shards of 1 MB, so that several are written and sealed.
        args = (files, workers, f"short:{SIDE_PX}", "full", 1)
        child.call(timed, write_tar, folder / "memory.out", *args, limit_seconds=60 + 0.2 * len(files))
        return float(child.call(peak_rss_mb, limit_seconds=10))


def summarize(bench: Bench, workers: Sequence[int], rss_mb: dict[str, float]) -> dict[str, Any]:
    """Returns the summary. Ratios are medians over rounds, with the most workers unless a key says otherwise."""
    n = max(workers)
    summary: dict[str, Any] = {"workers": n}
    for key, other in (("ffcv_writer", FFCV), ("ffcv_max_resolution", FFCV_MAX), ("pillow", PILLOW)):
        summary[f"tar_vs_{key}"] = bench.ratio(TAR, n, other)
        summary[f"tar_vs_{key}_best"] = bench.ratio(TAR, n, other, best=True)
        summary[f"tar_vs_{key}_by_workers"] = {str(k): bench.ratio(TAR, k, other) for k in workers}
    return summary | {
        "tar_vs_decode_alone": bench.ratio(TAR, n, DECODE),
        "passthrough_mb_per_s": bench.cases[HEADER, n].rate(megabytes=True),
        "passthrough_full_mb_per_s": bench.cases[FULL, n].rate(megabytes=True),
        "copy_mb_per_s": bench.cases[COPY, n].rate(megabytes=True),
        "passthrough_vs_copy": bench.ratio(HEADER, n, COPY, megabytes=True),
        "passthrough_full_vs_decode_at_8": bench.ratio(FULL, n, DECODE_8, megabytes=True),
        "peak_rss_growth_mb": rss_mb["x4"] - rss_mb["x1"],
        "peak_rss_mb": rss_mb,
    }


def number(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit


def show(console: Console, bench: Bench, summary: dict[str, Any], workers: Sequence[int]) -> None:
    def fill(title: str, columns: Sequence[str], names: Sequence[str], cells: Callable[[Case], list[str]]) -> Table:
        table = Table(title=title, title_justify="left")
        table.add_column(columns[0], no_wrap=True, min_width=len(FFCV))
        for column in columns[1:]:
            table.add_column(column, justify="right", no_wrap=True)
        for name in names:
            for n in workers:
                case = bench.cases.get((name, n))
                shown = ["-"] if case is None else ["failed"] if case.failure else cells(case)
                label = "FFCV writer: not installed" if case is None else name
                style = "bold" if name in (TAR, HEADER, FULL) else ""
                table.add_row(label, str(n), *shown, style=style, end_section=n == workers[-1])
        return table

    def resized(case: Case) -> list[str]:
        stored = bench.bytes_per_image(case)
        cells = [number(case.rate()), number(case.rate(best=True)), number(stored and stored / 1e3, ".1f")]
        if case.name == TAR:
            return cells
        faster = (bench.ratio(TAR, case.workers, case.name, best=best) for best in (False, True))
        return [*cells, *(number(ratio, ".2f", "x") for ratio in faster), f"{AIM}x" if case.name == FFCV else ""]

    def passed(case: Case) -> list[str]:
        return [*(number(case.rate(megabytes=True, best=best)) for best in (False, True)), number(case.rate())]

    title = f"Re-encoding {bench.cases[TAR, workers[0]].num_items:,} photos: short side {SIDE_PX} px, quality {QUALITY}"
    columns = ("writer", "workers", "img/s", "best", "kB/img", "ours is", "at best", "aim")
    console.print(fill(title, columns, (TAR, FFCV, FFCV_MAX, PILLOW, DECODE), resized))
    title = f"Passing {bench.cases[COPY, workers[0]].num_bytes / 1e6:,.0f} MB of JPEGs through, beside the ceilings"
    table = fill(title, ("what", "workers", "MB/s", "best", "img/s"), (HEADER, COPY, FULL, DECODE_8), passed)
    table.add_row("FFCV writer: always re-encodes", *"----")
    console.print(table)
    for case in bench.cases.values():
        if case.failure:
            console.print(f"{case.name}, {case.workers} workers, failed: {case.failure}", style="red", markup=False)
    ratio = summary["tar_vs_ffcv_writer"]
    met = "" if ratio is None else ", [green]reached[/]" if ratio >= AIM else ", [red]missed[/]"
    console.print(
        f"Workers: {summary['workers']}. Ours is [bold]{number(ratio, '.2f', 'x')}[/] as fast as FFCV's writer "
        f"(aim {AIM}x{met}) and {number(summary['tar_vs_pillow'], '.2f', 'x')} as fast as Pillow.\n"
        f"Passing through: {number(summary['passthrough_vs_copy'], '.0%')} of a plain copy with --check header, "
        f"{number(summary['passthrough_full_vs_decode_at_8'], '.0%')} of decoding alone with full.\n"
        f"Peak memory: {summary['peak_rss_mb']['x1']:.0f} MB, {summary['peak_rss_growth_mb']:+.1f} MB with four times "
        "the images (aim: flat).",
        highlight=False,
    )


def main() -> int:
    options = tyro.cli(Options, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    kind = "smoke" if options.smoke else "quick" if options.quick else "full"
    wishes = {"rounds": options.rounds, "num_images": options.num_images}
    scale = SCALES[kind]._replace(**{name: wish for name, wish in wishes.items() if wish})
    workers = sorted({int(n) for n in options.workers.split(",")})
    console = Console(width=None if sys.stdout.isatty() else 100)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="fastcssl-bench-", dir=options.work) as name:
        bench = Bench(Path(name))
        if options.images is None:
            draw(bench.folder / "drawn", scale.num_drawn, options.seed)
        everything, large = find_photos(options.images or bench.folder / "drawn")
        where = options.images or f"the embedded set, enlarged {ENLARGED}x"
        console.print(
            f"{len(everything):,} JPEGs ({where}), {len(large):,} with a short side above {SIDE_PX} px.\n"
            f"{scale.rounds} interleaved rounds, medians; warm cache."
            + (" There are few images, so start-up counts too much: quote the full form." if kind != "full" else ""),
            highlight=False,
        )
        try:
            measure(bench, everything, large, scale, workers)
            base = take(large, scale.num_images)
            rss_mb = {f"x{times}": peak_mb(bench.folder, base * times, max(workers)) for times in (1, 4)}
        finally:
            for child in bench.children.values():
                child.close()
    show(console, bench, summary := summarize(bench, workers, rss_mb), workers)
    if options.json is not None:
        cases = bench.cases.values()
        records = [{**case.record("image"), "bytes_per_image": bench.bytes_per_image(case)} for case in cases]
        images = options.images.name if options.images else "synthetic"
        more = {"seed": options.seed, "images": images, "num_files": len(everything), "scale": kind}
        about = environment(PACKAGES, **more, rounds=scale.rounds, load_average_before=round(load_before, 2))
        write_json_lines(options.json, [*records, {"environment": about}, {"summary": summary}])
    return 0


if __name__ == "__main__":
    sys.exit(main())
