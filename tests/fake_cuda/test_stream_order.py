"""Every loader on a fake card: no unordered access as it is, and each defect put back is found."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from loading import NAMES, PACKAGES

import fake_cuda
from fastcssl.data.prepared import Prepared

Outcomes = dict[str, dict[str, Any]]
PROGRAM = "import runpy; runpy.run_module('fake_cuda.loader_epochs', run_name='__main__')"
SOUND = {  # the host's waits that have nothing to do with buffers: the resident images are copied once
    "native": {},
    "resident": {"blocking copy": 1},
    "resident, too many images": {},
    "torchvision": {},
    "ffcv": {},
    "dali": {},
    "dali, its photometry": {},
    "dali, its photometry, float16": {},
    "dali, its photometry, bfloat16": {},
}
READS, OVERWRITES, FREED = "reads what", "overwrites what", "was freed while"
PHOTOMETRIC = "fastcssl.photometric.default on side stream"
DEFECTS = {
    "resident: crops on the main stream": (PHOTOMETRIC, READS, "on the main stream wrote"),
    "native: no wait for the batch": ("on the main stream", READS, PHOTOMETRIC),
    "resident: no wait for the batch": ("on the main stream", READS, PHOTOMETRIC),
    "torchvision: no event recorded": ("on the main stream", READS, PHOTOMETRIC),
    "native: no record_stream": ("memory of side stream", FREED, "on the main stream"),
    "dali: no record_stream": ("memory of side stream", FREED, "on the main stream"),
    "native: no wait of the host": (
        "the native engine on the host",
        OVERWRITES,
        "aten._to_copy.default on side stream",
    ),
    "ffcv: no wait of the host": ("FFCV on the host", OVERWRITES, "aten._to_copy.default on side stream"),
    "dali: no wait of the host": ("memory of a library", FREED, PHOTOMETRIC),
    "native: one buffer less": ("the native engine on the host", OVERWRITES, "aten._to_copy.default on side stream"),
    "ffcv: one buffer less": ("FFCV on the host", OVERWRITES, "aten._to_copy.default on side stream"),
    "dali: lent views handed out": ("memory of a library", FREED, "on the main stream"),
    "dali: no wait for a replacement": ("memory of a library", FREED, "aten.copy_.default on side stream"),
}
NOT_OF_BUFFERS = ("blocking copy", "copy of pageable memory", "device")


def test_an_access_is_ordered_by_an_event_and_by_nothing_less() -> None:
    """The checker itself, by hand: three races and what prevents each of them."""
    code = """
import torch
from fake_cuda.stream_order import StreamOrder, StreamRace

def race(what):
    try:
        what()
    except StreamRace as error:
        print(error)
    else:
        print("ordered")

with StreamOrder() as order:
    host, pageable = torch.ones(4, pin_memory=True), torch.ones(4)
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        made = host.to("cuda", non_blocking=True)
        event.record()
    race(lambda: made + 1)
    torch.cuda.current_stream().wait_event(event)
    race(lambda: made + 1)
    race(lambda: host.zero_())
    event.synchronize()
    race(lambda: host.zero_())
    made = None
    race(order.catch_up)
    with torch.cuda.stream(side):
        made = pageable.to("cuda", non_blocking=True)
        event.record()
    torch.cuda.current_stream().wait_event(event)
    made + 1
    made.record_stream(torch.cuda.current_stream())
    made = None
    race(order.catch_up)
    pageable.to("cuda")
    print(dict(order.waits))
"""
    assert fake_cuda.run(code).splitlines() == [
        "aten.add.Tensor on the main stream reads what aten._to_copy.default on side stream 1 wrote, in no order",
        "ordered",
        "aten.zero_.default on the host overwrites what aten._to_copy.default on side stream 1 reads, in no order",
        "ordered",
        "memory of side stream 1 was freed while aten.add.Tensor on the main stream may still use it",
        "ordered",
        "{'event': 1, 'copy of pageable memory': 1, 'blocking copy': 1}",
    ]


@pytest.fixture(scope="module")
def outcomes(prepared: Callable[[str], Prepared]) -> Outcomes:
    """Every case, in one process."""
    folders = {}
    for name in NAMES:
        try:
            folders[name] = str(prepared(name).folder)
        except pytest.skip.Exception:
            assert name in PACKAGES, name
    found: Outcomes = json.loads(fake_cuda.run(PROGRAM, json.dumps(folders)))
    return found


def outcome(outcomes: Outcomes, case: str) -> dict[str, Any]:
    if case not in outcomes:
        pytest.skip("its package is not installed")
    return outcomes[case]


@pytest.mark.parametrize("case", SOUND)
def test_a_loader_orders_all_accesses(case: str, outcomes: Outcomes) -> None:
    found = outcome(outcomes, case)
    assert found["race"] == ""
    assert found["waits"]["event"] > 0
    assert {cause: count for cause, count in found["waits"].items() if cause in NOT_OF_BUFFERS} == SOUND[case]


@pytest.mark.parametrize("case", DEFECTS)
def test_a_defect_is_found(case: str, outcomes: Outcomes) -> None:
    race = outcome(outcomes, case)["race"]
    assert race, "nothing was found"
    for words in DEFECTS[case]:
        assert words in race


def test_a_loader_has_one_stream(outcomes: Outcomes) -> None:
    """The allocator keeps free memory for each stream."""
    for case in ("native", "resident", "torchvision"):
        assert outcomes[case]["side_streams"] == 1
    assert outcomes["native: a stream per epoch"]["side_streams"] > 1


def test_the_gpu_tests_of_streams_run(prepared: Callable[[str], Prepared]) -> None:
    """All but the comparison of values and torch's sanitizer, which needs addresses and fake tensors have none."""
    code = """
import sys
from unittest.mock import patch
from fake_cuda.stream_order import StreamOrder
from fastcssl.data.prepared import Prepared
from gpu import test_streams
from torch.cuda import _sanitizer
data = Prepared.open(sys.argv[3])
with StreamOrder(), patch("torch.cuda._sleep") as sleep:
    views = test_streams.resident_views("cuda", data, busy=True)
    print(len(views) == 2 * (sleep.call_count - 2), {str(view.dtype) for view in views})
    print(test_streams.reserved_after_each_epoch("resident", data, 2))
    with patch.object(_sanitizer.cuda_sanitizer, "enabled", True):
        exec(test_streams.SANITIZED)
"""
    said = fake_cuda.run(code, "resident", "fused", str(prepared("resident").folder))
    assert said.splitlines() == ["True {'torch.float32'}", "[0, 0]", "finished"]


def test_copies_of_pageable_memory_are_counted(outcomes: Outcomes) -> None:
    assert outcomes["native: pageable memory"]["waits"]["copy of pageable memory"] > 0
