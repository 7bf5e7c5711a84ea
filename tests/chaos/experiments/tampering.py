"""Alters files between two commands: prepared data, and everything in the folder of a run.

The next command must say what is wrong, or give the correct result. Pixels and weights that a command reads without a
checksum are the exception: for them `verify` must notice, and no command may crash.
"""

import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from chaos.comparison import run_differs
from chaos.experiment import Fault, Outcome
from chaos.invariants import FINISHED, MISTAKE, ends_well
from chaos.laboratory import Laboratory, chance_of
from chaos.subjects import EVALUATION, OUT, PREPARATIONS, REPORT, STOPPED, TRAININGS, Bench, Subject

_CHECK_FAILED = 1
_NAME = re.compile(r"(.+): (.+) of (\S+), number \d+")
_MAX_FLIPS = 3


def _flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, _MAX_FLIPS)):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _truncate(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(1, len(content))])


def _empty(path: Path, _: random.Random) -> None:
    path.write_bytes(b"")


def _delete(path: Path, _: random.Random) -> None:
    path.unlink()


def _extend(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randint(1, 600)))


def _zero(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    begin = chance.randrange(len(content))
    end = min(len(content), begin + 4096)
    content[begin:end] = bytes(end - begin)
    path.write_bytes(content)


def _swap(path: Path, chance: random.Random) -> None:
    """Exchange a file with another one of its type, or put another file in its place."""
    root = next(parent for parent in path.parents if parent.name == OUT)
    others = sorted(one for one in root.rglob("*") if one.is_file() and one != path)
    kin = [one for one in others if one.suffix == path.suffix] or others
    other = chance.choice(kin)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def _folder(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


_WAYS: dict[str, Callable[[Path, random.Random], None]] = {
    "flipped bits": _flip,
    "a cut": _truncate,
    "an emptying": _empty,
    "a loss": _delete,
    "an extension": _extend,
    "zeros": _zero,
    "a swap": _swap,
    "a folder in place": _folder,
}


@dataclass(frozen=True)
class _Target:
    """A folder to alter, which of its files, and the commands that must cope."""

    name: str
    made_by: Subject
    files: tuple[str, ...]
    unchecked: tuple[str, ...] = ()  # files whose content only `verify` compares with a checksum, if anything does

    @property
    def is_data(self) -> bool:
        return self.made_by in PREPARATIONS


_DATA_FILES = ("manifest.json", "samples.npy", "keys.txt", "*.npy", "*.tar", "*.idx", "*.beton")
_SHARDS = ("task-*.npy", "*.tar", "*.beton")
_TARGETS = (
    *(_Target(f"data {one.name.split()[1]}", one, _DATA_FILES, _SHARDS) for one in PREPARATIONS),
    _Target(
        "stopped run",
        STOPPED,
        ("checkpoints/*.pt", "config.json", "status.json", "metrics.jsonl", "encoders/*"),
        ("metrics.jsonl", "encoders/*"),
    ),
    _Target(
        "evaluated run",
        EVALUATION,
        ("evaluations/*.json", "config.json", "status.json", "metrics.jsonl", "encoders/*"),
        ("metrics.jsonl", "encoders/*", "config.json", "evaluations/*"),
    ),
)
_BY_NAME = {target.name: target for target in _TARGETS}


class Tampering(Laboratory):
    name = "tampering"

    def faults(self, seed: int) -> Iterator[Fault]:
        """Yield faults without end: every file of every target in turn, each time in another way."""
        quick = ("flipped bits of samples.npy", "a cut of manifest.json", "a swap of task-00/train-00000.npy")
        for number, what in enumerate(quick):
            yield _fault("data array", what, number, is_quick=True)
        yield _fault("stopped run", "flipped bits of checkpoints/task-0.pt", 3, is_quick=True)
        yield _fault("stopped run", "an emptying of status.json", 4, is_quick=True)
        yield _fault("evaluated run", "a cut of encoders/task1.safetensors", 5, is_quick=True)
        if not self.is_prepared:
            return
        chance = random.Random(seed)
        places = [(target, name) for target in _TARGETS for name in self._files(target)]
        ways = {place: chance.sample(list(_WAYS), len(_WAYS)) for place in places}
        number = 6
        while True:
            for target, name in chance.sample(places, len(places)):
                ways[target, name].append(way := ways[target, name].pop(0))
                yield _fault(target.name, f"{way} of {name}", number)
                number += 1

    def _files(self, target: _Target) -> list[str]:
        root = self.bench().reference(target.made_by).out
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
        return [name for name in names if any(fnmatch(name, pattern) for pattern in target.files)]

    def inject(self, fault: Fault, folder: Path, scratch: Path) -> Outcome:
        bench = self.bench(folder)
        match = _NAME.fullmatch(fault.name)
        assert match is not None, fault.name
        target, name = _BY_NAME[match[1]], match[3]
        shutil.copytree(bench.reference(target.made_by).out, scratch / OUT)
        before = _content(scratch / OUT)
        _WAYS[match[2]](scratch / OUT / name, chance_of(fault.name))
        if _content(scratch / OUT) == before:
            return Outcome((), "the file is the same as before", injected=False)
        is_unchecked = any(fnmatch(name, pattern) for pattern in target.unchecked)
        check = _check_data if target.is_data else _check_run
        broken, seen = check(bench, target, scratch, is_unchecked)
        return Outcome(tuple(broken), "; ".join(seen))


def _fault(target: str, what: str, number: int, *, is_quick: bool = False) -> Fault:
    way = what.partition(" of ")[0]
    kind = "run" if "run" in target else "data"
    return Fault(f"{kind}: {way}", f"{target}: {what}, number {number}", is_quick)


def _content(root: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


def _check_data(bench: Bench, target: _Target, scratch: Path, is_unchecked: bool) -> tuple[list[str], list[str]]:
    """Verify, inspect and train on altered data."""
    logs = scratch / "logs"
    verify = bench.server.run(["fastcssl-prep", "verify", OUT], scratch, logs=logs)
    broken = ends_well(verify, (_CHECK_FAILED, MISTAKE))
    inspect = bench.server.run(["fastcssl-prep", "inspect", OUT], scratch, logs=logs)
    broken += ends_well(inspect, (FINISHED, MISTAKE))
    home = scratch / "training"
    home.mkdir()
    subject = TRAININGS[0]
    words = [word.replace(str(bench.folder / "data"), str(scratch / OUT)) for word in bench.words(subject)]
    train = bench.server.run(words, home, logs=logs)
    broken += ends_well(train, (FINISHED, MISTAKE), bench.reference(subject))
    if train.status == FINISHED and not is_unchecked and target.made_by is PREPARATIONS[0]:
        broken += _same_losses(bench.reference(subject).out, home / OUT)
    return broken, [f"{one.words[1][:7]} {one.status} ({one.last_line[:100]})" for one in (verify, inspect, train)]


def _same_losses(reference: Path, made: Path) -> list[str]:
    """Compare the encoders of two trainings. Their configurations name the folders of the data."""
    names = sorted(path.name for path in (reference / "encoders").iterdir())
    differing = [
        name
        for name in names
        if (reference / "encoders" / name).read_bytes() != (made / "encoders" / name).read_bytes()
    ]
    return [f"training on altered data gave other weights without a word: {', '.join(differing)}"] if differing else []


def _check_run(bench: Bench, target: _Target, scratch: Path, is_unchecked: bool) -> tuple[list[str], list[str]]:
    """Continue an altered run, and let the commands that read runs look at it first."""
    logs = scratch / "logs"
    looked = [
        bench.server.run(words, scratch, logs=logs)
        for words in (("fastcssl-train", "status", OUT), REPORT.words, EVALUATION.words)
    ]
    broken = [sentence for ended in looked for sentence in ends_well(ended, (FINISHED, MISTAKE))]
    for name in ("report", *(() if target.made_by is EVALUATION else ("evaluations",))):
        shutil.rmtree(scratch / OUT / name, ignore_errors=True)
    subject = TRAININGS[0]
    train = bench.server.run(bench.words(subject), scratch, logs=logs)
    broken += ends_well(train, (FINISHED, MISTAKE), bench.reference(subject))
    if train.status == FINISHED and not is_unchecked and target.made_by is STOPPED:
        broken += run_differs(bench.reference(subject).out, scratch / OUT)
    return broken, [f"{one.words[0][9:]} {one.status} ({one.last_line[:80]})" for one in (*looked, train)]


EXPERIMENT = Tampering()
