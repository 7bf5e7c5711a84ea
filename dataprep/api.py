"""The verbs of `fastcssl-prep` as Python functions, which `dataprep` exports.

The functions print nothing unless a console is given. A user's mistake raises a `PrepError`; a faulty manifest raises a
`ManifestError`, which is a `PrepError` too.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from dataprep.build import BuildJob, BuildResult, build
from dataprep.contents import contact_sheet, save_png
from dataprep.cores import usable_cores
from dataprep.encode import Check, Encoding, Resize
from dataprep.errors import PrepError
from dataprep.manifest import Manifest, load_manifest, manifest_path
from dataprep.scenario import Kind, Scenario, reference_domains
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
    order: Sequence[str] | Literal["reference"] | None = None,
    sizes: Sequence[int] = (),
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
    """Writes a data set as task-split shards with a manifest, and returns the manifest with the build's timings.

    Called again after an interruption, it continues after the last complete shard.

    source: KIND or KIND:WHERE, such as "synthetic" or "imagenet100:/data/imagenet".
    out: the folder to write.
    scenario, num_tasks, seed: how samples become tasks. Without a seed, the order is the reference's.
    order: the names of all classes (scenario "class") or domains ("domain") in the order of the tasks. By default the
    order of `domains`, if they are given, else the seed's or the reference's.
    sizes: for tasks of different sizes, the number of classes or domains of each task; for the scenario "data" relative
    numbers of images.
    formats: any of "tar", "ffcv" and "array". The default is "array" if all images share one small size, else "tar".
    resize: "short:256", "max:500" (both only shrink images), "square:96" or "none".
    quality: the quality of re-encoded JPEGs, 1 to 100.
    shard_mb: the size limit of a shard in megabytes.
    num_workers: the number of threads, by default one per core.
    limit_per_class: at most this many images per class, in each split and domain.
    check: "full" decodes every image; "header" checks only the header of images that are not resized.
    max_corrupt: the share of images that may be corrupt before the build stops.
    classes_file: a text file with the class folders to use, one per line.
    domains: the domains to use, by default all. With the scenario "domain", the tasks have this order.
    should_stop: called between images; when it returns true, `Interrupted` is raised.
    announce: called with the job before the job begins.
    """
    out = Path(out)
    listed = None if classes_file is None else Path(classes_file)
    opened = open_source(source, classes_file=listed, domains=tuple(domains))
    encoding = Encoding(resize=Resize.parse(resize), quality=quality, check=check)
    _check_numbers(quality, shard_mb, max_corrupt, limit_per_class)
    _refuse_out_inside_source(source, out)
    if limit_per_class is not None:
        opened = replace(opened, samples=opened.samples.limited(limit_per_class))
    given = _order(order, scenario, seed, domains, opened)
    job = BuildJob(
        source=opened,
        scenario=_scenario(scenario, num_tasks, seed, order=given, sizes=sizes, num_domains=len(opened.domains)),
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
    where: Path | str,
    name: str,
    *,
    scenario: Kind,
    num_tasks: int | None = None,
    seed: int | None = None,
    order: Sequence[str] | Literal["reference"] | None = None,
    sizes: Sequence[int] = (),
) -> Manifest:
    """Writes and returns another manifest, WHERE/NAME.json, which splits the same shards into tasks differently.

    scenario, num_tasks, seed, order, sizes: as for `build_data`.
    """
    path = manifest_path(Path(where))
    given = () if order is None or order == "reference" else tuple(order)
    num_domains = len(load_manifest(path).domains)
    return resplit(path, _scenario(scenario, num_tasks, seed, order=given, sizes=sizes, num_domains=num_domains), name)


def verify_data(
    where: Path | str, *, quick: bool = False, num_workers: int | None = None, console: Console | None = None
) -> Verification:
    """Checks every checksum, count and image of a prepared folder, or with `quick` only sizes and counts.

    Problems are not raised: the result's `problems` has one sentence for each. num_workers: the number of threads, by
    default one per core.
    """
    return verify(Path(where), quick=quick, num_workers=_workers(num_workers), console=console or Console(quiet=True))


def draw_sheet(where: Path | str, png: Path | str, *, views: str | None = None) -> Path:
    """Draws images of a prepared folder, one row per task, and returns the path of the picture.

    where: the folder, or one of its manifests. png: the file to write. views: the name of a view policy; the sheet then
    shows images beside their augmented views.
    """
    path, png = manifest_path(Path(where)), Path(png)
    if views is not None:
        from fastcssl.data.view_sheet import view_sheet  # imported here because nothing else in dataprep needs torch

        sheet = view_sheet(path, views)
    else:
        manifest = load_manifest(path)
        sheet = contact_sheet(manifest, load_table(manifest, path.parent), path.parent)
    try:
        save_png(sheet, png)
    except OSError as error:
        raise PrepError(f"{png} cannot be written: {error.strerror}. Choose another --sheet.") from None
    return png


# ---- Checks of the arguments -----------------------------------------------------------------------------------------


def _check_numbers(quality: int, shard_mb: int, max_corrupt: float, limit_per_class: int | None) -> None:
    if not 1 <= quality <= 100:
        raise PrepError(f"--quality {quality} is outside 1 to 100. Use a number in this range, such as 90.")
    if shard_mb < 1:
        raise PrepError(f"--shard-mb {shard_mb} is too small. Use at least 1.")
    if not 0 <= max_corrupt <= 1:
        raise PrepError(f"--max-corrupt {max_corrupt:g} is not a share of the images. Use 0 to 1.")
    if limit_per_class is not None and limit_per_class < 1:
        raise PrepError(f"--limit-per-class {limit_per_class} leaves no images. Use at least 1.")


def _refuse_out_inside_source(source: str, out: Path) -> None:
    """Raises PrepError if `out` is inside the source, where the next build would list the shards as a new class."""
    where = source.partition(":")[2]
    root = Path(where).expanduser()
    if where and root.is_dir() and out.resolve().is_relative_to(root.resolve()):
        raise PrepError(f"--out {out} lies inside the source {root}. Choose a folder outside it.")


def _order(
    asked: Sequence[str] | Literal["reference"] | None,
    kind: Kind,
    seed: int | None,
    domains: Sequence[str],
    source: Source,
) -> tuple[str, ...]:
    """Returns the order of the names: the one that was asked for, that of --domains, or () for the usual one."""
    twice = sorted({name for name in domains if domains.count(name) > 1})
    if twice:
        raise PrepError(f"--domains names {twice[0]} twice. Name each domain once.")
    if asked == "reference":
        return ()
    if asked is not None:
        return tuple(asked)
    chosen = tuple(domains)
    if kind != "domain" or seed is not None or chosen == reference_domains(source.domains):
        return ()
    return chosen


def _scenario(
    kind: Kind,
    num_tasks: int | None,
    seed: int | None,
    *,
    order: tuple[str, ...],
    sizes: Sequence[int],
    num_domains: int,
) -> Scenario:
    if seed is not None and seed < 0:
        raise PrepError(f"--seed {seed} is negative. Use 0 or more.")
    if order and seed is not None:
        raise PrepError("A seed and an order exclude each other: a seed draws an order. Leave one out.")
    if order and kind in ("data", "joint"):
        raise PrepError(
            f"--scenario {kind} has no order of classes or domains. Leave out the order, or use --scenario class or "
            "domain."
        )
    if sizes:
        if kind == "joint":
            raise PrepError("Joint training is one task, without sizes. Leave out --tasks.")
        if min(sizes) < 1 or num_tasks not in (None, len(sizes)):
            listed = ",".join(map(str, sizes))
            raise PrepError(
                f"The sizes {listed} do not describe {num_tasks or len(sizes)} tasks. Give one of at least 1 for each."
            )
        num_tasks = len(sizes)
    if num_tasks is None:
        if kind in ("class", "data"):
            raise PrepError(f"--scenario {kind} needs --tasks, such as --tasks 5.")
        num_tasks = 1 if kind == "joint" else max(num_domains, 1)
    return Scenario(kind=kind, num_tasks=num_tasks, seed=seed, order=order, sizes=tuple(sizes))


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
        raise PrepError(f"--workers {asked} is too small. Use at least 1.")
    return asked or usable_cores()
