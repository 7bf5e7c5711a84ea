"""Writes and reads sorted sample ids as text, such as "0-499,612"."""

from collections.abc import Iterable, Iterator

_MAX_DIGITS = 18  # every such number fits into 64 bits


def format_ids(sorted_ids: Iterable[int]) -> str:
    """Returns sorted ids as ranges, such as "0-499,612"."""
    ranges: list[list[int]] = []
    for i in sorted_ids:
        if ranges and ranges[-1][1] == i - 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def parse_ids(text: str) -> Iterator[int]:
    """Yields the ids of a text that `format_ids` wrote."""
    for first, last in parse_ranges(text):
        yield from range(first, last + 1)


def count_ids(text: str) -> int:
    """Returns the number of ids, without making them. Raises ValueError if the text is not a list of rising ranges."""
    return sum(last - first + 1 for first, last in parse_ranges(text))


def parse_ranges(text: str) -> Iterator[tuple[int, int]]:
    """Yields the first and last id of each range. Raises ValueError if one is malformed or out of order."""
    previous = -1
    for item in filter(None, text.split(",")):
        begin, _, end = item.partition("-")
        if not _is_id(begin) or (end and not _is_id(end)):
            raise ValueError(f"'{item[:40]}' is not a range of ids")
        first, last = int(begin), int(end or begin)
        if first <= previous or last < first:
            raise ValueError(f"'{item[:40]}' is out of order")
        previous = last
        yield first, last


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
