"""Checks the compiled parts: the codec, the engine and the operators, and which CPUs and GPUs they were built for."""

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
    """Checks that dataprep's codec loads and that libjpeg encodes an image."""
    module = _import("dataprep._codec")
    if isinstance(module, str):
        return failed("codec", f"dataprep._codec does not load: {module}", REINSTALL)
    import numpy as np

    image = np.full((16, 16, 3), 128, np.uint8)
    jpeg = module.encode(image, 90)
    library = _libjpeg(Path(module.__file__ or ""))
    if jpeg[:2] != b"\xff\xd8":
        return failed("codec", "what libjpeg encodes is not a JPEG", REINSTALL)
    return ok("codec", f"libjpeg {library}; resizing uses {module.instruction_set()}")


def _libjpeg(extension: Path) -> str:
    """Returns which file libjpeg was loaded from, if the system reports it."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        for line in maps.read_text().splitlines():
            if "libjpeg" in line.rpartition("/")[2]:
                return f"from {line.split()[-1]}"
    return f"inside {extension.name}"


def engine() -> Finding:
    """Checks that the native loader's engine loads."""
    module = _import("fastcssl.data._native")
    if isinstance(module, str):
        return failed("engine", f"fastcssl.data._native does not load: {module}", REINSTALL)
    return ok("engine", f"the native loader is available; its photometry uses {module.photometric_isa()}")


def operators() -> Finding:
    """Checks that the compiled torch operators load."""
    missing = ops.missing("cpu") or ops.missing("cpu", "info_nce_sweep")
    if missing:
        return failed("operators", missing, REINSTALL)
    devices = [device for device in ("cpu", "cuda") if ops.missing(device) is None]
    isas = f"photometry uses {ops.photometric_isa()}, the contrastive loss {ops.info_nce_isa()}"
    return ok("operators", f"available for {' and '.join(devices)}; on this CPU, {isas}")


def compiler() -> Finding:
    """Reports which compiler built fastcssl, and which one is here for a rebuild or for torch.compile."""
    module = _import("fastcssl.data._native")
    # The flags are those of setup.py. Kernels come in three versions; the CPU's own is chosen at run time.
    built_by = (
        f"built with GCC or Clang {module.compiler} and -O3, with portable, AVX2 and AVX-512 code"
        if not isinstance(module, str)
        else "not built"
    )
    path = shutil.which(os.environ.get("CXX", "c++"))
    if path is None:
        return note(
            "compiler",
            f"{built_by}; no C++ compiler on PATH",
            "It is only needed to build from source and for torch.compile on the CPU: apt-get install g++.",
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout.partition("\n")[0]
    return ok("compiler", f"{built_by}; on PATH: {version}")


def cuda_build() -> Iterator[Finding]:
    """Checks that fastcssl was built with CUDA if there is a GPU, and with torch's version of CUDA."""
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
                f"They may differ, because each has its own runtime. If something fails, build with CUDA {theirs}.",
            )


def _named(architectures: str) -> str:
    """Returns the machine code and the PTX in words."""
    entries = architectures.split(";")
    codes, ptx = ([each for each in entries if each.startswith(kind)] for kind in ("sm_", "compute_"))
    return f"machine code for {', '.join(codes)} and PTX for {', '.join(ptx)} and later cards"
