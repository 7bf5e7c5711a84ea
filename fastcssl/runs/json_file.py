"""Reads JSON that may be damaged. A value that does not fit its type is an error here, and not later."""

import json
import math
import types
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from fastcssl.runs.ownership import RunFolderError, reason_of

_MAX_DEPTH = 32
_MAX_INT = 1 << 63  # a larger integer is damage, and may not even be a float

SomeRecord = TypeVar("SomeRecord")


class NotAnObjectError(ValueError):
    """JSON text holds a list, a text or a number."""


def parsed_object(content: bytes) -> dict[str, Any]:
    """Returns the object that JSON text holds. Raises ValueError if it holds anything else, or nests too deeply."""
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError(f"it nests deeper than {_MAX_DEPTH} levels") from None
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    if not isinstance(found, dict):
        raise NotAnObjectError(f"it holds {type(found).__name__} instead of an object")
    level: list[Any] = [found]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, dict | list)
        ]
        if not level:
            return found
    raise ValueError(f"it nests deeper than {_MAX_DEPTH} levels")


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises RunFolderError, which ends with the remedy, if there is none."""
    try:
        return parsed_object(path.read_bytes())
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be read ({reason_of(error)}). Check its permissions and the disk."
        ) from None
    except ValueError as error:
        raise RunFolderError(f"{path} cannot be read ({error}). {remedy}") from None


def record_of(kind: type[SomeRecord], values: Mapping[str, Any]) -> SomeRecord:
    """Returns a dataclass with these values. Raises ValueError for a field that is missing, unknown or of another type.

    A field with a default may be missing.
    """
    hints = _hints(cast(Hashable, kind))
    own = {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    for name, entry in own.items():
        if name in values:
            if not fits(hints[name], values[name]):
                raise ValueError(f"{name} is {values[name]!r:.60}")
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise ValueError(f"{name} is missing")
    if unknown := sorted(set(values) - set(own)):
        raise ValueError(f"{unknown[0]} is unknown")
    return kind(**values)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def fits(hint: Any, value: Any) -> bool:
    """Returns whether a value from JSON has a declared type. An integer is a float, but True is not a number."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(part, value) for part in args)
    if origin is Literal:
        return isinstance(value, str | int) and value in args
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, dict) and all(fits(args[1], item) for item in value.values())
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, list) and all(fits(args[0], item) for item in value)
    if hint is Any or hint is None:
        return hint is Any or value is None
    if hint in (int, float):
        is_int = isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_INT
        return is_int or (hint is float and isinstance(value, float))
    return isinstance(value, hint)


def all_finite(values: Sequence[float | None]) -> bool:
    """Returns whether all numbers are finite. A missing one counts as finite."""
    return all(value is None or math.isfinite(value) for value in values)
