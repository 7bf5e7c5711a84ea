"""Reads the settings of fastcssl-train from source text: names, types, defaults and comments.

Help and mistakes are shown immediately, because torch need not be imported first.
"""

import ast
import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dataprep.suggest import nearest
from fastcssl.errors import UserError

_OWN = ("data", "out", "resume", "from", "seeds", "dry-run")  # flags that are not part of the configuration
_CONFIG = "fastcssl.config.config"
_PARTS = {"method": "fastcssl.learn.methods", "strategy": "fastcssl.learn.strategies"}
_PLAIN = ("int", "float", "bool", "str", "None", "Path")
UNREADABLE = (LookupError, OSError, SyntaxError, ValueError)
# What other programs call these flags.
_SYNONYMS = {
    "learning-rate": ("optim.lr",),
    "output": ("out",),
    "output-dir": ("out",),
    "data-dir": ("data",),
    "bs": ("batch-size",),
    "max-epochs": ("epochs",),
    "num-workers": ("num-threads",),
    "workers": ("num-threads",),
    "arch": ("encoder.name",),
    "backbone": ("encoder.name",),
    "model": ("encoder.name",),
    "wd": ("optim.weight-decay",),
    "image-size": ("views.size-px",),
    "amp": ("precision",),
    "fp16": ("precision",),
    "resume-from": ("from", "resume"),
    "queue-size": ("method.bank.size",),
    "tau": ("method.temperature",),
}
_GROUPS = {"method": "fastcssl.methods", "strategy": "fastcssl.strategies"}


def source_of(module: str) -> Path:
    """Returns a module's file without importing anything, as its parent packages would import torch."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    if spec is None or spec.origin is None:
        return Path(os.devnull)
    path = Path(spec.origin).parent.joinpath(*rest)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py") if rest else Path(spec.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A setting as its dataclass declares it."""

    key: str  # dotted
    kinds: frozenset[str]  # of its values: int, float, bool, str, None, or other names
    choices: tuple[str, ...]  # of a Literal
    default: Any  # NOTHING if it has none
    about: str  # the comment on its line


NOTHING = object()


def check_flags(words: Sequence[str], args: Sequence[str]) -> None:
    """Raises a UserError for a flag that does not exist for these three words, or that has an impossible value."""
    try:
        known = declared(words[1], words[2])
    except UNREADABLE:
        return  # a plug-in without source; tyro checks its flags
    names = flag_names(known.values())
    by_flag = {_flag(item.key): item for item in known.values()}
    for place, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        name = flag.removeprefix("--").replace("_", "-")
        if not arg.startswith("--"):
            continue
        if name not in names:
            listed = f"fastcssl-train {' '.join(words)} --help lists them all."
            raise UserError(f"There is no flag --{name}.{_meant(name, names)} {listed}")
        following = args[place + 1] if place + 1 < len(args) else ""
        word = value if equals else following
        if name in by_flag and word and not (word.startswith("--") and not equals):
            _check_value(name, word, by_flag[name])


def _meant(name: str, names: Sequence[str]) -> str:
    """Returns a suggestion: a flag of that name in a group, one that others call so, or those spelt most like it."""
    close = [flag for flag in names if flag.rpartition(".")[2] == name] or [
        flag for flag in _SYNONYMS.get(name, ()) if flag in names
    ]
    close = close or difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(f'--{flag}' for flag in close)}?" if close else ""


def _check_value(name: str, word: str, setting: Declared) -> None:
    """Raises UserError if a value cannot be right. Where the type does not tell, the value is left to tyro."""
    kinds = setting.kinds
    if "None" in kinds and word in ("None", "none"):
        return
    if setting.choices and not kinds - {"None"}:
        if word not in setting.choices:
            raise UserError(f"--{name} {word}: {nearest(word, setting.choices)}")
    elif name == "epochs":
        epochs_of(word)
    elif kinds <= {"int", "float", "None"} and kinds & {"int", "float"}:
        number = float if "float" in kinds else int
        try:
            number(word)
        except ValueError:
            what = "a number" if number is float else "a whole number"
            raise UserError(f"--{name} {word}: give {what}{', or None' if 'None' in kinds else ''}.") from None


