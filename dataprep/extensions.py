"""Finds what other packages add by entry points. Looking up names imports nothing."""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dataprep.errors import UserError


def extension_names(group: str) -> tuple[str, ...]:
    """Returns the names that other packages add to a group, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))


def load_extension(what: str, name: str, group: str) -> Any:
    """Returns the object that an entry point names. `what` is the kind of thing, for messages."""
    point: EntryPoint = next(iter(entry_points(group=group, name=name)))
    try:
        return point.load()
    except Exception as error:  # someone else's code
        raise UserError(
            f"The {what} {name!r} ({point.value}) cannot be loaded: {error}. Repair or uninstall its package."
        ) from error
