"""Compiles a .cu with g++ against the emulator and runs it in a process of its own, which a broken kernel may break."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from emulator import ptx

EMULATOR = Path(__file__).resolve().parent
CSRC = EMULATOR.parent.parent / "csrc"
CACHE = CSRC.parent / "build" / "emulator"

FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fno-strict-aliasing", "-march=native"]
VARIANTS = {
    "plain": ["-O2"],
    "quick": ["-O0"],  # to compile, not to run
    "sanitized": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "sanitized_quick": ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
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
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[:5000]}")


def planted(kernel: Path, edits: dict[str, str]) -> Path:
    """A copy of the kernel, among copies of its neighbours, with text replaced in it or in one header that it includes:
    text that occurs exactly once."""
    shared = [CSRC / "launch.cuh", CSRC / "device" / "failure.h"]
    files = {path: path.read_text() for path in sorted({*shared, *kernel.parent.iterdir()}) if path.is_file()}
    headers = headers_of(files[kernel], kernel.parent, []) & files.keys()
    for old, new in edits.items():
        places = [path for path in ([kernel] if old in files[kernel] else sorted(headers)) if old in files[path]]
        if len(places) != 1 or files[places[0]].count(old) != 1:
            raise ValueError(
                f"{old!r} is not at exactly one place of {kernel} and its headers; a fault is planted at one"
            )
        files[places[0]] = files[places[0]].replace(old, new)
    digest = hashlib.sha256("\0".join(files.values()).encode()).hexdigest()[:24]
    root = CACHE / f"planted-{digest}"
    for path, text in files.items():
        target = root / path.relative_to(CSRC)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return root / kernel.relative_to(CSRC)


def build(kernel: Path, *others: Path, variant: str = "plain", edits: dict[str, str] | None = None) -> Path:
    """The executable of `kernel` and the files beside it, one of which has main(). `edits` plants a fault."""
    if edits:
        kernel = planted(kernel, edits)
    flags = [*FLAGS, *VARIANTS[variant]]
    # #line keeps messages and the lines of barriers in terms of the real file.
    sources = [(path, path.read_text()) for path in (kernel, EMULATOR / "scheduler.cpp", *others)]
    objects = [compiled(f'#line 1 "{path}"\n{text}', path.parent, flags, path.stem) for path, text in sources]
    target = CACHE / f"{kernel.stem}-{hashlib.sha256(str(objects).encode()).hexdigest()[:24]}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            call(["g++", *flags, *map(str, objects), "-o", f"{scratch}/out"])
            Path(f"{scratch}/out").rename(target)
    return target


def need_nvcc() -> None:
    """Skips the test where nvcc is missing, unless FASTCSSL_REQUIRE_BACKENDS=1 makes that a failure."""
    if shutil.which("nvcc") is None:
        if os.environ.get("FASTCSSL_REQUIRE_BACKENDS") == "1":
            pytest.fail("nvcc is required here but is not on PATH")
        pytest.skip("nvcc is not on PATH")


def nvcc_ptx(kernel: Path, architecture: int = 80) -> str:
    """What nvcc makes of the kernel for all GPUs from this architecture on; compiled once for a given content."""
    source = kernel.read_text()
    command = ["nvcc", "-ptx", "-std=c++17", "-O3", f"-arch=compute_{architecture}", f"-I{CSRC}"]
    digest = hashlib.sha256("\0".join([source, *command]).encode())
    for header in sorted(headers_of(source, kernel.parent, [CSRC])):
        digest.update(header.read_bytes())
    target = CACHE / f"{kernel.stem}-{digest.hexdigest()[:24]}.ptx"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            call([*command, str(kernel), "-o", f"{scratch}/out"])
            Path(f"{scratch}/out").rename(target)
    return target.read_text()


def build_ptx(kernel: Path, *others: Path, wanted: list[str], mutate: Callable[[str], str] = lambda text: text) -> Path:
    """As `build`, but of the kernels named in `wanted` it runs the translated PTX, and no other kernel at all. `mutate`
    plants a fault in the PTX."""
    # A register of PTX that is never read and a label that is never jumped to are nothing to warn of.
    flags = [*FLAGS, "-DEMULATOR_PTX", "-Wno-unused", "-Wno-maybe-uninitialized"]
    translated = ptx.translate(mutate(nvcc_ptx(kernel)), wanted)
    objects = [compiled(translated, EMULATOR, [*flags, "-O0"], f"{kernel.stem}-ptx")]
    for path in (kernel, *others, EMULATOR / "scheduler.cpp", EMULATOR / "ptx_watch.cpp"):
        level = "-O0" if path == kernel else "-O2"  # the kernel's source is there for its name and its launch
        objects.append(compiled(f'#line 1 "{path}"\n{path.read_text()}', path.parent, [*flags, level], path.stem))
    target = CACHE / f"{kernel.stem}-ptx-{hashlib.sha256(str(objects).encode()).hexdigest()[:24]}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            call(["g++", *flags, "-rdynamic", *map(str, objects), "-ldl", "-o", f"{scratch}/out"])
            Path(f"{scratch}/out").rename(target)
    return target


def run(
    executable: Path,
    stdin: bytes = b"",
    *args: str,
    seed: int = 0,
    skip_barrier: str = "",
    multiprocessors: int = 4,
    report: Path | None = None,
) -> "subprocess.CompletedProcess[bytes]":
    """`seed` orders blocks, warps and lanes; `skip_barrier` is the file:line of a __syncthreads() that does nothing;
    `report` is where translated PTX writes what its memory accesses were like."""
    env = {**os.environ, "EMULATOR_SEED": str(seed), "EMULATOR_SKIP_BARRIER": skip_barrier}
    env["EMULATOR_MULTIPROCESSORS"] = str(multiprocessors)
    if report is not None:
        env["PTX_REPORT"] = str(report)
    env.pop("LD_PRELOAD", None)
    env["ASAN_OPTIONS"] = "detect_stack_use_after_return=0"
    return subprocess.run([str(executable), *args], input=stdin, capture_output=True, timeout=300, env=env)


def barrier_lines(kernel: Path) -> list[str]:
    """Of the kernel and its headers, as file:line."""
    files = [kernel, *sorted(headers_of(kernel.read_text(), kernel.parent, []))]
    lines = [(path.name, *line) for path in files for line in enumerate(path.read_text().splitlines(), 1)]
    return [f"{name}:{number}" for name, number, line in lines if "__syncthreads();" in line]
