"""What `fastcssl-prep` does, as functions: a verb of the command and what it works on. `dataprep` hands them on.

Nothing is printed unless a console is given. A user's mistake is a `PrepError` (in a manifest, a `ManifestError`).
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from dataprep.build import BuildJob, BuildResult, build
from dataprep.contents import contact_sheet, save_png
from dataprep.encode import Check, Encoding, Resize
from dataprep.errors import PrepError
from dataprep.manifest import Manifest, load_manifest, manifest_path
from dataprep.scenario import Kind, Scenario
from dataprep.sources import SMALL_PX, Source, open_source
from dataprep.splits import resplit
from dataprep.table import load_table
from dataprep.verify import Verification, verify
from dataprep.writers import formats as known_formats


def build_data(
    source: str,
    out: Path | str,
    *,
    scenario: Kind,
    num_tasks: int | None = None,
    seed: int | None = None,
    formats: Sequence[str] | None = None,
    resize: str = "short:256",
    quality: int = 90,
    shard_mb: int = 256,
    num_workers: int | None = None,
    limit_per_class: int | None = None,
    check: Check = "full",
    max_corrupt: float = 0.001,
    classes_file: Path | str | None = None,
    domains: Sequence[str] = (),
    console: Console | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    announce: Callable[[BuildJob], None] = lambda _: None,
) -> BuildResult:
    """Writes a data set as task-split shards with a manifest; called again, it goes on after the last whole shard.

    source: KIND or KIND:WHERE, such as "synthetic" or "imagenet100:/data/imagenet". out: the folder to write.
    scenario, num_tasks, seed: how samples become tasks; without a seed in the references' order.
    formats: of "tar", "ffcv", "array"; by default array for one small size, else tar.
    resize: "short:256", "max:500" (both only shrink), "square:96" or "none". quality: of JPEGs made anew, 1 to 100.
    shard_mb: megabytes of a shard. num_workers: threads, by default one a core. check: decode every image in full, or
    trust the "header" of what is not resized. max_corrupt: the share of images that may be.
    should_stop: asked between images; when true, `Interrupted` is raised. announce: told the job before it begins.
    """
    out = Path(out)
    opened = open_source(
        source, classes_file=None if classes_file is None else Path(classes_file), domains=tuple(domains)
    )
    encoding = Encoding(resize=Resize.parse(resize), quality=quality, check=check)
    _check_numbers(quality, shard_mb, max_corrupt, limit_per_class)
    _refuse_out_inside_source(source, out)
    if limit_per_class is not None:
        opened = replace(opened, samples=opened.samples.limited(limit_per_class))
    job = BuildJob(
        source=opened,
        scenario=_scenario(scenario, num_tasks, seed, num_domains=len(opened.domains)),
        encoding=encoding,
        formats=_formats(formats, opened, encoding.resize),
        out=out,
        shard_mb=shard_mb,
        limit_per_class=limit_per_class,
        max_corrupt=max_corrupt,
        num_workers=_workers(num_workers),
    )
    announce(job)
    return build(job, console or Console(quiet=True), should_stop)


def split_data(
    where: Path | str, name: str, *, scenario: Kind, num_tasks: int | None = None, seed: int | None = None
) -> Manifest:
    """Writes another manifest, WHERE/NAME.json, over the same shards: other scenario, number of tasks or order."""
    path = manifest_path(Path(where))
    num_domains = len(load_manifest(path).domains)
    return resplit(path, _scenario(scenario, num_tasks, seed, num_domains=num_domains), name)


def verify_data(
    where: Path | str, *, quick: bool = False, num_workers: int | None = None, console: Console | None = None
) -> Verification:
    """Checks every checksum, count and image of a prepared folder; `quick`: sizes and counts alone.

    What is wrong is in the result's `problems`, a sentence each, and not raised. num_workers: threads.
    """
    return verify(Path(where), quick=quick, num_workers=_workers(num_workers), console=console or Console(quiet=True))


def draw_sheet(where: Path | str, png: Path | str, *, views: str | None = None) -> Path:
    """Draws a prepared folder's images, a row a task; or, given the name of a view policy, images beside their views.

    where: the folder, or one of its manifests. png: the file to write, which is returned.
    """
    path, png = manifest_path(Path(where)), Path(png)
    if views is not None:
        from fastcssl.data.view_sheet import view_sheet  # here: it needs torch, which nothing else of prep does

        sheet = view_sheet(path, views)
    else:
        manifest = load_manifest(path)
        sheet = contact_sheet(manifest, load_table(manifest, path.parent), path.parent)
    try:
        save_png(sheet, png)
    except OSError as error:
        raise PrepError(f"{png} cannot be written: {error.strerror}. Choose another --sheet.") from None
    return png


# ---- What is asked for, checked --------------------------------------------------------------------------------------


def _check_numbers(quality: int, shard_mb: int, max_corrupt: float, limit_per_class: int | None) -> None:
    if not 1 <= quality <= 100:
        raise PrepError(f"--quality {quality} is outside 1 to 100. Use 90, or another number of these.")
    if shard_mb < 1:
        raise PrepError(f"--shard-mb {shard_mb} is too small. Use at least 1.")
    if not 0 <= max_corrupt <= 1:
        raise PrepError(f"--max-corrupt {max_corrupt:g} is a share of the images: use 0 to 1.")
    if limit_per_class is not None and limit_per_class < 1:
        raise PrepError(f"--limit-per-class {limit_per_class} leaves nothing. Use at least 1.")


def _refuse_out_inside_source(source: str, out: Path) -> None:
    """Else the next start would list the shards as images of a new class."""
    where = source.partition(":")[2]
    root = Path(where).expanduser()
    if where and root.is_dir() and out.resolve().is_relative_to(root.resolve()):
        raise PrepError(f"--out {out} lies inside the source {root}. Choose a folder outside it.")


def _scenario(kind: Kind, num_tasks: int | None, seed: int | None, *, num_domains: int) -> Scenario:
    if seed is not None and seed < 0:
        raise PrepError(f"--seed {seed} is negative. Use 0 or more.")
    if num_tasks is None:
        if kind in ("class", "data"):
            raise PrepError(f"--scenario {kind} needs --tasks, such as --tasks 5.")
        num_tasks = 1 if kind == "joint" else max(num_domains, 1)
    return Scenario(kind=kind, num_tasks=num_tasks, seed=seed)


def _formats(asked: Sequence[str] | None, source: Source, resize: Resize) -> tuple[str, ...]:
    if asked is None:
        size = (resize.size_px,) * 2 if resize.fit == "square" else source.one_size
        return ("array",) if size is not None and max(size) <= SMALL_PX else ("tar",)
    known = known_formats()
    names = tuple(dict.fromkeys(asked))
    for name in names:
        if name not in known:
            raise PrepError(f"--formats: '{name}' is not a format. Choose from {', '.join(sorted(known))}.")
    if not names:
        raise PrepError(f"--formats is empty. Choose from {', '.join(sorted(known))}.")
    return names


def _workers(asked: int | None) -> int:
    if asked is not None and asked < 1:
        raise PrepError(f"--workers {asked}: use at least one.")
    return asked or len(os.sched_getaffinity(0))
