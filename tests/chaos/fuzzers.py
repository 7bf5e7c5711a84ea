"""Builds the fuzz targets in `fuzz` with ASan, UBSan and libFuzzer, and makes the files that they begin with."""

import ast
import hashlib
import io
import random
import re
import shutil
import struct
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from chaos import specimens
from chaos.once import once

_FOLDER = Path(__file__).resolve().parent / "fuzz"
_CSRC = _FOLDER.parent.parent.parent / "csrc"
_FLAGS = ["-std=c++20", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{_CSRC}"]
_MAX_RSS_MB = 1024
_MAX_INPUT_BYTES = 16_384
_UNIT_SECONDS = 60
_DEADLINE_S = 900
_ROW = struct.Struct("<qqHHBBBB")
_SIDE = 8


@dataclass(frozen=True)
class Target:
    """A file in `fuzz`: its dictionary, and how many inputs a session runs, which take about ten seconds."""

    name: str
    dictionary: str
    what: str
    runs: int


TARGETS = (
    Target("jpeg", "jpeg", "JPEG through the codec", 25_000),
    Target("tar_shard", "tar", "tar shard through the engine", 15_000),
    Target("array_shard", "npy", "array shard through the engine", 15_000),
)


@dataclass(frozen=True)
class Session:
    """How a session of a fuzzer ended: `fault` is the first line that says what is wrong, or ""."""

    num_inputs: int
    fault: str
    input: Path | None  # with which it is wrong


def missing() -> str | None:
    """Returns why the targets cannot be built here, or None."""
    if shutil.which("clang++") is None:
        return "The fuzzers need clang. Install Debian's clang and libclang-rt-dev."
    asked = subprocess.run(["clang++", "-print-resource-dir"], capture_output=True, text=True)
    if any(Path(asked.stdout.strip()).glob("lib/**/libclang_rt.fuzzer*.a")):
        return None
    return "clang has no libFuzzer here. Install its runtime, such as Debian's libclang-rt-dev."


def built(folder: Path) -> Path:
    """Returns the folder of the compiled targets, below `folder`. They are compiled once for each state of the code."""
    sources = sorted(p for p in (*_CSRC.glob("codec/*.cpp"), *_CSRC.glob("views/*.cpp")) if p.name != "module.cpp")
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in (*sorted(_CSRC.rglob("*.h")), *sources, *sorted(_FOLDER.iterdir())):
        digest.update(path.read_bytes())

    def build(part: Path) -> None:
        objects = []
        for source in sources:
            objects.append(str(part / f"{source.parent.name}-{source.stem}.o"))
            _call(["clang++", *_FLAGS, "-fsanitize=fuzzer-no-link", "-c", str(source), "-o", objects[-1]])
        for target in TARGETS:
            inputs = [str(_FOLDER / f"{target.name}.cpp"), *objects, "-ljpeg", "-lpthread"]
            _call(["clang++", *_FLAGS, "-fsanitize=fuzzer", *inputs, "-o", str(part / target.name)])

    return once(folder / f"programs-{digest.hexdigest()[:16]}", build)


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[:3000]}")


def run(target: Target, programs: Path, corpus: Path, scratch: Path, seed: int) -> Session:
    """Runs a session whose new inputs are added to `corpus`, and returns how it ended."""
    command = [
        str(programs / target.name),
        f"-seed={seed}",
        f"-runs={target.runs}",
        f"-dict={_FOLDER / target.dictionary}.dict",
        f"-rss_limit_mb={_MAX_RSS_MB}",
        f"-max_len={_MAX_INPUT_BYTES}",
        f"-timeout={_UNIT_SECONDS}",
        f"-artifact_prefix={scratch}/",
        "-print_final_stats=1",
        str(corpus),
    ]
    log = scratch / "log.txt"
    with log.open("wb") as printed:
        try:
            status = subprocess.run(command, stdout=printed, stderr=printed, timeout=_DEADLINE_S).returncode
        except subprocess.TimeoutExpired:
            return Session(0, "the session did not end", None)
    text = log.read_text(errors="replace")
    counted = re.findall(r"number_of_executed_units: (\d+)", text) or re.findall(r"^#(\d+)\t", text, re.MULTILINE)
    found = next((p for p in scratch.iterdir() if re.match(r"(crash|leak|timeout|oom|slow)-", p.name)), None)
    fault = _fault(text) if status != 0 else ""
    return Session(int(counted[-1]) if counted else 0, fault, found if fault else None)


