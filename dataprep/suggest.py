"""Suggests the known word that is closest to a misspelt one."""

import difflib
from collections.abc import Iterable

_MAX_LISTED = 60  # a data set may have thousands of classes


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns the end of an error message, such as "Did you mean 'x'? Known: x, y."."""
    known = tuple(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    rest = f" and {len(known) - _MAX_LISTED:,} more" if len(known) > _MAX_LISTED else ""
    return f"{f'Did you mean {close[0]!r}? ' if close else ''}Known: {', '.join(known[:_MAX_LISTED])}{rest}."
