"""Compiles a .cu with g++ against the emulator and runs it in a process of its own, which a broken kernel may break."""

import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

EMULATOR = Path(__file__).resolve().parent
CSRC = EMULATOR.parent.parent / "csrc"
CACHE = CSRC.parent / "build" / "emulator"

FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fno-strict-aliasing", "-march=native"]
VARIANTS = {
    "plain": ["-O2"],
    "quick": ["-O0"],  # to compile, not to run
    "sanitized": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}


def headers_of(source: str, folder: Path, includes: list[Path]) -> set[Path]:
    """The project's headers that this text includes, directly or not."""
    found: set[Path] = set()
    waiting = [(source, folder)]
    while waiting:
        text, here = waiting.pop()
        for name in re.findall(r'^#include [<"](.+)[>"]', text, re.MULTILINE):
            path = next((p for p in (root / name for root in (here, *includes)) if p.exists()), None)
            if path and path.resolve() not in found:
                found.add(path.resolve())
                waiting.append((path.read_text(), path.parent))
    return found


def compiled(source: str, folder: Path, flags: list[str], name: str) -> Path:
    """The object file of `source`, which lies in `folder`; compiled once for a given content of it and its headers."""
    includes = [EMULATOR / "include", EMULATOR, folder, CSRC]
    command = ["g++", *flags, "-DFASTCSSL_EMULATOR", *(f"-I{path}" for path in includes), "-x", "c++", "-c"]
    digest = hashlib.sha256("\0".join([source, *command]).encode())
    for header in sorted(headers_of(source, folder, includes)):
        digest.update(header.read_bytes())
    target = CACHE / f"{name}-{digest.hexdigest()[:24]}.o"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            (Path(scratch) / "source").write_text(source)
            call([*command, f"{scratch}/source", "-o", f"{scratch}/object"])
            Path(f"{scratch}/object").rename(target)
    return target


def call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def build(kernel: Path, *others: Path, variant: str = "plain", edits: dict[str, str] | None = None) -> Path:
    """The executable of `kernel` and the files beside it, one of which has main(). `edits` replaces text in the kernel,
    which must occur exactly once, to plant a fault."""
    source = kernel.read_text()
    for old, new in (edits or {}).items():
        if source.count(old) != 1:
            raise ValueError(f"{old!r} occurs {source.count(old)} times in {kernel}; a fault is planted at one place")
        source = source.replace(old, new)
    flags = [*FLAGS, *VARIANTS[variant]]
    # #line keeps messages and the lines of barriers in terms of the real file.
    sources = [(kernel, source), *((path, path.read_text()) for path in (EMULATOR / "scheduler.cpp", *others))]
    objects = [compiled(f'#line 1 "{path}"\n{text}', path.parent, flags, path.stem) for path, text in sources]
    target = CACHE / f"{kernel.stem}-{hashlib.sha256(str(objects).encode()).hexdigest()[:24]}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            call(["g++", *flags, *map(str, objects), "-o", f"{scratch}/out"])
            Path(f"{scratch}/out").rename(target)
    return target


def run(
    executable: Path, stdin: bytes = b"", *args: str, seed: int = 0, skip_barrier: int | None = None
) -> "subprocess.CompletedProcess[bytes]":
    """`seed` orders blocks, warps and lanes; `skip_barrier` is the line of a __syncthreads() that does nothing."""
    env = {**os.environ, "EMULATOR_SEED": str(seed), "EMULATOR_SKIP_BARRIER": str(skip_barrier or 0)}
    env.pop("LD_PRELOAD", None)
    env["ASAN_OPTIONS"] = "detect_stack_use_after_return=0"
    return subprocess.run([str(executable), *args], input=stdin, capture_output=True, timeout=300, env=env)


def barrier_lines(kernel: Path) -> list[int]:
    return [n for n, line in enumerate(kernel.read_text().splitlines(), 1) if "__syncthreads();" in line]
