"""Tells which cards the compiled CUDA operators run on, from what the library holds and from the card's capability.

Machine code (sm_86) runs on cards of the same major version with an equal or higher minor one. PTX (compute_90) is
compiled by the driver, for any card at or above it.
"""

from collections.abc import Sequence

# The kernels use asynchronous copies and tensor cores for bfloat16 and TF32, which came with Ampere.
LEAST = (8, 0)

Capability = tuple[int, int]


def runs(code: str, capability: Capability) -> bool:
    """Returns whether a card can run one entry of the library, such as "sm_86" or "compute_120"."""
    kind, _, number = code.partition("_")
    built = divmod(int(number), 10)
    if kind == "compute":
        return capability >= built
    return capability[0] == built[0] and capability[1] >= built[1]


def unfit(codes: Sequence[str], capability: Capability) -> str | None:
    """Returns why a library that holds these entries has no operators for a card, or None when it has."""
    seen = "{}.{}".format(*capability)
    if capability < LEAST:
        return f"this card has compute capability {seen}, and they need {LEAST[0]}.{LEAST[1]} or later"
    if not any(runs(code, capability) for code in codes):
        return (
            f"this build of fastcssl holds {', '.join(codes)}, none of which runs on a card of compute capability "
            f"{seen}; reinstall it with TORCH_CUDA_ARCH_LIST='{seen}' FASTCSSL_CUDA=1"
        )
    return None
