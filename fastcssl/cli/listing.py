"""Renders `fastcssl-train --list` and `--help`. Nothing here imports torch until a configuration is shown."""

import ast
import dataclasses
import inspect
import pkgutil
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dataprep.help import grid
from fastcssl.cli.declared import NOTHING, declared, source_of
from fastcssl.config.recipes import ABLATIONS, COMMAND_LINE, OURS, RECIPES, Recipe, Settings, flat, settled
from fastcssl.config.recipes.own_data import facts_of

PROG = "fastcssl-train"
PluginKind = Literal["methods", "strategies"]


def catalogue(kind: PluginKind) -> dict[str, str]:
    """Returns all methods or strategies, plug-ins included, each with the first line of its module's docstring."""
    package = f"fastcssl.learn.{kind}"
    modules = {info.name: f"{package}.{info.name}" for info in pkgutil.iter_modules([str(source_of(package).parent)])}
    modules |= {point.name: point.module for point in entry_points(group=f"fastcssl.{kind}")}
    return {name: _first_line(source_of(module)) for name, module in sorted(modules.items())}


def _first_line(source: Path) -> str:
    try:
        text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")))
    except (OSError, ValueError, SyntaxError):
        return ""
    return (text or "").partition("\n")[0]


# ---- --list ----------------------------------------------------------------------------------------------------------


def everything() -> RenderableType:
    """Returns tables of all recipes, methods, strategies and ablations."""
    return Group(
        _named("recipe", {name: data.about for name, data in RECIPES.items()}),
        _named("method", catalogue("methods")),
        _named("strategy", catalogue("strategies")),
        _named("ablation", {name: item.shown for name, item in ABLATIONS.items()}),
        Text.assemble((f"{PROG} --list RECIPE [METHOD STRATEGY]", "cyan"), " shows every setting and its source."),
    )


def _named(what: str, about: Mapping[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1), pad_edge=False)
    table.add_column(what, style="cyan", no_wrap=True, min_width=18)
    table.add_column("", overflow="fold")
    for name, text in about.items():
        table.add_row(Text(name), Text(text))
    return table


_AWAITS_DATA = (
    "This recipe follows the data, which is not known yet. Its values here are those of photos with a shorter side of "
    "256 px, 25,000 in each of 5 tasks. Add --data DIR to see yours."
)


def values(words: Sequence[str], settings: str, found: Recipe) -> RenderableType:
    """Returns a table of every value of a recipe with its source. Our own choices are dimmed."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1), pad_edge=False, collapse_padding=True)
    for heading in ("flag", "value", "source"):
        table.add_column(heading, overflow="fold")
    for _, keys in _groups(found):
        for key, value in keys.items():
            source = found.sources[key]
            ours = "dim" if source.startswith(OURS) else "green"
            style = "bold yellow" if source == COMMAND_LINE else ours
            table.add_row(Text(flag_of(key)), Text(plain_value(key, value), "cyan"), Text(source, style))
        table.add_section()
    note = {
        "matched": "Settings: matched (the same for all strategies). See also --settings published.",
        "published": "Settings: published (each strategy as its authors ran it). See also --settings matched.",
    }
    notes = [Text(_AWAITS_DATA, "bold yellow")] if found.awaits_data else []
    return Group(Text(" ".join(words), "bold"), table, *notes, Text(note[settings], "dim"))


# The groups of values, with their headings.
_GROUPS = {
    "": "the run",
    "optim": "optimiser",
    "method": "method",
    "strategy": "strategy",
    "encoder": "encoder",
    "views": "views",
    "expect": "accepted data",
    "run": "this process",
}


def _groups(found: Recipe) -> Iterator[tuple[str, dict[str, Any]]]:
    for group, heading in _GROUPS.items():
        keys = {key: value for key, value in flat(found.config) if key != "recipe" and _group(key) == group}
        yield heading, keys


def _group(key: str) -> str:
    return key.partition(".")[0] if "." in key else ""


def flag_of(key: str) -> str:
    """Returns the flag of a dotted key. The prefix `run.` is left out on the command line."""
    return f"--{key.removeprefix('run.').replace('_', '-')}"


def plain_value(key: str, value: Any) -> str:
    """Returns a setting's value as the command line takes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    separator = "," if key == "epochs" else " "
    return separator.join(plain_value(key, item) for item in value) if isinstance(value, tuple) else str(value)


# ---- --help ----------------------------------------------------------------------------------------------------------

