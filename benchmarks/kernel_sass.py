"""Counts the instructions in the loop of the CUDA sweep's machine code.

cuobjdump is searched on PATH, beside nvcc and among the packages (nvidia-cuda-cuobjdump). It reads the operators'
library if that was built with CUDA. If either is missing, the model does without these counts.
"""

import functools
import importlib.machinery
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path
from typing import NamedTuple

_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.M)
_SWEEP = re.compile(r"sweep_banksI(f|6__half|13__nv_bfloat16)Lb([01])ELi(\d+)ELb([01])E")
_STORAGE = {"f": "float32", "6__half": "float16", "13__nv_bfloat16": "bfloat16"}
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
KINDS = {
    "tensor": ("HMMA", "QMMA", "IMMA", "MMA"),
    "shared loads": ("LDSM", "LDS"),
    "copies": ("LDGSTS", "UBLKCP"),
    "special": ("MUFU",),
    "float": ("FFMA", "FADD", "FMUL", "FMNMX", "FSEL", "FSETP", "F2F", "F2FP", "HADD2", "HMUL2", "HFMA2"),
}


class LoopMix(NamedTuple):
    """The instructions per iteration, in one warp, of the loop with the most tensor-core instructions."""

    total: int
    counts: dict[str, int]

    def share(self, kind: str) -> float:
        return self.counts.get(kind, 0) / self.total


def loop_mix(sass: str) -> LoopMix | None:
    """Returns the mix of one function, or None without tensor instructions.

    A loop is the code that a branch jumps back over. Among nested loops with the same tensor instructions, the
    innermost one counts.
    """
    code = [(int(address, 16), name, rest) for address, name, rest in _INSTRUCTION.findall(sass)]
    best: tuple[int, int, list[str]] | None = None
    for address, name, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
        if target and (begin := int(target[1], 16)) < address:
            body = [each for place, each, _ in code if begin <= place <= address]
            tensor = sum(_kind(each) == "tensor" for each in body)
            if tensor and (best is None or (tensor, -len(body)) > (best[0], -best[1])):
                best = (tensor, len(body), body)
    if best is None:
        return None
    return LoopMix(best[1], dict(Counter(map(_kind, best[2]))))


def _kind(name: str) -> str:
    base = name.partition(".")[0]
    return next((kind for kind, names in KINDS.items() if base in names), "other")


def functions(dump: str) -> dict[tuple[int, str], str]:
    """Returns the code of each function by (architecture, mangled name)."""
    found: dict[tuple[int, str], str] = {}
    for part in re.split(r"(?=^Fatbin elf code:)", dump, flags=re.M):
        arch = re.search(r"^arch = sm_(\d+)", part, re.M)
        if arch is None:
            continue
        places = list(_FUNCTION.finditer(part))
        for place, following in zip(places, [*places, None][1:], strict=True):
            found[int(arch[1]), place[1]] = part[place.end() : following.start() if following else None]
    return found


def cuobjdump() -> str | None:
    """Returns the path of cuobjdump, or None if it is not installed."""
    nvcc = shutil.which("nvcc")
    beside = [str(Path(nvcc).resolve().parent / "cuobjdump")] if nvcc else []
    packaged = sorted(map(str, Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/cuobjdump")))
    candidates = [shutil.which("cuobjdump"), *beside, *packaged]
    return next((path for path in candidates if path and Path(path).is_file()), None)


def library() -> Path | None:
    """Returns the path of the operators' library, or None if it is not built."""
    package = Path(__file__).parent.parent / "fastcssl" / "ops"
    paths = (package / f"_ops{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


class Sweep(NamedTuple):
    """One instance of the kernel."""

    architecture: int
    storage: str
    is_exact: bool
    dim: int
    is_few: bool


def sweeps_in(dump: str) -> dict[Sweep, LoopMix]:
    found: dict[Sweep, LoopMix] = {}
    for (architecture, name), text in functions(dump).items():
        instance = _SWEEP.search(name)
        mix = loop_mix(text) if instance else None
        if instance and mix:
            storage, exact, dim, few = instance.groups()
            found[Sweep(architecture, _STORAGE[storage], exact == "1", int(dim), few == "1")] = mix
    return found


@functools.cache
def sweeps() -> dict[Sweep, LoopMix]:
    """Returns the mix of every sweep. It is empty if the library has no such kernel or cannot be read."""
    tool, path = cuobjdump(), library()
    if tool is None or path is None:
        return {}
    try:
        done = subprocess.run([tool, "-sass", str(path)], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return sweeps_in(done.stdout)
