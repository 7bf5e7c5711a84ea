"""Draws mutated manifests with hypothesis. Each strategy takes a valid manifest's content and draws a file."""

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Content = dict[str, Any]
Draw = Callable[[SearchStrategy[Any]], Any]
Place = tuple[str | int, ...]

_VALUES: tuple[Any, ...] = (None, True, False, 0, -1, 1.5, "", "x", [], {}, [[]], {"x": 0}, [None])
_NUMBERS = (
    -1,
    -(2**31),
    2**31,
    2**32,
    2**40,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    1e308,
    float("inf"),
    float("nan"),
)
_STRINGS = (
    "\0",
    "a\0b",
    "..",
    "../manifest.json",
    "/etc/passwd",
    "a\\..\\b",
    ".",
    "",
    "task-00",
    "manifest.json",
    "tar",
    "array",
    "ffcv",
    "none-such",
    "\ud800",
    "\u0663",
    "x" * 300,
    "x/" * 3000,
    "y" * 1_000_000,
    "[bold]",
    "\x1b[2J",
)
_IDS = (
    "0-99999999999",
    "0-9223372036854775807",
    "0-18446744073709551616",
    "5-4",
    "0,0",
    "3-1,2",
    "-1",
    "0-",
    ",,,",
    "\u0663",
    "\u00b2",
    "1e3",
    " 0",
    "9" * 5000,
    ",".join(map(str, range(0, 400_000, 2))),
)


def _places(value: Any, place: Place = ()) -> list[Place]:
    """Returns the place of every value in a tree of JSON."""
    found = [place] if place else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += _places(item, (*place, key))
    return found


def _at(content: Any, place: Place) -> Any:
    for key in place:
        content = content[key]
    return content


def _put(content: Content, place: Place, value: Any) -> None:
    _at(content, place[:-1])[place[-1]] = value


def _text(content: Any) -> bytes:
    return json.dumps(content).encode()


def _pick(draw: Draw, content: Content, wanted: Callable[[Any], bool]) -> Place:
    """Draws a place, first the top-level key and then below it, so that a long list does not get most of the draws."""
    places = [place for place in _places(content) if wanted(_at(content, place))]
    top = draw(st.sampled_from(sorted({str(place[0]) for place in places})))
    return draw(st.sampled_from([place for place in places if str(place[0]) == top]))


def _mutation(change: Callable[[Draw, Content], bytes]) -> Callable[[Content], SearchStrategy[bytes]]:
    """Returns a strategy from a function that changes a copy of the content."""

    def strategy(content: Content) -> SearchStrategy[bytes]:
        @st.composite
        def drawn(draw: Draw) -> bytes:
            return change(draw, copy.deepcopy(content))

        return drawn()

    return strategy


@_mutation
def _another_type(draw: Draw, content: Content) -> bytes:
    _put(content, _pick(draw, content, lambda _: True), draw(st.sampled_from(_VALUES)))
    return _text(content)


@_mutation
def _number(draw: Draw, content: Content) -> bytes:
    place = _pick(draw, content, lambda value: type(value) is int)
    old = _at(content, place)
    _put(content, place, draw(st.sampled_from((*_NUMBERS, old - 1, old + 1, 2 * old, 0))))
    return _text(content)


@_mutation
def _string(draw: Draw, content: Content) -> bytes:
    place = _pick(draw, content, lambda value: isinstance(value, str))
    _put(content, place, draw(st.one_of(st.sampled_from(_STRINGS), st.text(max_size=20))))
    return _text(content)


@_mutation
def _nesting(draw: Draw, content: Content) -> bytes:
    place, depth = _pick(draw, content, lambda _: True), draw(st.sampled_from((50, 900, 5000, 200_000)))
    begin, end = draw(st.sampled_from((("[", "]"), ('{"a":', "}"))))
    _put(content, place, "NESTED")
    return _text(content).replace(b'"NESTED"', (begin * depth + "0" + end * depth).encode())


