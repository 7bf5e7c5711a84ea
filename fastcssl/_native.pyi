from typing import TypedDict

class CudaStatus(TypedDict):
    built: bool
    toolkit: str
    architectures: str
    num_devices: int
    problem: str

compiler: str

def cuda_status() -> CudaStatus: ...
