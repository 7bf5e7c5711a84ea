"""Formats the --help page of a command: usage, purpose, flags in groups with their default values, examples.

tyro parses the command line. The page is our own, so that it is short and has the same form for every command.
"""

import dataclasses
import importlib.metadata
import inspect
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tyro
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Flag:
    """The help text of one option. It is an item of the field's `Annotated`."""

    about: str
    metavar: str = ""  # shown instead of the default value if there is none
    group: str = ""  # the heading under which the flag is listed


def is_asked(args: Sequence[str]) -> bool:
    """Returns whether the arguments ask for help."""
    return any(arg in ("-h", "--help") for arg in args)


def is_version_asked(args: Sequence[str]) -> bool:
    """Returns whether the arguments ask for the version."""
    return "--version" in args


def version() -> str:
    """Returns the line that --version prints."""
    return f"fastcssl {importlib.metadata.version('fastcssl')}"


def page(options: type, usage: str, examples: Sequence[str] = ()) -> RenderableType:
    """Returns the help page of a command.

    `options` is a dataclass. Each of its fields has a Flag, and its docstring says what the command does.
    """
    return _page(usage, _about(options), list(_rows(options)), examples)


def menu(usage: str, about: str, verbs: Mapping[str, type]) -> RenderableType:
    """Returns the help page of a command that has several verbs, each with its own options."""
    return _page(usage, about, [(Text(verb, "cyan"), Flag(_about(options))) for verb, options in verbs.items()])


def _page(usage: str, about: str, rows: Sequence[tuple[Text, Flag]], examples: Sequence[str] = ()) -> RenderableType:
    parts: list[RenderableType] = [Text.assemble(("usage: ", "bold"), usage, f"\n\n{about}")]
    for group in dict.fromkeys(flag.group for _, flag in rows):
        shown = grid()
        for name, flag in rows:
            if flag.group == group:
                shown.add_row(name, Text(flag.about))
        parts += [Text(f"\n{group}", "bold") if group else "", shown]
    if examples:
        parts += [Text("\nexamples", "bold"), *(Padding(Text(line), (0, 0, 0, 2)) for line in examples)]
    return Group(*parts)


def grid() -> Table:
    """Returns an empty table with two columns: flags and their descriptions."""
    found = Table.grid(padding=(0, 2))
    found.add_column(no_wrap=True)
    found.add_column(overflow="fold")
    return found


def _about(options: type) -> str:
    """Returns the docstring of a class, with one line per paragraph."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(options) or "")


def _rows(options: type) -> Iterator[tuple[Text, Flag]]:
    hints = typing.get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        notes = hints[field.name].__metadata__
        flag = next(note for note in notes if isinstance(note, Flag))
        if tyro.conf.Positional in notes:
            yield Text(flag.metavar, "cyan"), flag
            continue
        name, value = field.name.replace("_", "-"), _shown(field.default)
        if isinstance(field.default, bool):  # a switch is named after its effect
            name, value = f"no-{name}" if field.default else name, ""
        yield Text.assemble((f"--{name}", "cyan"), f" {value or flag.metavar}"), flag


def _shown(value: Any) -> str:
    if value is None or value is dataclasses.MISSING:
        return ""
    if isinstance(value, tuple):
        return " ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