# The flags that most runs need: flag, placeholder, description and key. A flag with a key shows the recipe's value.
COMMON = (
    ("--data", "DIR", "folder or manifest written by fastcssl-prep", None),
    ("--out", "RUN", "folder of the run; an unfinished run in it is resumed", None),
    ("--epochs", "N", "epochs per task, or a list with one number for each task, such as 100,50,50", "epochs"),
    ("--batch-size", "N", "images per step, over all processes", "batch_size"),
    ("--optim.lr", "X", "learning rate for a batch of 256, scaled to yours", "optim.lr"),
    ("--seed", "N", "random seed for weights, data order and views", "seed"),
    ("--seeds", "5,6,7", "one run per seed, in RUN/seed5 etc., and their mean", None),
    (
        "--settings",
        "matched",
        "matched: the same for all strategies; published: each strategy as its authors ran it",
        None,
    ),
    ("--loader", "NAME", "auto, native, resident, ffcv, dali, torchvision", "loader"),
    (
        "--online-probe",
        "every=E",
        "off, or probe every E epochs and after each task; every=E,parity: as in CaSSLe and PNR",
        "online_probe",
    ),
    (
        "--stop-after-task",
        "K",
        "stop after task K, counted from 0; the same command without this flag continues",
        "run.stop_after_task",
    ),
    ("--only-task", "I", "train only task I, counted from 0", "only_task"),
    ("--from", "RUN@K", "start with RUN's state after task K, in any strategy", None),
    ("--resume", "auto", "auto: from the last checkpoint; never: start over", None),
    ("--checkpoint-minutes", "M", "minutes between checkpoints", "run.checkpoint_minutes"),
    ("--dry-run", "", "only estimate steps, memory, disk space and time", None),
)


def usage(words: Sequence[str] = ()) -> RenderableType:
    """Returns the help page for a command line on which some of the three words are missing."""
    known: list[tuple[str, Iterable[str]]] = [
        ("RECIPE", RECIPES),
        ("METHOD", catalogue("methods")),
        ("STRATEGY", catalogue("strategies")),
    ]
    missing = known[len(words) :]
    sentence = " ".join((PROG, *words, *(name for name, _ in missing)))
    rows = grid()
    for name, names in missing:
        rows.add_row(Text(name, "cyan"), Text(", ".join(names)))
    return Group(
        Text.assemble(("usage: ", "bold"), f"{sentence} --data DIR [--out RUN] [FLAGS]"),
        Text(f"       {PROG} --list [RECIPE [METHOD STRATEGY]]"),
        Text(f"       {PROG} status RUN"),
        Text("\nTrains an encoder on one task after another, on data that fastcssl-prep wrote."),
        Text("If it is interrupted, run the same command again to resume.\n"),
        rows,
        Text(f"\n{PROG} demo moco pnr --help lists all flags; --list explains the names.", "dim"),
    )


def flags(
    words: Sequence[str], shown: Mapping[str, Any], about_of: Mapping[str, str], out: Path, *, awaits_data: bool
) -> RenderableType:
    """Returns the help page for the three words: the common flags, then all others in groups.

    `shown`: the recipe's value of each setting, by dotted key; `about_of`: its description.
    """
    common = grid()
    for flag, metavar, about, key in COMMON:
        value = shown[key] if key else None
        text = f"{about}; by default {out}" if flag == "--out" else about
        common.add_row(_flag(flag, metavar if key is None or value is None else plain_value(key, value)), Text(text))
    parts: list[RenderableType] = [
        Text.assemble(("usage: ", "bold"), " ".join((PROG, *words)), " --data DIR [--out RUN] [FLAGS]\n"),
        *([Text(f"{_AWAITS_DATA}\n", "bold yellow")] if awaits_data else []),
        common,
        Text("\nAll other flags, with this recipe's values. --list shows their sources.", "dim"),
    ]
    common_keys = {key for *_, key in COMMON}
    for group, heading in _GROUPS.items():
        rows = grid()
        for key, value in shown.items():
            if _group(key) == group and key not in common_keys:
                rows.add_row(_flag(flag_of(key), plain_value(key, value)), Text(about_of[key], "dim"))
        parts += [Text(f"\n{heading}", "bold"), rows]
    return Group(*parts)


def read_settings(words: Sequence[str], settings: Settings, data: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the values and the descriptions of all settings, read from source text and from the tables of recipes.

    Raises one of `declared.UNREADABLE` if a plug-in's source does not tell them.
    """
    name, method, strategy = words
    facts = facts_of(data) if RECIPES[name].follows_data and data is not None else None
    table = {key: value for key, (value, _) in settled(name, method, strategy, settings, facts).items()}
    known = declared(method, strategy)
    values = {key: table.get(key, item.default) for key, item in known.items()}
    if missing := [key for key, value in values.items() if value is NOTHING]:
        raise LookupError(f"no table and no default has {missing[0]}")
    return values, {key: _about(item.choices if not item.kinds else (), item.about) for key, item in known.items()}


def imported_settings(found: Recipe) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns what `read_settings` returns, from the classes themselves, which imports torch."""
    values, about_of = dict(flat(found.config)), dict(_comments(found.config))
    return {key: values[key] for key in values if key != "recipe"}, {k: about_of[k] for k in about_of if k != "recipe"}


def _about(choices: Iterable[str], comment: str | None) -> str:
    return "; ".join(filter(None, (" | ".join(choices), comment)))


def _flag(flag: str, value: str) -> Text:
    return Text.assemble((flag, "cyan"), " ", value)


def _comments(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields every key with its choices and the comment on its line in the source."""
    kind = type(config)
    hints = typing.get_type_hints(kind)
    source = "".join(inspect.getsource(base) for base in reversed(kind.__mro__) if dataclasses.is_dataclass(base))
    said = dict(re.findall(r"^    (\w+): [^#\n]*# (.*)$", source, re.MULTILINE))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _comments(value, f"{prefix}{field.name}.")
            continue
        hint = hints[field.name]
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        yield f"{prefix}{field.name}", _about(choices, said.get(field.name))