def _fault(text: str) -> str:
    """Returns the line of a log that says what is wrong, and the first place in our code."""
    lines = text.splitlines()
    marks = ("ERROR: ", "runtime error:", "outside its shard")
    said = next((line for line in lines if any(mark in line for mark in marks)), lines[-1] if lines else "")
    place = re.search(r"in (fastcssl::[\w:]+).*?(\w+\.(?:cpp|h):\d+)", text[text.find(said) :])
    shown = re.sub(r"==\d+==\s*|\S*/csrc/", "", said.strip())[:200]
    return shown + (f" ({place[1]} at {place[2]})" if place else "")


# ---- The first inputs ------------------------------------------------------------------------------------------------


def first_inputs(target: Target) -> list[bytes]:
    """Returns the inputs that a target begins with."""
    return {"jpeg": _jpeg_inputs, "tar_shard": _tar_inputs, "array_shard": _array_inputs}[target.name]()


def write_corpus(target: Target, folder: Path) -> None:
    """Writes the first inputs into `folder`."""
    for number, content in enumerate(first_inputs(target)):
        (folder / f"first-{number:02d}").write_bytes(content)


def _jpeg_inputs() -> list[bytes]:
    settings = [bytes((fit, 10, 89, 1, wanted)) for fit in range(4) for wanted in range(3)]
    jpegs = specimens.jpegs()
    return [settings[i % len(settings)] + jpegs[i % len(jpegs)] for i in range(len(settings) * 3)]


def tar_of(jpegs: list[bytes]) -> tuple[bytes, list[tuple[int, int]]]:
    """Returns a tar of JPEGs, and the offset and size of each."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number, jpeg in enumerate(jpegs):
            entry = tarfile.TarInfo(f"{number:010d}.jpg")
            entry.size = len(jpeg)
            archive.addfile(entry, io.BytesIO(jpeg))
        places = [(member.offset_data, member.size) for member in archive.getmembers()]
    return buffer.getvalue(), places


def _tar_inputs() -> list[bytes]:
    inputs = []
    jpegs = specimens.jpegs()[:6]
    for begin in (0, 3):
        shard, places = tar_of(jpegs[begin : begin + 3])
        for box in ((0, 0, 255, 255), (100, 20, 200, 180), (250, 250, 255, 255)):
            inputs.append(b"".join(_ROW.pack(*place, 32, 24, *box) for place in places) + shard)
    shard, places = tar_of(jpegs[:3])
    outside = ((-1, 10), (2**40, 10), (0, len(shard) + 1))
    inputs.append(b"".join(_ROW.pack(*place, 32, 24, 0, 0, 255, 255) for place in outside) + shard)
    return inputs


def _array_inputs() -> list[bytes]:
    inputs = []
    pixels = random.Random(0).randbytes(4 * _SIDE * _SIDE * 3)
    for places in ((0, 1, 3), (3, 0, 2), (4, -5, 10**6), (2**40, 0, 0)):
        header = struct.pack("<QQII", 128, 4, _SIDE, _SIDE)
        rows = b"".join(_ROW.pack(place, _SIDE * _SIDE * 3, _SIDE, _SIDE, 10, 10, 200, 200) for place in places)
        inputs.append(header + rows + bytes(128) + pixels)
    return inputs


# ---- Dictionaries ----------------------------------------------------------------------------------------------------


def tokens(dictionary: str) -> list[bytes]:
    """Returns the entries of a dictionary."""
    lines = (_FOLDER / f"{dictionary}.dict").read_text(encoding="ascii").splitlines()
    quoted = [line.partition("=")[2] for line in lines if line and not line.startswith("#")]
    return [ast.literal_eval("b" + each) for each in quoted]


def with_token(content: bytes, token: bytes, rng: random.Random) -> bytes:
    """Returns the content with an entry of a dictionary written over it or put into it."""
    at = rng.randrange(len(content) + 1)
    return content[:at] + token + content[at + rng.choice((0, len(token))) :]