@_mutation
def _keys(draw: Draw, content: Content) -> bytes:
    place = _pick(draw, content, lambda value: isinstance(value, dict) and bool(value))
    parent = _at(content, place)
    key = draw(st.sampled_from(sorted(parent)))
    how = draw(st.sampled_from(("missing", "unknown", "twice", "renamed")))
    if how == "missing":
        del parent[key]
    elif how == "unknown":
        parent[draw(st.sampled_from(("", "\0", "__class__", "x" * 10_000)))] = 0
    elif how == "renamed":
        parent[key.upper()] = parent.pop(key)
    else:
        parent["TWICE"] = draw(st.sampled_from(_VALUES))
        return _text(content).replace(b'"TWICE"', json.dumps(key).encode())
    return _text(content)


@_mutation
def _list(draw: Draw, content: Content) -> bytes:
    place = _pick(draw, content, lambda value: isinstance(value, list))
    items = _at(content, place)
    how = draw(st.sampled_from(("empty", "shorter", "repeated", "reversed", "many")))
    changed = {"empty": [], "shorter": items[:-1], "repeated": items + items[:1], "reversed": items[::-1]}
    _put(content, place, changed.get(how, items * (2000 // max(1, len(items)))))
    return _text(content)


@_mutation
def _ids(draw: Draw, content: Content) -> bytes:
    """Changes the ids of a split, often together with its count, so that the two agree."""
    task = content["tasks"][draw(st.integers(0, len(content["tasks"]) - 1))]
    part = task[draw(st.sampled_from(("train", "val")))]
    part["ids"] = draw(st.sampled_from(_IDS))
    first, _, last = part["ids"].partition("-")
    if draw(st.booleans()) and first.isdigit() and last.isdigit() and len(part["ids"]) < 100:
        part["count"] = int(last) - int(first) + 1
    elif "," in part["ids"]:
        part["count"] = part["ids"].count(",") + 1
    return _text(content)


@_mutation
def _labels(draw: Draw, content: Content) -> bytes:
    """Makes the lists of classes, domains, shards and tasks disagree with each other and with the table."""
    task = content["tasks"][draw(st.integers(0, len(content["tasks"]) - 1))]
    shards = content["shards"]
    how = draw(st.integers(0, 6))
    if how == 0:
        task["classes"] = draw(st.lists(st.sampled_from((0, 1, -1, 999, 2**40)), max_size=4))
    elif how == 1:
        content["classes"] = content["classes"][: draw(st.integers(0, 1))]
    elif how == 2:
        shards[0]["path"] = shards[-1]["path"]
    elif how == 3:
        content["shards"] = []
    elif how == 4:
        content["tasks"], content["scenario"]["num_tasks"] = [], 0
    elif how == 5:
        content["formats"] = draw(st.sampled_from((["tar"], ["array"], ["tar", "tar"], ["none-such"], [""])))
    else:
        part = task[draw(st.sampled_from(("train", "val")))]
        part["shards"] = {draw(st.sampled_from(("tar", "array", "ffcv", "x"))): draw(st.lists(st.integers(-1, 9)))}
    return _text(content)


@_mutation
def _damaged(draw: Draw, content: Content) -> bytes:
    text = bytearray(_text(content))
    how = draw(st.sampled_from(("cut", "flipped", "noise", "prefix", "utf-16", "zeros", "constant")))
    at = draw(st.integers(0, len(text) - 1))
    if how == "cut":
        del text[at:]
    elif how == "flipped":
        text[at] ^= 1 << draw(st.integers(0, 7))
    elif how == "noise":
        text[at : at + 8] = draw(st.binary(min_size=8, max_size=8))
    elif how == "prefix":
        text[:0] = draw(st.sampled_from((b"\xef\xbb\xbf", b"\0", b"[", b"// x\n")))
    elif how == "utf-16":
        return bytes(text).decode().encode("utf-16")
    elif how == "zeros":
        return bytes(len(text))
    else:
        return draw(st.sampled_from((b"", b"null", b"[]", b"{}", b'"x"', b"1" * 10_000, b'{"schema": 1}')))
    return bytes(text)


MUTATIONS: dict[str, Callable[[Content], SearchStrategy[bytes]]] = {
    "a value of another type": _another_type,
    "an extreme number": _number,
    "a hostile string": _string,
    "deep nesting": _nesting,
    "a missing, unknown or repeated key": _keys,
    "a list of another length or order": _list,
    "hostile id ranges": _ids,
    "lists that disagree": _labels,
    "damaged bytes": _damaged,
}
