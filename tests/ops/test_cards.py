"""Which operators run on which card: by the card's capability and by what the library holds, on fake cards."""

import re

import fake_cuda
import pytest
import torch

from fastcssl import ops
from fastcssl.ops import cards

if ops.missing("cuda") or not ops.architectures():
    pytest.skip("needs operators that are compiled for CUDA", allow_module_level=True)


@pytest.mark.parametrize(
    ("code", "runs", "does_not"),
    [
        ("sm_80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (12, 0)]),
        ("sm_86", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("sm_120", [(12, 0), (12, 1)], [(10, 0), (11, 0)]),
        ("compute_90", [(9, 0), (10, 0), (12, 0)], [(8, 0), (8, 9)]),
    ],
)
def test_what_runs_where(code: str, runs: list[tuple[int, int]], does_not: list[tuple[int, int]]) -> None:
    assert all(cards.runs(code, capability) for capability in runs)
    assert not any(cards.runs(code, capability) for capability in does_not)


def test_reasons() -> None:
    assert cards.unfit(("sm_80", "compute_80"), (12, 0)) is None
    assert "7.5, and they need 8.0" in (cards.unfit(("sm_75", "compute_75"), (7, 5)) or "")
    reason = cards.unfit(("sm_90", "compute_90"), (8, 0)) or ""
    assert "holds sm_90, compute_90" in reason and "TORCH_CUDA_ARCH_LIST='8.0'" in reason


def test_the_library_says_what_it_holds() -> None:
    assert all(re.fullmatch(r"(sm|compute)_\d+", each) for each in ops.architectures())
    assert ops.architectures()[-1].startswith("compute_")


# Every operator once, on fake tensors: what reaches the dispatcher is what was chosen.
PROGRAM = """
import sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from fastcssl import ops
from fastcssl.data import augment

if len(sys.argv) > 1:
    ops._ARCHITECTURES = tuple(sys.argv[1].split(";"))
augment.photometric_torch = lambda crops, *_: print("photometric by torch")


class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "fastcssl":
            print(function._schema.name.removeprefix("fastcssl::"))
        return function(*arguments, **(options or {}))


with FakeTensorMode(), torch.device("cuda"):
    query, positive = (torch.empty(8, 64, requires_grad=True) for _ in range(2))
    bank, keys = torch.empty(100, 64), torch.empty(8, 64)
    pointer, filled = (torch.zeros((), dtype=torch.int64) for _ in range(2))
    crops, columns = torch.empty(2, 8, 8, 3, dtype=torch.uint8), torch.empty(2, 9)
    with Calls():
        ops.info_nce(query, positive, [bank], 0.2).sum().backward()
        loss_M = ops.info_nce_enqueue(query, positive, [bank], 0.2, [keys], [pointer], filled=[filled])
        loss_M.sum().backward()
        ops.enqueue(bank, keys, pointer, filled)
        augment.photometric(crops, columns, mean=(0.5,) * 3, std=(0.5,) * 3)
    for call in (lambda: ops.info_nce(query, positive, [bank], 0.2, impl="cuda"),
                 lambda: ops.enqueue(bank, keys, pointer, filled, impl="cuda"),
                 lambda: augment.photometric(crops, columns, mean=(0.5,) * 3, std=(0.5,) * 3, impl="fused")):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            print("refused:", error)

    def graph(module, _):
        print("in one graph:", *(str(node.target) for node in module.graph.nodes if "fastcssl" in str(node.target)))
        return module

    torch.compile(lambda x: ops.info_nce(x, positive, [bank], 0.2), fullgraph=True, backend=graph)(query)
"""
COMPILED = ["info_nce_sweep", "info_nce_sweep_enqueue", "enqueue", "photometric"]


@pytest.mark.parametrize("capability", [80, 89, 90, 121])
def test_compiled_operators_run_where_there_is_code(capability: int) -> None:
    lines = fake_cuda.run(PROGRAM, capability=capability).splitlines()
    assert lines == [*COMPILED, "in one graph: fastcssl.info_nce_sweep"]


@pytest.mark.parametrize(
    ("capability", "library", "reason"),
    [
        (75, "", "compute capability 7.5, and they need 8.0"),
        (70, "sm_70;compute_70", "compute capability 7.0, and they need 8.0"),
        (80, "sm_90;compute_90", "holds sm_90, compute_90, none of which runs on a card of compute capability 8.0"),
    ],
)
def test_plain_torch_runs_elsewhere(capability: int, library: str, reason: str) -> None:
    out = fake_cuda.run(PROGRAM, *([library] if library else []), capability=capability)
    lines = out.splitlines()
    assert not [line for line in lines if line in COMPILED], out
    assert "photometric by torch" in lines and "in one graph: fastcssl.info_nce_chunked.default" in lines
    assert out.count("refused:") == 3 and out.count(reason) == 3, out


AUTOCAST = """
import torch
from fastcssl.learn.precision import amp_dtype
torch.cuda._check_bf16_tensor_supported = lambda _: True  # as on real cards, which can hold such tensors
print(amp_dtype("auto", torch.device("cuda")), torch.cuda.is_bf16_supported())
"""


@pytest.mark.parametrize(("capability", "dtype"), [(70, torch.float16), (75, torch.float16), (80, torch.bfloat16)])
def test_auto_precision_does_not_count_emulation(capability: int, dtype: torch.dtype) -> None:
    assert fake_cuda.run(AUTOCAST, capability=capability).strip() == f"{dtype} True"
