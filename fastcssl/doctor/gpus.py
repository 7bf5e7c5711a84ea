"""Checks the GPUs, and whether this build has code for them."""

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import torch

from fastcssl.doctor import Finding, Section, failed, note, ok, run_checks


def gpus() -> Section:
    return run_checks("GPUs", [("GPUs", cards)])


def cards() -> Iterator[Finding]:
    """Yields one finding per GPU, and one if GPUs cannot read each other's memory."""
    if not torch.cuda.is_available():
        yield _none()
        return
    built = _built_for()
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        name = f"GPU {number}"
        text = f"{about.name}, sm_{about.major}{about.minor}, {about.total_memory / 1e9:.0f} GB"
        if about.major < 8:
            yield note(name, text, "The fused kernels need compute capability 8.0; this GPU uses plain torch.")
        elif built and not any(_runs(code, about.major, about.minor) for code in built):
            remedy = f"Reinstall with TORCH_CUDA_ARCH_LIST='{about.major}.{about.minor}' FASTCSSL_CUDA=1."
            yield failed(name, f"{text}; this build is for sm_{', sm_'.join(built)} only", remedy)
        else:
            yield ok(name, text)
    if torch.cuda.device_count() > 1:
        peers = [
            (a, b)
            for a in range(torch.cuda.device_count())
            for b in range(torch.cuda.device_count())
            if a < b and not torch.cuda.can_device_access_peer(a, b)
        ]
        if peers:
            yield note(
                "GPU to GPU",
                f"{len(peers)} pairs of GPUs cannot read each other's memory",
                "Ranks communicate through the host, which is slower. If NCCL hangs, try NCCL_P2P_DISABLE=1.",
            )


def _none() -> Finding:
    if torch.version.cuda is None:
        return note("GPUs", "this torch is a CPU build", "To use a GPU, install torch from the default package index.")
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return note("GPUs", "none: no NVIDIA driver was found; everything runs on the CPU", "")
    done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30)
    if done.returncode or "GPU" not in done.stdout:
        said = (done.stdout + done.stderr).strip().partition("\n")[0]
        return failed("GPUs", f"nvidia-smi says: {said}", "Load or reinstall the NVIDIA driver, then reboot.")
    return failed(
        "GPUs",
        "nvidia-smi shows a GPU, but torch cannot use it",
        f"Install a driver for CUDA {torch.version.cuda} or later; in Docker, run with --gpus all.",
    )


def _built_for() -> list[str]:
    """Returns the architectures that the build has code for; empty if unknown."""
    try:
        from fastcssl.data import _native
    except ImportError:
        return []
    status: Any = _native.cuda_status()
    return [each for each in status["architectures"].split(";") if each]


def _runs(code: str, major: int, minor: int) -> bool:
    """Returns whether code runs on a GPU: one of its major version and not older or, through PTX, a later major."""
    number = int(code.rstrip("af"))
    return (number // 10 == major and number % 10 <= minor) or number // 10 < major
