"""fastcssl-prep: build | split | verify | inspect."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from dataprep.api import build_data, draw_sheet, split_data, verify_data
from dataprep.build import BuildJob, BuildResult
from dataprep.contents import description, task_table
from dataprep.errors import Interrupted, PrepError
from dataprep.manifest import ManifestError, load_manifest, manifest_path
from dataprep.progress import human_bytes
from dataprep.scenario import Kind
from dataprep.table import load_table

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
    _check_order(command)
    begun: list[tuple[BuildJob, Callable[[], bool]]] = []

    def announce(job: BuildJob) -> None:
        begun.append((job, stack.enter_context(_stop_on_signal())))  # until now Ctrl-C ended it at once
        samples, classes = job.source.samples, job.source.classes
        num_val = int(samples.is_val_S.sum())
        console.print(
            f"[bold]{_literal(command.source)}[/]: {len(samples) - num_val:,} training and {num_val:,} validation "
            f"images, {len(classes):,} classes -> {', '.join(job.formats)} in {_literal(str(command.out))} "
            f"({job.scenario}, {job.num_workers} threads)",
            highlight=False,
        )
        for note in job.source.notes:
            console.print(f"note: {_literal(note)}", highlight=False)

    with ExitStack() as stack:
        result = build_data(
            command.source,
            command.out,
            scenario=command.scenario,
            num_tasks=command.tasks,
            seed=command.seed,
            formats=None if command.formats is None else _listed(command.formats),
            resize=command.resize,
            quality=command.quality,
            shard_mb=command.shard_mb,
            num_workers=command.workers,
            limit_per_class=command.limit_per_class,
            check=command.check,
            max_corrupt=command.max_corrupt,
            classes_file=command.classes,
            domains=_listed(command.domains or ""),
            console=console,
            should_stop=lambda: begun[0][1](),
            announce=announce,
        )
    _report(result, begun[0][0], console)
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
    _check_order(command)
    path = manifest_path(command.dir)
    manifest = split_data(path, command.name, scenario=command.scenario, num_tasks=command.tasks, seed=command.seed)
    console.print(description(manifest), highlight=False)
    console.print(task_table(manifest, load_table(manifest, path.parent)))
    console.print(f"Manifest: {path.parent / (manifest.name + '.json')} (no shard was touched)", highlight=False)
    return 0


def _verify(command: Verify, console: Console) -> int:
    report = verify_data(command.dir, quick=command.quick, num_workers=command.workers, console=console)
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
        draw_sheet(path, command.sheet, views=command.views)
        console.print(f"Contact sheet: {command.sheet}", highlight=False)
    return 0


def _literal(text: str) -> str:
    """File names may hold what a terminal or rich would take for something else."""
    return escape(text.encode("utf-8", "backslashreplace").decode())


def _listed(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _check_order(command: Tasks) -> None:
    if command.seed is not None and command.order is not None:
        raise PrepError("--seed and --order exclude each other: the reference order has its own seeds.")


if __name__ == "__main__":
    sys.exit(main())
