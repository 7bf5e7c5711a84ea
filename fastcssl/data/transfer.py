"""Copies the small arrays of a batch to the training device."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def moved(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns the array as a tensor on the device, which may share the array's memory if that is the CPU.

    The copy to a GPU is queued on the current stream, from pinned memory: from pageable memory, the host would wait.
    torch's allocator of pinned memory reuses the block only after the copy.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
