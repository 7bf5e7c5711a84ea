"""fastcssl-train RECIPE METHOD STRATEGY --data DIR: trains an encoder. Also --list, --dry-run and status RUN."""

if __name__ == "__main__":  # before the imports, which take seconds
    from dataprep.startup import begin_command

    begin_command()

import dataclasses
import statistics
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from dataprep.suggest import nearest
from fastcssl.cli.declared import UNREADABLE, check_flags, epochs_of
from fastcssl.cli.exit_codes import ExitCode, after_signal, explained, run_command, together
from fastcssl.cli.listing import (
    PROG,
    catalogue,
    everything,
    flag_of,
    flags,
    imported_settings,
    plain_value,
    read_settings,
    usage,
    values,
)
from fastcssl.config.recipes import RECIPES, Recipe, Settings, flat, recipe
from fastcssl.config.recipes.own_data import name_of
from fastcssl.errors import UserError
from fastcssl.runs.display import PROBE_NAMES

if TYPE_CHECKING:
    from fastcssl.train.session import Outcome

_LISTED = ("moco", "pnr")  # what --list shows for a recipe without method and strategy
_EPOCHS = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="N",
    instance_from_str=lambda words: epochs_of(words[0]),
    is_instance=lambda value: isinstance(value, int | tuple),
    str_from_instance=lambda value: [plain_value("epochs", value)],
)
_SWITCH = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options that are not part of the configuration."""

    data: Path | None = None
    out: Path | None = None
    resume: Literal["auto", "never"] = "auto"
    start_from: Annotated[str | None, tyro.conf.arg(name="from")] = None
    seeds: str | None = None
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False


def main(args: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return run_command(_run, args)


def _run(args: list[str], console: Console) -> int:
    if args[:1] == ["status"]:
        return _status(args[1:], console)
    settings, args = _settings(args)
    wants_help, wants_list = any(arg in ("-h", "--help") for arg in args), "--list" in args
    args = [arg for arg in args if arg not in ("-h", "--help", "--list")]
    num_words = next((place for place, arg in enumerate(args) if arg.startswith("-")), len(args))
    words, args = tuple(args[:num_words]), args[num_words:]
    _check_words(words)
    if wants_list:
        if not words:
            console.print(everything())
            return ExitCode.OK
        words += _LISTED[len(words) - 1 :]
    elif len(words) < 3:
        if wants_help or not (words or args):
            console.print(usage(words))
            return ExitCode.OK if wants_help else ExitCode.MISTAKE
        raise UserError(_missing(words))
    check_flags(words, args)
    if wants_help:
        console.print(_help(words, settings, _data(args)))
        return ExitCode.OK
    found = recipe(*words, settings=settings, data=_data(args))
    options, changed = parsed(words, found, args, speaks=not console.quiet)
    if wants_list:
        console.print(values(words, settings, changed))
        return ExitCode.OK
    return _with_options(words, options, changed, args, console)


def _help(words: Sequence[str], settings: Settings, data: Path | None) -> RenderableType:
    """Returns the page of all flags. Only a plug-in whose source cannot be read is imported for it."""
    try:
        known, about_of = read_settings(words, settings, data)
    except UNREADABLE:
        known, about_of = imported_settings(recipe(*words, settings=settings, data=data))
    awaits_data = RECIPES[words[0]].follows_data and data is None
    return flags(words, known, about_of, _default_out(words, known["seed"], data), awaits_data=awaits_data)


def _settings(args: list[str]) -> tuple[Settings, list[str]]:
    """Returns the value of --settings and the other arguments. It is read first: other defaults depend on it."""
    settings: Settings = "matched"
    rest: list[str] = []
    words = iter(args)
    for arg in words:
        name, equals, value = arg.partition("=")
        if name != "--settings":
            rest.append(arg)
            continue
        word = value if equals else next(words, "")
        if word not in get_args(Settings):
            problem = f"{word!r} does not exist" if word else "needs a name"
            raise UserError(f"--settings {problem}. {nearest(word, get_args(Settings))}")
        settings = word  # type: ignore[assignment]
    return settings, rest


def _data(args: Sequence[str]) -> Path | None:
    """Returns the value of --data. It is read first, as the defaults of a recipe may follow the data."""
    for place, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name == "--data" and (equals or place + 1 < len(args)):
            return Path(value if equals else args[place + 1])
    return None


def _check_words(words: Sequence[str]) -> None:
    if len(words) > 3:
        raise UserError(
            f"{words[3]!r} is a fourth word; only flags may follow RECIPE METHOD STRATEGY, such as --data DIR."
        )
    for word, (what, names) in zip(words, _known(), strict=False):
        if word not in names:
            raise UserError(f"There is no {what} {word!r}. {nearest(word, names)}")


def _known() -> tuple[tuple[str, list[str]], ...]:
    return (
        ("recipe", list(RECIPES)),
        ("method", list(catalogue("methods"))),
        ("strategy", list(catalogue("strategies"))),
    )


def _missing(words: Sequence[str]) -> str:
    text = "; ".join(f"{what.upper()} is one of {', '.join(names)}" for what, names in _known()[len(words) :])
    return f"The command begins with {PROG} RECIPE METHOD STRATEGY, followed by flags. {text}. See {PROG} --help."


# ---- Flags -----------------------------------------------------------------------------------------------------------


def parsed(words: Sequence[str], found: Recipe, args: list[str], *, speaks: bool = True) -> tuple[TrainOptions, Recipe]:
    """Returns the options and the recipe as changed by the flags. Tyro exits if it does not understand a flag."""
    from fastcssl.config.config import Config
    from fastcssl.learn import methods, strategies

    hints, fields = typing.get_type_hints(Config), []
    for field in dataclasses.fields(Config):
        value = getattr(found.config, field.name)
        kind: Any = type(value) if field.name in ("method", "strategy") else hints[field.name]
        if field.name == "epochs":
            kind = Annotated[kind, _EPOCHS]
        if field.name == "run":
            kind = Annotated[kind, tyro.conf.OmitArgPrefixes]
        if field.name != "recipe":
            fields.append((field.name, kind, dataclasses.field(default=value)))
    known = dataclasses.make_dataclass("Flags", fields, bases=(TrainOptions,), frozen=True, kw_only=True)
    try:
        given: Any = tyro.cli(
            known,
            prog=" ".join((PROG, *words)),
            args=list(_switched(args, found)),
            console_outputs=speaks,
        )
        config = Config(recipe=found.config.recipe, **{name: getattr(given, name) for name, *_ in fields})
        strategies.strategy_of(config.strategy).check(config.strategy, methods.method_of(config.method))
    except ValueError as error:
        raise UserError(str(error)) from None
    options = {field.name: getattr(given, field.name) for field in dataclasses.fields(TrainOptions)}
    return TrainOptions(**options), found.changed_to(config)


def _switched(args: Sequence[str], found: Recipe) -> Iterator[str]:
    """Yields the arguments as tyro expects them: `--strategy.no-pn1` instead of `--strategy.pn1 off`."""
    switches = {flag_of(key) for key, value in flat(found.config) if isinstance(value, bool)}
    words = iter(args)
    arg = next(words, None)
    while arg is not None:
        flag, equals, value = arg.partition("=")
        following = next(words, None)
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        word = value if equals else "" if following is None or following.startswith("-") else following
        state = _SWITCH.get(word.lower()) if flag in switches else None
        if flag in switches and word and state is None:
            raise UserError(f"{flag} {word}: use on or off.")
        if state is None:
            yield arg
        else:
            parent, dot, name = flag.removeprefix("--").rpartition(".")
            yield f"--{parent}{dot}{'' if state else 'no-'}{name}"
            if not equals:
                following = next(words, None)
        arg = following


def _seeds(options: TrainOptions, args: Sequence[str]) -> tuple[int, ...]:
    """Returns the numbers of --seeds, or () if it is not given."""
    if options.seeds is None:
        return ()
    if any(arg.partition("=")[0] == "--seed" for arg in args):
        raise UserError("--seed and --seeds exclude each other. Give only one of them.")
    parts = [part.strip() for part in options.seeds.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"--seeds {options.seeds!r}: give numbers separated by commas, such as --seeds 5,6,7.")
    seeds = tuple(map(int, parts))
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {options.seeds}: a seed occurs twice. Give each seed once.")
    return seeds


def _default_out(words: Sequence[str], seed: int | None, data: Path | None) -> Path:
    recipe, *others = words
    if RECIPES[recipe].follows_data:  # the same words may train on many data sets
        recipe = f"{recipe}-{'DATA' if data is None else name_of(data)}"
    return Path("runs", "-".join((recipe, *others)) + ("" if seed is None else f"-seed{seed}"))


# ---- Actions ---------------------------------------------------------------------------------------------------------


def _status(args: list[str], console: Console) -> int:
    from fastcssl.runs.layout import RunFolder
    from fastcssl.runs.status import summary

    if len(args) != 1 or args[0].startswith("-"):
        console.print(f"usage: {PROG} status RUN", markup=False)
        return ExitCode.OK if args in (["-h"], ["--help"]) else ExitCode.MISTAKE
    folder = Path(args[0])
    # With several seeds, each is a run of its own.
    own = RunFolder(folder).status
    seeds = [] if own.exists() else sorted(path.parent for path in folder.glob(f"seed*/{own.name}"))
    for run in seeds or [folder]:
        console.print(summary(run))
    return ExitCode.OK


def _with_options(
    words: Sequence[str], options: TrainOptions, found: Recipe, args: Sequence[str], console: Console
) -> int:
    seeds = _seeds(options, args)
    out = options.out or _default_out(words, None if seeds else found.config.seed, options.data)
    if options.data is None:
        raise UserError(
            "--data is missing. Give a folder written by fastcssl-prep; for this recipe: fastcssl-prep build "
            f"{RECIPES[words[0]].build_words} --out DIR."
        )
    with explained():
        return _train(options, found, seeds, out, options.data, console)


def _train(
    options: TrainOptions, found: Recipe, seeds: tuple[int, ...], out: Path, data: Path, console: Console
) -> int:
    from fastcssl.api import forecast_run, train_run, train_seeds
    from fastcssl.distributed.world import connected

    if options.dry_run:
        from fastcssl.train.forecast import shown

        with connected(found.config.run.device) as (world, _):
            if world.rank == 0:
                console.print(shown(forecast_run(found, data=data, out=out, num_ranks=world.size)))
            world.barrier()
        return ExitCode.OK
    where: dict[str, Any] = {"data": data, "out": out, "resume": options.resume, "start_from": options.start_from}
    with together(connected(found.config.run.device)):
        if seeds:
            outcomes = train_seeds(found, seeds, console=console, **where)
        else:
            outcomes = [train_run(found, console=console, **where)]
    if len(outcomes) > 1 and (table := over_seeds(outcomes)) is not None:
        console.print(table)
    return after_signal(outcomes[-1].signal) if outcomes[-1].signal else ExitCode.OK


def over_seeds(outcomes: "Sequence[Outcome]") -> RenderableType | None:
    """Returns a table of the probes' mean and standard deviation after each task, or None without probes."""
    names = list(dict.fromkeys(name for outcome in outcomes for task in outcome.tasks for name in task.accuracy))
    if not names:
        return None
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("after task", justify="right")
    for name in names:
        table.add_column(PROBE_NAMES.get(name, name), justify="right", no_wrap=True)
    for number in range(max(len(outcome.tasks) for outcome in outcomes)):
        reached = [outcome.tasks[number].accuracy for outcome in outcomes if number < len(outcome.tasks)]
        table.add_row(
            str(number), *(_mean([100 * found[name] for found in reached if name in found]) for name in names)
        )
    return Group(f"top-1 accuracy in %, mean ± standard deviation over {len(outcomes)} seeds", table)


def _mean(found: Sequence[float]) -> str:
    if not found:
        return "-"
    deviation = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):.2f}{deviation}"


if __name__ == "__main__":
    sys.exit(main())
