"""What was compiled: the codec, the engine, the operators, and for which processors and cards."""

import importlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from fastcssl import ops
from fastcssl.doctor import REINSTALL, Finding, Section, failed, note, ok, run_checks


def build() -> Section:
    return run_checks(
        "Build",
        [
            ("codec", codec),
            ("engine", engine),
            ("operators", operators),
            ("compiler", compiler),
            ("CUDA build", cuda_build),
        ],
    )


def _import(name: str) -> ModuleType | str:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return str(error).partition("\n")[0]


def codec() -> Finding:
    """Decodes and encodes JPEGs by libjpeg."""
    module = _import("dataprep._codec")
    if isinstance(module, str):
        return failed("codec", f"dataprep._codec does not load: {module}", REINSTALL)
    import numpy as np

    image = np.full((16, 16, 3), 128, np.uint8)
    jpeg = module.encode(image, 90)
    library = _libjpeg(Path(module.__file__ or ""))
    if jpeg[:2] != b"\xff\xd8":
        return failed("codec", "libjpeg encodes something that is no JPEG", REINSTALL)
    return ok("codec", f"libjpeg {library}, resize by {module.instruction_set()}")


def _libjpeg(extension: Path) -> str:
    """Returns which file it came from, as far as the system tells."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        for line in maps.read_text().splitlines():
            if "libjpeg" in line.rpartition("/")[2]:
                return f"from {line.split()[-1]}"
    return f"inside {extension.name}"


def engine() -> Finding:
    module = _import("fastcssl.data._native")
    if isinstance(module, str):
        return failed("engine", f"fastcssl.data._native does not load: {module}", REINSTALL)
    return ok("engine", f"the native loader is there; its photometry runs on {module.photometric_isa()}")


def operators() -> Finding:
    missing = ops.missing("cpu") or ops.missing("cpu", "info_nce_sweep")
    if missing:
        return failed("operators", missing, REINSTALL)
    devices = [device for device in ("cpu", "cuda") if ops.missing(device) is None]
    isas = f"photometry runs on {ops.photometric_isa()}, the contrastive sweep on {ops.info_nce_isa()}"
    return ok("operators", f"for {' and '.join(devices)}; on this CPU {isas}")


def compiler() -> Finding:
    """Says what would build it again here, and what torch.compile would use."""
    module = _import("fastcssl.data._native")
    # setup.py's flags; kernels come in three versions, and the CPU's own is chosen when they run.
    built_by = (
        f"built by GCC or Clang {module.compiler}, -O3, for portable, AVX2 and AVX-512 at once"
        if not isinstance(module, str)
        else "not built"
    )
    path = shutil.which(os.environ.get("CXX", "c++"))
    if path is None:
        return note(
            "compiler",
            f"{built_by}; no C++ compiler on PATH",
            "Only needed to build from source or for torch.compile on the CPU: apt-get install g++.",
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout.partition("\n")[0]
    return ok("compiler", f"{built_by}; here: {version}")


def cuda_build() -> Iterator[Finding]:
    module = _import("fastcssl.data._native")
    if isinstance(module, str):
        return
    status = module.cuda_status()
    if not status["built"]:
        remedy = "For a GPU: install with nvcc on PATH and FASTCSSL_CUDA=1."
        if torch.cuda.is_available():
            yield failed("CUDA build", "there is a GPU, but fastcssl was built without CUDA", remedy)
        else:
            yield note("CUDA build", "built without CUDA", remedy)
        return
    yield ok("CUDA build", f"toolkit {status['toolkit']}, with {_named(status['architectures'])}")
    if torch.version.cuda is not None:
        mine, theirs = status["toolkit"].partition(".")[0], torch.version.cuda.partition(".")[0]
        if mine != theirs:
            yield note(
                "CUDA versions",
                f"fastcssl was built with CUDA {status['toolkit']}, torch with {torch.version.cuda}",
                f"They may differ, each has its own run-time; if something fails, build with CUDA {theirs}.",
            )


def _named(architectures: str) -> str:
    """Returns the machine code and the PTX in words."""
    entries = architectures.split(";")
    codes, ptx = ([each for each in entries if each.startswith(kind)] for kind in ("sm_", "compute_"))
    return f"machine code for {', '.join(codes)} and PTX for {', '.join(ptx)} and later cards"
