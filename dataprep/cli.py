"""fastcssl-prep: build | split | verify | inspect."""

if __name__ == "__main__":  # before the imports, which take seconds
    from dataprep.startup import begin_command

    begin_command()

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from dataprep import help
from dataprep.api import build_data, draw_sheet, split_data, verify_data
from dataprep.build import BuildJob, BuildResult
from dataprep.contents import class_lines, description, task_table
from dataprep.errors import Interrupted, PrepError, UserError
from dataprep.help import Flag
from dataprep.manifest import load_manifest, manifest_path
from dataprep.orders import asked_tasks
from dataprep.progress import counted, human_bytes, literal
from dataprep.scenario import Kind
from dataprep.table import load_table

PROG = "fastcssl-prep"
_MAX_LISTED = 5
_WHICH, _HOW = "which images", "how they are stored"


_ScenarioFlag = Annotated[Kind, Flag("how samples become tasks: class, data, domain or joint", "KIND")]
_TasksFlag = Annotated[
    str | None,
    Flag(
        "number of equal tasks; or the sizes of the tasks, such as 50,10,10; or a text file with one class or domain "
        "per line and a blank line between tasks; not needed for domain and joint",
        "T",
    ),
]
_SeedFlag = Annotated[int | None, Flag("seed of a random order, instead of CaSSLe's order", "S")]
_OrderFlag = Annotated[
    str | None,
    Flag(
        "order of all classes or domains: names separated by commas, a text file with one name per line, or reference "
        "for CaSSLe's order, which is the default",
        "LIST",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Build:
    """Writes a data set as task-split shards. After an interruption, the same command continues."""

    source: Annotated[
        str,
        tyro.conf.Positional,
        Flag(
            "imagenet:ROOT, imagenet100:ROOT, domainnet:ROOT, cifar10:ROOT, cifar100:ROOT, stl10:ROOT; folder:ROOT for "
            "any images; or synthetic for images that are drawn on the fly, with settings such as "
            "synthetic:size=64,train=40 (size 32 to 256 or mixed; classes 20, 30, 60 or 100; train, val, seed; format "
            "pixels or jpeg); or a source that another package adds",
            "SOURCE",
        ),
    ]
    out: Annotated[Path, Flag("the folder to write: empty, or started by the same command", "DIR")]
    scenario: _ScenarioFlag
    tasks: _TasksFlag = None
    seed: _SeedFlag = None
    order: _OrderFlag = None
    classes: Annotated[Path | None, Flag("a text file of the class folders to use, one per line", "FILE", _WHICH)] = (
        None
    )
    domains: Annotated[
        str | None, Flag("the domains to use, separated by commas, in the order of their tasks", "LIST", _WHICH)
    ] = None
    limit_per_class: Annotated[
        int | None, Flag("at most N images per class, in each split and domain", "N", _WHICH)
    ] = None
    formats: Annotated[
        str | None,
        Flag("tar, ffcv, array, separated by commas; by default array for one small size, else tar", "LIST", _HOW),
    ] = None
    resize: Annotated[str, Flag("or max:500 (both only shrink images), square:96, none", group=_HOW)] = "short:256"
    quality: Annotated[int, Flag("quality of re-encoded JPEGs; others are copied unchanged", group=_HOW)] = 90
    shard_mb: Annotated[int, Flag("size limit of a shard in megabytes", group=_HOW)] = 256
    check: Annotated[
        Literal["full", "header"],
        Flag("decode every image; header: only read the headers of images that are not resized", group=_HOW),
    ] = "full"
    max_corrupt: Annotated[
        float, Flag("stop when more than this share of images is corrupt (one is always allowed, unless 0)", group=_HOW)
    ] = 0.001
    workers: Annotated[int | None, Flag("number of threads; by default one per core", "N", _HOW)] = None


@dataclass(frozen=True, kw_only=True)
class Resplit:
    """Writes another manifest over the same shards, with another scenario, number of tasks or order. Takes seconds."""

    dir: Annotated[Path, tyro.conf.Positional, Flag("a prepared folder", "DIR")]
    name: Annotated[str, Flag("the new manifest is DIR/NAME.json", "NAME")]
    scenario: _ScenarioFlag
    tasks: _TasksFlag = None
    seed: _SeedFlag = None
    order: _OrderFlag = None


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Checks every checksum, count and image. The exit status is 0 if everything is intact and 1 if not."""

    dir: Annotated[Path, tyro.conf.Positional, Flag("a prepared folder, or one of its manifests", "DIR")]
    quick: Annotated[bool, Flag("check only sizes and counts")] = False
    workers: Annotated[int | None, Flag("number of threads; by default one per core", "N")] = None


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Shows what a prepared folder holds."""

    dir: Annotated[Path, tyro.conf.Positional, Flag("a prepared folder, or one of its manifests", "DIR")]
    sheet: Annotated[Path | None, Flag("draw its images on a sheet, one row per task", "PNG")] = None
    views: Annotated[
        str | None, Flag("draw images beside their views under a policy, such as pnr-moco-imagenet", "POLICY")
    ] = None


Command = (
    Annotated[Build, tyro.conf.subcommand("build", prefix_name=False)]
    | Annotated[Resplit, tyro.conf.subcommand("split", prefix_name=False)]
    | Annotated[Verify, tyro.conf.subcommand("verify", prefix_name=False)]
    | Annotated[Inspect, tyro.conf.subcommand("inspect", prefix_name=False)]
)


_PAGES = {
    "": help.menu(
        f"{PROG} VERB ...; {PROG} VERB --help shows its flags",
        "Turns images on disk into task-split, checksummed shards.",
        {"build": Build, "split": Resplit, "verify": Verify, "inspect": Inspect},
    ),
    "build": help.page(
        Build,
        f"{PROG} build SOURCE --out DIR --scenario KIND [FLAGS]",
        [
            f"{PROG} build synthetic --scenario class --tasks 3 --out data",
            f"{PROG} build imagenet100:/data/imagenet --scenario class --tasks 5 --out /data/in100",
            f"{PROG} build folder:/data/birds --scenario joint --formats tar,ffcv --out /data/birds-joint",
        ],
    ),
    "split": help.page(
        Resplit,
        f"{PROG} split DIR --name NAME --scenario KIND [FLAGS]",
        [
            f"{PROG} split /data/in100 --scenario data --tasks 10 --name data10",
            f"{PROG} split /data/in100 --scenario class --tasks 50,10,10,10,10,10 --name uneven",
        ],
    ),
    "verify": help.page(Verify, f"{PROG} verify DIR [--quick] [--workers N]"),
    "inspect": help.page(
        Inspect,
        f"{PROG} inspect DIR [--sheet PNG] [--views POLICY]",
        [f"{PROG} inspect /data/in100 --sheet views.png --views pnr-moco-imagenet"],
    ),
}


def main(args: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    console, errors = Console(soft_wrap=not sys.stdout.isatty()), Console(stderr=True, soft_wrap=True)
    args = sys.argv[1:] if args is None else args
    if help.is_version_asked(args):
        Console().print(help.version(), highlight=False)
        return 0
    if help.is_asked(args) or not args:
        Console().print(_PAGES[next((arg for arg in args if arg in _PAGES), "")])
        return 0 if args else 2
    command: Build | Resplit | Verify | Inspect = tyro.cli(
        Command, prog=PROG, args=args, config=(tyro.conf.FlagCreatePairsOff,)
    )
    try:
        if isinstance(command, Build):
            return _build(command, console)
        if isinstance(command, Resplit):
            return _split(command, console)
        if isinstance(command, Verify):
            return _verify(command, console)
        return _inspect(command, console)
    except UserError as error:
        errors.print(f"[bold red]error:[/] {literal(str(error))}", highlight=False)
        return 2
    except KeyboardInterrupt:
        errors.print("Interrupted.")
        return 130
    except Interrupted:
        errors.print("Interrupted. Complete shards are kept: run the same command again to continue.")
        return 130


def _build(command: Build, console: Console) -> int:
    asked = asked_tasks(command.tasks, command.order, command.seed)
    begun: list[tuple[BuildJob, Callable[[], bool]]] = []

    def announce(job: BuildJob) -> None:
        begun.append((job, stack.enter_context(_stop_on_signal())))  # until here, Ctrl-C stops the command immediately
        samples, classes = job.source.samples, job.source.classes
        num_val = int(samples.is_val_S.sum())
        console.print(
            f"[bold]{literal(command.source)}[/]: {len(samples) - num_val:,} training and {num_val:,} validation "
            f"images, {len(classes):,} classes -> {', '.join(job.formats)} in {literal(str(command.out))} "
            f"({job.scenario}, {job.num_workers} threads)",
            highlight=False,
        )
        for note in job.source.notes:
            console.print(f"note: {literal(note)}", highlight=False)

    with ExitStack() as stack:
        result = build_data(
            command.source,
            command.out,
            scenario=command.scenario,
            num_tasks=asked.num_tasks,
            seed=command.seed,
            order=asked.order,
            sizes=asked.sizes,
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
    """Yields a function that returns whether a Ctrl-C or SIGTERM has arrived. The second signal acts as usual."""
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
        console.print(f"Resumed after {counted(result.num_resumed, 'image')} already stored.", highlight=False)
    console.print(literal(description(manifest)), highlight=False)
    console.print(
        task_table(
            manifest,
            table,
            seconds_by_task=result.seconds_by_task,
            quarantined_by_task=result.quarantined_by_task if manifest.quarantine else None,
        )
    )
    for entry in manifest.quarantine[:_MAX_LISTED]:
        console.print(f"quarantined {literal(entry.path)}: {literal(entry.reason)}", highlight=False)
    if len(manifest.quarantine) > _MAX_LISTED:
        console.print(
            f"... and {len(manifest.quarantine) - _MAX_LISTED} more, listed in the manifest.", highlight=False
        )
    if manifest.encoding.num_warnings:
        console.print(
            f"{counted(manifest.encoding.num_warnings, 'image')} gave harmless warnings when decoded.", highlight=False
        )
    total = sum(shard.bytes for shard in manifest.shards)
    shards = counted(len(manifest.shards), "shard")
    console.print(f"{shards}, {human_bytes(total)}. Manifest: {job.out / 'manifest.json'}", highlight=False)


def _split(command: Resplit, console: Console) -> int:
    asked = asked_tasks(command.tasks, command.order, command.seed)
    path = manifest_path(command.dir)
    manifest = split_data(
        path,
        command.name,
        scenario=command.scenario,
        num_tasks=asked.num_tasks,
        seed=command.seed,
        order=asked.order,
        sizes=asked.sizes,
    )
    console.print(literal(description(manifest)), highlight=False)
    console.print(task_table(manifest, load_table(manifest, path.parent)))
    console.print(f"Manifest: {path.parent / (manifest.name + '.json')} (no shard was touched)", highlight=False)
    return 0


def _verify(command: Verify, console: Console) -> int:
    report = verify_data(command.dir, quick=command.quick, num_workers=command.workers, console=console)
    for problem in report.problems:
        console.print(f"[red]problem:[/] {literal(problem)}", highlight=False)
    what = "sizes and counts" if command.quick else f"checksums and {counted(report.num_images, 'image')}"
    names = ", ".join(f"{name}.json" for name in report.manifests)
    files, found = counted(report.num_files, "file"), counted(len(report.problems), "problem")
    result = f"[bold red]{found}[/]: {files} checked" if report.problems else f"[bold green]OK[/]: {files} verified"
    console.print(f"{result} ({what}), {names}", highlight=False)
    return 1 if report.problems else 0


def _inspect(command: Inspect, console: Console) -> int:
    path = manifest_path(command.dir)
    manifest = load_manifest(path)
    table = load_table(manifest, path.parent)
    console.print(literal(description(manifest)), highlight=False)
    console.print(task_table(manifest, table))
    for line in class_lines(manifest):
        console.print(literal(line), highlight=False)
    if manifest.quarantine:
        console.print(f"{counted(len(manifest.quarantine), 'image')} quarantined.", highlight=False)
    if command.views is not None and command.sheet is None:
        raise PrepError("--views needs a sheet to draw on. Add --sheet out.png.")
    if command.sheet is not None:
        draw_sheet(path, command.sheet, views=command.views)
        console.print(f"Contact sheet: {command.sheet}", highlight=False)
    return 0


def _listed(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


if __name__ == "__main__":
    sys.exit(main())
