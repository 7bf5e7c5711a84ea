"""Makes the n-th call that changes or opens a file below a folder fail, in this process.

Calls are counted in Python: opening, writing and closing of files (through `io.open`), and os.open, fsync, replace,
rename, mkdir and unlink. Every call is a point, so a test can count them first and then fail each in turn.
"""

import builtins
import io
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(slots=True)
class Faults:
    """Counts the calls below `folder`, by call and file. The call `fail_at` fails, and with `lasting` all later ones.

    Several writes to a file count as one call if nothing else happens to that file between them. Calls of two threads
    may come in any order, so a call is known by its name and its number among those of that name.
    """

    folder: Path
    fail_at: str = ""
    error: int = 28
    lasting: bool = False
    seen: list[str] = field(default_factory=list)
    has_failed: bool = False
    _last: dict[str, str] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def reach(self, call: str, path: object) -> None:
        text = str(os.fspath(path)) if isinstance(path, str | os.PathLike) else ""
        if not text.startswith(str(self.folder)):
            return
        name = re.sub(r"\.\d+\.partial$", ".partial", os.path.relpath(text, self.folder))
        with self._lock:
            repeated = call == "write" and self._last.get(name) == call
            self._last[name] = call
            if not repeated:
                label = f"{call} {name}"
                self._counts[label] = self._counts.get(label, 0) + 1
                self.seen.append(f"{label} {self._counts[label]}")
                self.has_failed = self.has_failed or self.seen[-1] == self.fail_at
                fails = self.seen[-1] == self.fail_at or (self.lasting and self.has_failed)
            else:
                fails = self.lasting and self.has_failed
        if fails:
            raise OSError(self.error, os.strerror(self.error), text)


@contextmanager
def injected(faults: Faults) -> Iterator[Faults]:
    """Counts and fails calls inside a `with` block."""
    real_open = io.open

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            faults.reach("write", self.name)
            return super().write(data) or 0

        def close(self) -> None:
            was_open = not self.closed
            super().close()
            if was_open:
                faults.reach("close", self.name)

    def opened(path: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        faults.reach("open", path)
        below = isinstance(path, str | os.PathLike) and str(os.fspath(path)).startswith(str(faults.folder))
        if not below or not set(mode) & set("wax"):
            return real_open(path, mode, *args, **more)
        raw = Raw(os.fspath(path), mode.replace("b", "").replace("t", ""))
        file = io.BufferedWriter(raw)
        return file if "b" in mode else io.TextIOWrapper(file, encoding=more.get("encoding") or "utf-8")

    def counted(name: str) -> Any:
        real = getattr(os, name)

        def call(path: Any, *args: Any, **more: Any) -> Any:
            named = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
            faults.reach(name, named)
            return real(path, *args, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        for name in ("open", "fsync", "replace", "rename", "mkdir", "unlink"):
            patch.setattr(os, name, counted(name))
        yield faults
