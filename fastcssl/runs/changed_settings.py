"""Compares the settings of a checkpoint with those of the run that resumes from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastcssl.runs.checkpoint import CheckpointError


def differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], implied: Mapping[str, Any] | None = None
) -> list[str]:
    """Returns one line for each dotted key whose value differs. A list equals a tuple of the same items.

    `implied`: by dotted key, the value that a checkpoint without that key implies. A setting that is newer than the
    checkpoint does not count as a difference while it has that value.
    """
    before, now = _flat(saved), _flat(current)
    before = {key: value for key, value in (implied or {}).items() if key in now} | before
    lines = []
    for key in [*before, *(key for key in now if key not in before)]:
        if key not in now:
            lines.append(f"{key}: {before[key]!r} in the checkpoint, not set now")
        elif key not in before:
            lines.append(f"{key}: not in the checkpoint, {now[key]!r} now")
        elif not _same(before[key], now[key]):
            lines.append(f"{key}: {before[key]!r} in the checkpoint, {now[key]!r} now")
    return lines


def refuse_changed(
    saved: Mapping[str, Any], current: Mapping[str, Any], path: Path, implied: Mapping[str, Any] | None = None
) -> None:
    """Raises CheckpointError when a setting differs. Both mappings should omit settings that do not affect training."""
    if lines := differences(saved, current, implied):
        raise CheckpointError(
            f"The configuration differs from that of {path}. {'; '.join(lines)}. "
            "Use the same values, or another --out, or --resume never to start over."
        )


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Returns the leaves by dotted key. A list is a leaf unless it holds dicts."""
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {path: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= _flat(item, f"{path}.{key}" if path else key)
    return flat


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, bool) is not isinstance(b, bool):
        return False  # True == 1
    return bool(a == b) or (a != a and b != b)  # the last: both NaN
