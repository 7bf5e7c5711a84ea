"""Compiles the preloaded library on first use, and writes the plans that it follows."""

import errno
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("shim.c")
_MAGIC = 0x6D696873
_MAX_ROOT_BYTES = 2048
_DONT_CARE = 0

# The order of both is that of the enumerations in shim.c.
CALLS = ("open", "create", "write", "read", "sync", "rename", "mkdir", "truncate", "map", "remove")
ACTIONS = ("count", "kill", "fail once", "fail from there on", "short")

_HEAD = struct.Struct("<IiiiQ")
_COUNTS = struct.Struct(f"<{len(CALLS)}Q")
_LAYOUT = struct.Struct(f"<IiiiQ{len(CALLS)}QQ{_MAX_ROOT_BYTES}s")


class NoCompiler(Exception):
    """This machine has no C compiler, or it cannot compile the library."""


def library() -> Path:
    """Return the path of the compiled library. It is compiled once for each version of its source."""
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fastcssl-chaos"
    path = cache / f"shim-{digest}.so"
    if path.is_file():
        return path
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NoCompiler("The chaos suite compiles a small C library, and there is no C compiler (cc) here.")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / "shim.so"
        command = [compiler, "-O2", "-Wall", "-shared", "-fPIC", "-o", str(made), str(_SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise NoCompiler(f"{_SOURCE} does not compile: {done.stderr.strip().splitlines()[-1]}")
        made.replace(path)
    return path


@dataclass(frozen=True)
class Plan:
    """Says which operation fails, and how. Without an action, operations are only counted."""

    call: str = CALLS[0]
    nth: int = _DONT_CARE  # counted from 1
    action: str = ACTIONS[0]
    error: str = ""  # the name of an error number, such as ENOSPC

    def write(self, path: Path, roots: tuple[Path, ...]) -> None:
        """Write the plan for operations below the folders `roots`."""
        listed = "".join(f"{Path(os.path.realpath(root))}\n" for root in roots).encode()
        if len(listed) >= _MAX_ROOT_BYTES:
            raise ValueError(f"The paths of the watched folders are too long: {listed!r}")
        number = _ERRORS[self.error] if self.error else 0
        head = (_MAGIC, CALLS.index(self.call), ACTIONS.index(self.action), number, self.nth)
        path.write_bytes(_LAYOUT.pack(*head, *[0] * len(CALLS), 0, listed))


_ERRORS = {name: number for number, name in errno.errorcode.items()}


@dataclass(frozen=True)
class Counted:
    """What a plan's file says after a command: how often each operation was made, and how often one was failed."""

    counts: dict[str, int]
    num_injected: int


def counted(path: Path) -> Counted:
    """Return the counts in the file of a plan."""
    content = path.read_bytes()
    counts = _COUNTS.unpack_from(content, _HEAD.size)
    (num_injected,) = struct.unpack_from("<Q", content, _HEAD.size + _COUNTS.size)
    return Counted(dict(zip(CALLS, counts, strict=True)), num_injected)