def epochs_of(text: str) -> int | tuple[int, ...]:
    """Returns the value of --epochs: a number, or the numbers of a list that commas separate."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"--epochs {text}: give a number, or one number for each task, such as --epochs 100,50,50.")
    numbers = tuple(map(int, parts))
    return numbers[0] if len(numbers) == 1 else numbers


def flag_names(known: Iterable[Declared]) -> list[str]:
    """Returns the names of the flags, without dashes."""
    names, switches = [], []
    for setting in known:
        names.append(_flag(setting.key))
        parent, dot, name = names[-1].rpartition(".")
        if setting.kinds == {"bool"}:
            switches.append(f"{parent}{dot}no-{name}")
    return [*_OWN, *names, *switches]


def _flag(key: str) -> str:
    return key.removeprefix("run.").replace("_", "-")


def declared(method: str, strategy: str) -> dict[str, Declared]:
    """Returns every setting by its dotted key, in the order of the configuration.

    Raises one of `UNREADABLE` if a plug-in's source cannot be read, or declares a default that is not a plain value.
    """
    found: dict[str, Declared] = {}
    for item in _fields(_CONFIG, "Config", "", {"method": method, "strategy": strategy}):
        if item.key in found and not item.about:  # a subclass that only changes the default
            item = replace(item, about=found[item.key].about)
        found[item.key] = item
    found.pop("recipe")
    return found


def _fields(module: str, name: str, prefix: str, words: dict[str, str]) -> Iterator[Declared]:
    """Yields the fields of a dataclass, including nested ones."""
    home, found = _class(module, name)
    for base in found.bases:
        yield from _fields(home, ast.unparse(base), prefix, words)
    lines = source_of(home).read_text(encoding="utf-8").splitlines()
    for line in found.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        key, kind = line.target.id, ast.unparse(line.annotation)
        if kind.startswith("ClassVar"):
            continue
        if not prefix and key in _PARTS:
            yield from _fields(*_config_of(_part_module(key, words[key])), f"{key}.", words)
        elif kind.endswith("Config"):
            yield from _fields(home, kind, f"{prefix}{key}.", words)
        else:
            kinds, choices = _kinds(line.annotation, home)
            comment = lines[line.lineno - 1].partition("  # ")[2] if line.lineno == line.end_lineno else ""
            yield Declared(
                key=f"{prefix}{key}",
                kinds=kinds,
                choices=choices,
                default=NOTHING if line.value is None else _constant(line.value, home),
                about=comment,
            )


def _kinds(annotation: ast.expr, module: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Returns the types and the choices of an annotation. Names of types are looked up in the source."""
    if isinstance(annotation, ast.BinOp):
        (left, some), (right, more) = (_kinds(part, module) for part in (annotation.left, annotation.right))
        return left | right, some + more
    text = ast.unparse(annotation)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        values = ast.literal_eval(annotation.slice)
        return frozenset(), tuple(values) if isinstance(values, tuple) else (values,)
    if isinstance(annotation, ast.Name) and text not in _PLAIN:
        home, value = _assigned(module, text)
        return _kinds(value, home)
    return frozenset({text}), ()


def _constant(value: ast.expr, module: str) -> Any:
    """Returns the value of a default: a literal, or a name that stands for one."""
    if isinstance(value, ast.Name):
        home, assigned = _assigned(module, value.id)
        return _constant(assigned, home)
    return ast.literal_eval(value)


def _assigned(module: str, name: str) -> tuple[str, ast.expr]:
    """Returns the module that assigns a name, following imports, and what it assigns."""
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return module, node.value
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return _assigned(node.module, name)
    raise LookupError(f"{module} does not assign {name}")


def _part_module(what: str, name: str) -> str:
    for point in entry_points(group=_GROUPS[what], name=name):
        return point.module
    return f"{_PARTS[what]}.{name}"


def _config_of(module: str) -> tuple[str, str]:
    """Returns the module and the class name of the Config that a method's or strategy's module uses."""
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("METHOD", "STRATEGY"):
            home, found = _class(module, ast.unparse(node.value))
            while True:
                for line in found.body:
                    targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
                    value = getattr(line, "value", None)
                    if value is not None and targets[0] is not None and ast.unparse(targets[0]) == "Config":
                        return home, ast.unparse(value)
                home, found = _class(home, ast.unparse(found.bases[0]))  # inherited from its base
    raise LookupError(f"{module} does not name its Config")


def _class(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """Returns the module that defines a class, following imports, and the class itself."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return _class(node.module, name)
    raise LookupError(f"{module} has no {name}")


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(source_of(module).read_text(encoding="utf-8"))
