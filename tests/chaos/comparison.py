"""Compares what a command left with what the uninterrupted command left. Clocks and process numbers do not count."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CLOCKS = re.compile(
    r"(.*\.)?(seconds|stall_s|images_per_s|data_wait_share|started|updated|pid|born|seconds_left|stages\..*|rates\.[12])"
)
_ROLLING = re.compile(r"checkpoints/step-\d+\.pt")
_MAX_ROLLING = 2
_MAX_NAMED = 3
_PNG_MARK = b"\x89PNG\r\n\x1a\n"


def prepared_differs(reference: Path, made: Path) -> list[str]:
    """Return a sentence for each kind of difference between two prepared folders: every byte counts."""
    return _names(reference, made) + _contents(reference, made, lambda *_: False)


def run_differs(reference: Path, made: Path) -> list[str]:
    """Return a sentence for each kind of difference between two runs, their evaluations and reports.

    A periodic checkpoint that could not be written leaves other rolling checkpoints than an undisturbed run, so only
    their number is bounded.
    """
    rolling = [name for name in _files(made) if _ROLLING.fullmatch(name)]
    broken = _names(reference, made, but=_ROLLING)
    if len(rolling) > _MAX_ROLLING:
        broken.append(f"{len(rolling)} rolling checkpoints are left: {_few(rolling)}")
    homes = (str(reference.parent), str(made.parent))
    return broken + _contents(reference, made, lambda a, b: _same_meaning(a, b, homes))


def _files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def _names(reference: Path, made: Path, but: re.Pattern[str] | None = None) -> list[str]:
    expected, found = (
        {name for name in _files(root) if but is None or not but.fullmatch(name)} for root in (reference, made)
    )
    broken = []
    if missing := sorted(expected - found):
        broken.append(f"files are missing: {_few(missing)}")
    if extra := sorted(found - expected):
        broken.append(f"files are left over: {_few(extra)}")
    return broken


def _contents(reference: Path, made: Path, is_same: Any) -> list[str]:
    differing = []
    for name in _files(reference):
        a, b = reference / name, made / name
        if b.is_file() and a.read_bytes() != b.read_bytes() and (why := is_same(a, b)) is not True:
            differing.append(f"{name} ({why})" if why else name)
    return [f"files differ from the uninterrupted ones: {_few(differing)}"] if differing else []


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _same_meaning(a: Path, b: Path, homes: tuple[str, str]) -> bool | str:
    """Return True if two files mean the same, or the first places at which they do not."""
    if a.suffix not in (".pt", ".json", ".jsonl", ".html", ".png"):
        return False
    if a.suffix == ".png":
        return a.read_bytes()[:8] == b.read_bytes()[:8] == _PNG_MARK or "is not a picture"
    if a.suffix == ".html":  # shows times
        return b.read_text().rstrip().endswith("</html>") or "does not end"
    try:
        if a.suffix == ".pt":
            first, second = _checkpoint(a), _checkpoint(b)
        elif a.suffix == ".json":
            first, second = (
                json.loads(path.read_text().replace(home, "")) for path, home in zip((a, b), homes, strict=True)
            )
        else:
            first, second = _reports(a), _reports(b)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    found = [path for path in _differing(first, second, "") if not _CLOCKS.fullmatch(path)]
    return f"at {_few(found)}" if found else True


def _reports(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics without events, such as that of a resume."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in found if line["kind"] != "event"]


def _checkpoint(path: Path) -> Any:
    from fastcssl.runs.checkpoint import load

    return load(path)


def _differing(a: Any, b: Any, path: str) -> Iterator[str]:
    import torch

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        # A tensor of one element may have any stride, which only a copy removes.
        first, second = (x.clone(memory_format=torch.contiguous_format).reshape(-1) for x in (a, b))
        if a.dtype != b.dtype or not torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
            yield path
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}, key=str):
            inner = f"{path}.{key}" if path else str(key)
            if key in a and key in b:
                yield from _differing(a[key], b[key], inner)
            else:
                yield inner
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differing(x, y, f"{path}.{index}" if path else str(index))
    elif a != b and not (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)):
        yield path
