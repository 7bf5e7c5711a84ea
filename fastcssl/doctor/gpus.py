"""Checks the GPUs, and whether this build has code for them."""

import shutil
import subprocess
from collections.abc import Iterator

import torch

from fastcssl import ops
from fastcssl.doctor import Finding, Section, failed, note, ok, run_checks
from fastcssl.ops import cards


def gpus() -> Section:
    return run_checks("GPUs", [("GPUs", every_card)])


def every_card() -> Iterator[Finding]:
    """Yields one finding per GPU, and one if GPUs cannot read each other's memory."""
    if not torch.cuda.is_available():
        yield _none()
        return
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        name = f"GPU {number}"
        text = f"{about.name}, sm_{about.major}{about.minor}, {about.total_memory / 1e9:.0f} GB"
        yield _operators_on(name, text, (about.major, about.minor))
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


def _operators_on(name: str, text: str, capability: cards.Capability) -> Finding:
    """Says which operators run on a card, and why, as `ops.missing` decides it."""
    if not ops.architectures():  # the section on the build says so
        return ok(name, text)
    reason = cards.unfit(ops.architectures(), capability)
    if reason is None:
        return ok(name, f"{text}; the compiled operators run on it")
    if capability < cards.LEAST:
        return note(name, f"{text}; plain torch runs in place of the compiled operators", f"Nothing to do: {reason}.")
    seen = "{}.{}".format(*capability)
    remedy = f"Reinstall with TORCH_CUDA_ARCH_LIST='{seen}' FASTCSSL_CUDA=1; until then it runs plain torch."
    return failed(name, f"{text}; this build holds {', '.join(ops.architectures())} only", remedy)
