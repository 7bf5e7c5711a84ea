"""fastcssl-prep: build | split | verify | inspect."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from dataprep.build import BuildJob, BuildResult, build
from dataprep.contents import contact_sheet, description, save_png, task_table
from dataprep.encode import Encoding, Resize
from dataprep.errors import Interrupted, PrepError
from dataprep.manifest import ManifestError, load_manifest, manifest_path
from dataprep.progress import human_bytes
from dataprep.scenario import Kind, Scenario
from dataprep.sources import Source, open_source
from dataprep.splits import resplit
from dataprep.table import load_table
from dataprep.verify import verify
from dataprep.writers import formats

_SMALL_PX = 128
_MAX_LISTED = 5


def _arg(text: str, metavar: str | None = None, *, optional: bool = False) -> Any:
    """`optional`: the text says what happens without it."""
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="" if optional else None)


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """What build and split both ask: how samples become tasks."""

    scenario: Annotated[Kind, _arg("How the samples become tasks.")]
    tasks: Annotated[int | None, _arg("Number of tasks. Not needed for domain and joint.", "T", optional=True)] = None
    seed: Annotated[
        int | None, _arg("Draw the order from this seed instead of the reference order.", "S", optional=True)
    ] = None
    order: Annotated[
        Literal["reference"] | None,
        _arg("CaSSLe's class, data and domain order. This is the default.", "reference", optional=True),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Build(Tasks):
    """Write a data set as task-split shards. Run the same command again to go on after an interruption."""

    source: Annotated[
        tyro.conf.Positional[str],
        _arg(
            "imagenet:ROOT, imagenet100:ROOT, domainnet:ROOT, cifar10:ROOT, cifar100:ROOT, stl10:ROOT, folder:ROOT, "
            "or synthetic[:size=32..256|mixed,classes=20|30|60|100,train=N,val=N,seed=S,format=pixels|jpeg].",
            "SOURCE",
        ),
    ]
    out: Annotated[Path, _arg("The folder to write, empty or begun by the same command.")]
    formats: Annotated[
        str | None,
        _arg(
            "tar, ffcv, array, or several with commas. Default: array for one small size, else tar.",
            "LIST",
            optional=True,
        ),
    ] = None
    resize: Annotated[str, _arg("short:256, max:500 (both only shrink), square:96, or none.")] = "short:256"
    quality: Annotated[int, _arg("JPEG quality of what is re-encoded. JPEGs that need no resize stay untouched.")] = 90
    shard_mb: Annotated[int, _arg("Size of a shard.")] = 256
    workers: Annotated[int | None, _arg("Native threads. Default: one a core.", "N", optional=True)] = None
    limit_per_class: Annotated[
        int | None, _arg("At most so many images of a class, for each split and domain.", "N", optional=True)
    ] = None
    check: Annotated[
        Literal["full", "header"], _arg("Decode every image in full, or trust the headers of what is not resized.")
    ] = "full"
    max_corrupt: Annotated[float, _arg("Share of images that may be corrupt (at least one) before it stops.")] = 0.001
    classes: Annotated[Path | None, _arg("A text file of class folders to use, one a line.", "FILE", optional=True)] = (
        None
    )
    domains: Annotated[str | None, _arg("Some of the domains, with commas.", "LIST", optional=True)] = None


@dataclass(frozen=True, kw_only=True)
class Split(Tasks):
    """Write another manifest over the same shards, in seconds: other scenario, number of tasks or order."""

    dir: Annotated[tyro.conf.Positional[Path], _arg("A prepared folder.", "DIR")]
    name: Annotated[str, _arg("The new manifest is DIR/NAME.json.")]


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check every checksum, count and image. Status 0: all whole; 1: something is not."""

    dir: Annotated[tyro.conf.Positional[Path], _arg("A prepared folder, or one of its manifests.", "DIR")]
    quick: Annotated[bool, _arg("Sizes and counts only.")] = False
    workers: Annotated[int | None, _arg("Native threads. Default: one a core.", "N", optional=True)] = None


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show what a prepared folder holds."""

    dir: Annotated[tyro.conf.Positional[Path], _arg("A prepared folder, or one of its manifests.", "DIR")]
    sheet: Annotated[Path | None, _arg("Draw a contact sheet (PNG), one row a task.", "PNG", optional=True)] = None
    views: Annotated[
        str | None,
        _arg(
            "Draw on the sheet images beside their augmented views, such as pnr-moco-imagenet.", "POLICY", optional=True
        ),
    ] = None


Command = (
    Annotated[Build, tyro.conf.subcommand("build", prefix_name=False)]
    | Annotated[Split, tyro.conf.subcommand("split", prefix_name=False)]
    | Annotated[Verify, tyro.conf.subcommand("verify", prefix_name=False)]
    | Annotated[Inspect, tyro.conf.subcommand("inspect", prefix_name=False)]
)


def main(args: list[str] | None = None) -> int:
    console, errors = Console(soft_wrap=not sys.stdout.isatty()), Console(stderr=True, soft_wrap=True)
    command: Build | Split | Verify | Inspect = tyro.cli(
        Command,
        prog="fastcssl-prep",
        description="Images on disk become task-split, checksummed shards.",
        args=args,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        if isinstance(command, Build):
            return _build(command, console)
        if isinstance(command, Split):
            return _split(command, console)
        if isinstance(command, Verify):
            return _verify(command, console)
        return _inspect(command, console)
    except (PrepError, ManifestError) as error:
        errors.print(f"[bold red]error:[/] {_literal(str(error))}", highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130
    except Interrupted:
        errors.print("Interrupted. Whole shards are kept: run the same command again to go on.")
        return 130


def _build(command: Build, console: Console) -> int:
    names = tuple(filter(None, (command.domains or "").split(",")))
    source = open_source(command.source, classes_file=command.classes, domains=names)
    encoding = Encoding(resize=Resize.parse(command.resize), quality=command.quality, check=command.check)
    _check_numbers(command)
    _refuse_out_inside_source(command)
    samples = source.samples
    if command.limit_per_class is not None:
        samples = samples.limited(command.limit_per_class)
        source = replace(source, samples=samples)
    job = BuildJob(
        source=source,
        scenario=_scenario(command, num_domains=len(source.domains)),
        encoding=encoding,
        formats=_formats(command.formats, source, encoding.resize),
        out=command.out,
        shard_mb=command.shard_mb,
        limit_per_class=command.limit_per_class,
        max_corrupt=command.max_corrupt,
        num_workers=_workers(command.workers),
    )
    num_val = int(samples.is_val_S.sum())
    console.print(
        f"[bold]{_literal(command.source)}[/]: {len(samples) - num_val:,} training and {num_val:,} validation images, "
        f"{len(source.classes):,} classes -> {', '.join(job.formats)} in {_literal(str(command.out))} "
        f"({job.scenario}, {job.num_workers} threads)",
        highlight=False,
    )
    for note in source.notes:
        console.print(f"note: {_literal(note)}", highlight=False)
    with _stop_on_signal() as should_stop:
        result = build(job, console, should_stop)
    _report(result, job, console)
    return 0


@contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM asks the work to stop; the second acts as usual."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        restore()


def _report(result: BuildResult, job: BuildJob, console: Console) -> None:
    manifest = result.manifest
    table = load_table(manifest, job.out)
    if result.was_complete:
        console.print(f"{job.out} is already complete.", highlight=False)
        console.print(task_table(manifest, table))
        return
    if result.num_resumed:
        console.print(f"Went on after {result.num_resumed:,} images that were already there.", highlight=False)
    console.print(description(manifest), highlight=False)
    console.print(
        task_table(
            manifest,
            table,
            seconds_by_task=result.seconds_by_task,
            quarantined_by_task=result.quarantined_by_task if manifest.quarantine else None,
        )
    )
    for entry in manifest.quarantine[:_MAX_LISTED]:
        console.print(f"quarantined {_literal(entry.path)}: {_literal(entry.reason)}", highlight=False)
    if len(manifest.quarantine) > _MAX_LISTED:
        console.print(
            f"... and {len(manifest.quarantine) - _MAX_LISTED} more, listed in the manifest.", highlight=False
        )
    if manifest.encoding.num_warnings:
        console.print(f"{manifest.encoding.num_warnings:,} images decoded with harmless warnings.", highlight=False)
    total = sum(shard.bytes for shard in manifest.shards)
    console.print(
        f"{len(manifest.shards)} shards, {human_bytes(total)}. Manifest: {job.out / 'manifest.json'}", highlight=False
    )


def _split(command: Split, console: Console) -> int:
    path = manifest_path(command.dir)
    base = load_manifest(path)
    scenario = _scenario(command, num_domains=len(base.domains))
    manifest = resplit(command.dir, scenario, command.name)
    console.print(description(manifest), highlight=False)
    console.print(task_table(manifest, load_table(manifest, path.parent)))
    console.print(f"Manifest: {path.parent / (manifest.name + '.json')} (no shard was touched)", highlight=False)
    return 0


def _verify(command: Verify, console: Console) -> int:
    report = verify(command.dir, quick=command.quick, num_workers=_workers(command.workers), console=console)
    for problem in report.problems:
        console.print(f"[red]problem:[/] {_literal(problem)}", highlight=False)
    what = "sizes and counts" if command.quick else f"checksums and {report.num_images:,} images"
    names = ", ".join(f"{name}.json" for name in report.manifests)
    state = f"[bold red]{len(report.problems)} problems[/]" if report.problems else "[bold green]all whole[/]"
    console.print(f"{state}: {report.num_files} files ({what}), {names}", highlight=False)
    return 1 if report.problems else 0


def _inspect(command: Inspect, console: Console) -> int:
    path = manifest_path(command.dir)
    manifest = load_manifest(path)
    table = load_table(manifest, path.parent)
    console.print(description(manifest), highlight=False)
    console.print(task_table(manifest, table))
    if manifest.quarantine:
        console.print(f"{len(manifest.quarantine)} images are quarantined.", highlight=False)
    if command.views is not None and command.sheet is None:
        raise PrepError("--views draws on a sheet: add --sheet out.png.")
    if command.sheet is not None:
        try:
            if command.views is not None:
                from dataprep.view_sheet import view_sheet  # here: it needs torch, which nothing else of prep does

                save_png(view_sheet(path, command.views), command.sheet)
            else:
                save_png(contact_sheet(manifest, table, path.parent), command.sheet)
        except OSError as error:
            raise PrepError(f"{command.sheet} cannot be written: {error.strerror}. Choose another --sheet.") from None
        console.print(f"Contact sheet: {command.sheet}", highlight=False)
    return 0


def _literal(text: str) -> str:
    """File names may hold what a terminal or rich would take for something else."""
    return escape(text.encode("utf-8", "backslashreplace").decode())


def _check_numbers(command: Build) -> None:
    if not 1 <= command.quality <= 100:
        raise PrepError(f"--quality {command.quality} is outside 1 to 100.")
    if command.shard_mb < 1:
        raise PrepError(f"--shard-mb {command.shard_mb} is too small. Use at least 1.")
    if not 0 <= command.max_corrupt <= 1:
        raise PrepError(f"--max-corrupt {command.max_corrupt:g} is a share of the images: use 0 to 1.")
    if command.limit_per_class is not None and command.limit_per_class < 1:
        raise PrepError(f"--limit-per-class {command.limit_per_class} leaves nothing. Use at least 1.")


def _refuse_out_inside_source(command: Build) -> None:
    """Else the next start would list the shards as images of a new class."""
    root = Path(command.source.partition(":")[2]).expanduser()
    if root.is_dir() and command.source.partition(":")[2] and command.out.resolve().is_relative_to(root.resolve()):
        raise PrepError(f"--out {command.out} lies inside the source {root}. Choose a folder outside it.")


def _scenario(command: Tasks, *, num_domains: int) -> Scenario:
    if command.seed is not None and command.order is not None:
        raise PrepError("--seed and --order exclude each other: the reference order has its own seeds.")
    if command.seed is not None and command.seed < 0:
        raise PrepError(f"--seed {command.seed} is negative. Use 0 or more.")
    tasks = command.tasks
    if tasks is None:
        if command.scenario in ("class", "data"):
            raise PrepError(f"--scenario {command.scenario} needs --tasks, such as --tasks 5.")
        tasks = 1 if command.scenario == "joint" else max(num_domains, 1)
    return Scenario(kind=command.scenario, num_tasks=tasks, seed=command.seed)


def _formats(asked: str | None, source: Source, resize: Resize) -> tuple[str, ...]:
    if asked is None:
        size = (resize.size_px,) * 2 if resize.fit == "square" else source.one_size
        return ("array",) if size is not None and max(size) <= _SMALL_PX else ("tar",)
    known = formats()
    names = tuple(dict.fromkeys(filter(None, asked.split(","))))
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


if __name__ == "__main__":
    sys.exit(main())
