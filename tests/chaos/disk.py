"""Reconstructs what a disk may hold after a power loss, from a record of what a program did to its files.

A file's content is safe once the file is synced, and a name once the folder that holds it is synced, which also makes
the folder itself safe. Everything later may be lost: content entirely or in part, and names.
"""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePosixPath

_SECTOR = 512


@dataclass(frozen=True)
class Event:
    """One line of the record. `content` is the file that holds a copy of what the event's file then held."""

    what: str
    inode: int
    size: int
    path: str
    second: str
    content: Path | None


@dataclass
class Thing:
    """A file or a folder."""

    is_folder: bool
    size: int = 0
    safe: bytes | None = None  # its content when it was last synced; None: never
    seen: bytes | None = None  # its content at the last event, if that was recorded
    is_dirty: bool = False


@dataclass(frozen=True)
class Change:
    """A change of names: `path` stops to exist if `removes`, and `second`, or `path`, becomes `thing`."""

    what: str
    path: str
    second: str
    thing: Thing


@dataclass
class Moment:
    """The disk after some events: the names that are safe, the changes since, and the things that are dirty."""

    names: dict[str, Thing] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)
    live: dict[str, Thing] = field(default_factory=dict)
    written: dict[int, bytes] = field(default_factory=dict)  # by id of a dirty thing: its content for the program


def read_record(folder: Path, root: Path) -> list[Event]:
    """Returns the events of a record, with paths relative to the folder that was watched."""
    events = []
    at = 0
    for line in (folder / "log").read_bytes().splitlines(keepends=True):
        what, inode, size, *paths = line.decode().rstrip("\n").split("\t")
        path, second = (os.path.relpath(os.path.normpath(each), root) if each else "" for each in paths)
        content = folder / str(at)
        at += len(line)
        events.append(Event(what, int(inode), int(size), path, second, content if content.is_file() else None))
    return events


def _parent(path: str) -> str:
    return str(PurePosixPath(path).parent)


def _ancestors(path: str) -> list[str]:
    """Returns the folders above a path and itself, outermost first, without the root."""
    pure = PurePosixPath(path)
    return [str(each) for each in (*reversed(pure.parents), pure) if str(each) != "."]


def after(events: list[Event], count: int) -> Moment:
    """Returns the disk after the first `count` events."""
    moment = Moment()
    for event in events[:count]:
        _follow(moment, event)
    for path, thing in moment.live.items():
        if thing.is_dirty:
            written = _next_content(events[count:], path)[: thing.size] if thing.seen is None else thing.seen
            moment.written[id(thing)] = written
    return moment


def _follow(moment: Moment, event: Event) -> None:
    live = moment.live
    if event.what in ("create", "mkdir"):
        thing = Thing(is_folder=event.what == "mkdir", is_dirty=False)
        live[event.path] = thing
        moment.pending.append(Change(event.what, event.path, "", thing))
    elif event.what in ("rename", "link"):
        thing = live[event.path]
        below = [path for path in live if path.startswith(event.path + "/")]
        moment.pending.append(Change(event.what, event.path, event.second, thing))
        live[event.second] = thing
        if event.what == "rename":
            for path in below:
                live[event.second + path.removeprefix(event.path)] = live.pop(path)
            del live[event.path]
    elif event.what == "remove":
        moment.pending.append(Change("remove", event.path, "", live.pop(event.path)))
    elif event.what == "dirty":
        _write(live.get(event.path), event)
    elif event.what == "sync":
        _sync(moment, event)


def _write(thing: Thing | None, event: Event) -> None:
    if thing is None:  # a file that was removed while it was open
        return
    thing.seen = None if event.content is None else event.content.read_bytes()
    # Closing a file that was synced changes nothing.
    thing.size, thing.is_dirty = event.size, thing.seen is None or thing.seen != thing.safe


def _sync(moment: Moment, event: Event) -> None:
    thing = moment.live.get(event.path)
    if event.path != "." and thing is None:
        return
    if thing is not None and not thing.is_folder:
        thing.safe = event.content.read_bytes() if event.content is not None else b""
        thing.size, thing.is_dirty = len(thing.safe), False
        return
    safe_folders = set(_ancestors(event.path))
    kept = []
    for change in moment.pending:
        target = change.second or change.path
        is_safe = _parent(target) == event.path or (change.what == "mkdir" and target in safe_folders)
        if is_safe:
            apply(moment.names, change, always=True)
        else:
            kept.append(change)
    moment.pending[:] = kept


