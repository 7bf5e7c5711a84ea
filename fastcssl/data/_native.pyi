from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

class CudaStatus(TypedDict):
    built: bool
    toolkit: str
    architectures: str
    num_devices: int
    problem: str

compiler: str

def cuda_status() -> CudaStatus: ...
def photometric_isa() -> str: ...

class View:
    def __init__(
        self,
        *,
        size_px: int,
        bicubic: bool,
        antialias: bool,
        stop_at_box: bool,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None: ...

class ShardFault(Exception): ...

def map_bytes(path: str) -> npt.NDArray[np.uint8]: ...

class Job:
    @property
    def shard_fault(self) -> str: ...

class Engine:
    def __init__(self, views: Sequence[View], num_threads: int) -> None: ...
    def map(self, path: str, num_bytes: int) -> int: ...
    def map_array(self, path: str, num_bytes: int, data_offset: int, count: int, height: int, width: int) -> int: ...
    def submit(
        self,
        *,
        shard_N: Any,
        place_N: Any,
        bytes_N: Any,
        width_N: Any,
        height_N: Any,
        box_VN4: Any,
        columns_VNC: Any,
        crops_V: Sequence[int],
        views_V: Sequence[int],
        type: int,
    ) -> Job: ...
    def wait(self, job: Job) -> list[tuple[int, str]]: ...
    def cancel(self, job: Job) -> None: ...
    def stage_seconds(self) -> dict[str, float]: ...
