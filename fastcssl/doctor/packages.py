"""Checks the packages that fastcssl needs, and those that only some options need."""

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from typing import NamedTuple

import torch

from fastcssl.doctor import Finding, Section, failed, note, ok, run_checks

NEEDED = ("torch", "torchvision", "numpy", "pillow", "safetensors", "rich", "tyro")


class Optional(NamedTuple):
    """A package that only some options need."""

    name: str  # as shown
    distribution: str
    module: str
    is_for: str
    install: str
    is_native: bool = False  # it loads libraries that may not work on this system


OPTIONAL = (
    Optional("FFCV", "ffcv", "ffcv", "--loader ffcv", "apt-get install libopencv-dev libturbojpeg0-dev "
             "pkg-config, then pip install 'fastcssl[ffcv]'", is_native=True),
    Optional("DALI", "nvidia-dali-cuda130", "nvidia.dali", "--loader dali", "pip install 'fastcssl[dali]'",
             is_native=True),
    Optional("timm", "timm", "timm", "timm encoders", "pip install 'fastcssl[timm]'"),
    Optional("TensorBoard", "tensorboard", "tensorboard", "--tensorboard", "pip install tensorboard"),
)  # fmt: skip


def packages() -> Section:
    return run_checks(
        "Packages",
        [
            ("needed", needed),
            *((each.name, lambda each=each: optional(each)) for each in OPTIONAL),
            ("apex", apex),
            ("NCCL", nccl),
        ],
    )


def needed() -> Finding:
    versions = {name: _version(name) for name in NEEDED}
    absent = [name for name, version in versions.items() if version is None]
    if absent:
        return failed("needed", f"{', '.join(absent)} not installed", f"pip install {' '.join(absent)}")
    return ok("needed", ", ".join(f"{name} {version}" for name, version in versions.items()))


def optional(package: Optional) -> Finding:
    version = _version(package.distribution)
    if version is None and not _is_there(package.module):
        return note(package.name, f"not installed; needed for {package.is_for}", f"To install it: {package.install}.")
    if not package.is_native:
        return ok(package.name, f"{version or 'unknown version'}; for {package.is_for}")
    # Imported in a process of its own, because a broken library can crash the interpreter.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import {package.module}"], capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return failed(
            package.name, f"installed, but importing it gave {lines[-1]}", f"Reinstall it: {package.install}."
        )
    return ok(package.name, f"{version or 'unknown version'}; for {package.is_for}")


def apex() -> Finding:
    """Checks NVIDIA's apex, of which only FusedSGD is used. The package apex on PyPI is something else."""
    build = "build github.com/NVIDIA/apex with APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation ."
    if not _is_there("apex"):
        return note("apex", "not installed; torch's optimisers are used", f"For --optim.implementation apex: {build}")
    try:
        importlib.import_module("apex.optimizers").FusedSGD  # noqa: B018
        importlib.import_module("amp_C")
    except Exception as error:
        return failed("apex", f"installed, but FusedSGD is not usable ({error})", f"pip uninstall apex, then {build}")
    return ok("apex", "FusedSGD is available; for --optim.implementation apex")


def nccl() -> Finding:
    if not torch.distributed.is_available():
        return note(
            "NCCL",
            "this torch has no distributed package",
            "For several GPUs, install torch from the default package index.",
        )
    if not torch.distributed.is_nccl_available():
        return note(
            "NCCL", "this torch was built without it; ranks communicate through gloo", "Only several GPUs need NCCL."
        )
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ok("NCCL", ".".join(map(str, version)) if isinstance(version, tuple) else str(version))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