def apply(names: dict[str, Thing], change: Change, *, always: bool = False) -> bool:
    """Applies a change of names and returns whether it was possible: a lost folder takes what is in it with it."""
    target = change.second or change.path
    if change.what == "remove":
        is_empty = not any(path.startswith(change.path + "/") for path in names)
        if names.get(change.path) is not change.thing or not is_empty:
            return False
        del names[change.path]
        return True
    parent = _parent(target)
    if not always and parent != "." and parent not in names:
        return False
    if change.what in ("rename", "link") and names.get(change.path) is not change.thing and not always:
        return False
    names[target] = change.thing
    if change.what == "rename":
        for path in [path for path in names if path.startswith(change.path + "/")]:
            names[target + path.removeprefix(change.path)] = names.pop(path)
        if names.get(change.path) is change.thing:
            del names[change.path]
    return True


def _next_content(events: list[Event], path: str) -> bytes:
    """Returns the next recorded content of a file that is at `path` before these events."""
    for event in events:
        if path not in (event.path, event.second):
            continue
        if event.content is not None and event.what in ("sync", "dirty", "rename", "link"):
            return event.content.read_bytes()
        if event.what == "rename" and event.path == path:
            path = event.second
        if event.what == "remove":
            break
    return b""


# ---- What may be left ------------------------------------------------------------------------------------------------

Content = Callable[[Thing, bytes, random.Random], bytes]


def _only_safe(thing: Thing, _: bytes, __: random.Random) -> bytes:
    return thing.safe or b""


def _begin(thing: Thing, written: bytes) -> int:
    """Returns how many bytes of a file are safe: those before which nothing was written since."""
    safe = thing.safe or b""
    return len(safe) if written.startswith(safe) else 0


def _nothing(thing: Thing, written: bytes, _: random.Random) -> bytes:
    return written[: _begin(thing, written)]


def _zeros(thing: Thing, written: bytes, _: random.Random) -> bytes:
    begin = _begin(thing, written)
    return written[:begin] + bytes(len(written) - begin)


def _half(thing: Thing, written: bytes, rng: random.Random) -> bytes:
    return written[: rng.randint(_begin(thing, written), len(written))]


def _sectors(thing: Thing, written: bytes, rng: random.Random) -> bytes:
    """Returns the content with some of its sectors lost."""
    begin = _begin(thing, written)
    ends = [*range((begin // _SECTOR + 1) * _SECTOR, len(written), _SECTOR), len(written)]
    parts = [written[a:b] for a, b in pairwise([begin, *ends])]
    return written[:begin] + b"".join(part if rng.random() < 0.5 else bytes(len(part)) for part in parts)


def _whole(_: Thing, written: bytes, __: random.Random) -> bytes:
    return written


def _mixed(thing: Thing, written: bytes, rng: random.Random) -> bytes:
    return rng.choice((_only_safe, _nothing, _zeros, _half, _sectors, _whole))(thing, written, rng)


@dataclass(frozen=True)
class Loss:
    """What a power loss leaves of the changes since the last sync: which names, and which content of dirty files."""

    names: str  # "none", "all", "first": some, from the first on; "any": any of them
    content: Content


LOSSES: dict[str, Loss] = {
    "nothing but what was synced": Loss("none", _only_safe),
    "all names, dirty files empty": Loss("all", _nothing),
    "all names, dirty files of zeros": Loss("all", _zeros),
    "the first names, dirty files cut": Loss("first", _half),
    "any names, any content": Loss("any", _mixed),
}


def write_state(moment: Moment, loss: Loss, target: Path, rng: random.Random) -> None:
    """Writes what a power loss leaves into the empty folder `target`."""
    names = dict(moment.names)
    first = rng.randint(0, len(moment.pending))
    for number, change in enumerate(moment.pending):
        kept = {"none": False, "all": True, "first": number < first, "any": rng.random() < 0.5}[loss.names]
        if kept:
            apply(names, change)
    for path, thing in sorted(names.items()):
        if thing.is_folder:
            (target / path).mkdir(parents=True, exist_ok=True)
    for path, content in _contents(moment, names, loss, rng):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(content)


def _contents(moment: Moment, names: dict[str, Thing], loss: Loss, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    for path, thing in sorted(names.items()):
        if thing.is_folder:
            continue
        if not thing.is_dirty:
            yield path, thing.safe or b""
            continue
        written = moment.written.get(id(thing), b"")
        yield path, loss.content(thing, written, rng)


def interesting(events: list[Event]) -> Iterator[tuple[int, bool]]:
    """Yields the numbers of events after which a power loss leaves something new, and whether anything is unsynced.

    Of a run of writes only the last counts: the ones before leave the same, except for the sizes.
    """
    moment = Moment()
    for count, event in enumerate(events, 1):
        _follow(moment, event)
        following = events[count].what if count < len(events) else ""
        if event.what != "dirty" or following != "dirty":
            yield count, bool(moment.pending) or any(thing.is_dirty for thing in moment.live.values())
