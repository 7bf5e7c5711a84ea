"""Which word was meant."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """ "Did you mean 'x'? Known: x, y." for the end of an error."""
    known = tuple(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"{f'Did you mean {close[0]!r}? ' if close else ''}Known: {', '.join(known)}."
