"""Reads the names of fastcssl-train's flags from source text.

A misspelt flag is reported immediately, because torch need not be imported first.
"""

import ast
import difflib
import os
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from fastcssl.errors import UserError

_OWN = ("data", "out", "resume", "from", "seeds", "dry-run")  # flags that are not part of the configuration
_CONFIG = "fastcssl.config.config"
_PARTS = {"method": "fastcssl.learn.methods", "strategy": "fastcssl.learn.strategies"}
_GROUPS = {"method": "fastcssl.methods", "strategy": "fastcssl.strategies"}


def source_of(module: str) -> Path:
    """Returns a module's file without importing anything, as its parent packages would import torch."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    if spec is None or spec.origin is None:
        return Path(os.devnull)
    path = Path(spec.origin).parent.joinpath(*rest)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py") if rest else Path(spec.origin)


def check_flags(words: Sequence[str], args: Sequence[str]) -> None:
    """Raises a UserError for a flag that does not exist for these three words."""
    known = flag_names(words[1], words[2])
    for arg in args:
        name = arg.partition("=")[0].removeprefix("--").replace("_", "-")
        if known and arg.startswith("--") and name not in known:
            close = [f"--{flag}" for flag in difflib.get_close_matches(name, known, n=3, cutoff=0.5)]
            meant = f" Did you mean {' or '.join(close)}?" if close else ""
            raise UserError(
                f"There is no flag --{name}.{meant} fastcssl-train {' '.join(words)} --help lists them all."
            )


def flag_names(method: str, strategy: str) -> list[str]:
    """Returns the flags' names without dashes, or [] if they cannot be read from a plug-in's source."""
    try:
        keys = dict(_fields(_CONFIG, "Config", "", {"method": method, "strategy": strategy}))
    except (LookupError, OSError, SyntaxError):
        return []
    names = [key.removeprefix("run.").replace("_", "-") for key in keys if key != "recipe"]
    switches = [key.removeprefix("run.").replace("_", "-") for key, kind in keys.items() if kind == "bool"]
    negated = [f"{parent}{dot}no-{name}" for parent, dot, name in (key.rpartition(".") for key in switches)]
    return [*_OWN, *names, *negated]


def _fields(module: str, name: str, prefix: str, words: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the dotted key and the annotation of every field of a dataclass, including nested ones."""
    home, found = _class(module, name)
    for base in found.bases:
        yield from _fields(home, ast.unparse(base), prefix, words)
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
            yield f"{prefix}{key}", kind


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
