"""The fake runtime itself: a backward pass on "cuda:0" works, and what needs a card or a value fails."""

import pytest

import fake_cuda

STEP = """
import sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode(), torch.device("cuda"):
    layer = torch.nn.Conv2d(3, 8, 3)
    with torch.autocast("cuda", getattr(torch, sys.argv[1])):
        y = layer(torch.empty(4, 3, 8, 8))
        loss = y.float().sum()
    loss.backward()
    print(y.dtype, y.device, layer.weight.grad.device, torch.cuda.get_device_capability())
"""


def test_a_backward_pass_under_autocast() -> None:
    assert fake_cuda.run(STEP, "bfloat16") == "torch.bfloat16 cuda:0 cuda:0 (9, 0)\n"
    assert fake_cuda.run(STEP, "float16", capability=75) == "torch.float16 cuda:0 cuda:0 (7, 5)\n"


def test_streams_and_events_are_logged() -> None:
    code = """
import torch
from fake_cuda import streams_log
torch.cuda.init(); streams_log.take()
side, event = torch.cuda.Stream(), torch.cuda.Event()
event.record(side)
torch.cuda.current_stream().wait_event(event)
event.synchronize()
entries = streams_log.take()
print([entry.kind.name for entry in entries], entries[0].stream == side.cuda_stream, entries[1].stream)
"""
    assert fake_cuda.run(code) == "['RECORD', 'WAIT', 'EVENT_SYNC'] True 0\n"


@pytest.mark.parametrize("code", ["torch.zeros(2, device='cuda')", "fake.zeros(2, device='cuda').sum().item()"])
def test_values_cannot_be_had(code: str) -> None:
    program = f"""
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
class fake:
    @staticmethod
    def zeros(*args, **kwargs):
        with FakeTensorMode():
            return torch.zeros(*args, **kwargs)
try:
    {code}
except Exception as error:
    print(type(error).__name__)
else:
    raise SystemExit("a value was had")
"""
    assert fake_cuda.run(program).strip() in {"AcceleratorError", "DataDependentOutputException"}
