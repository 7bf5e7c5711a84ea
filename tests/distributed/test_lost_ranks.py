"""What a rank says when another one is lost, in every collective and wherever DDP communicates by itself."""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from processes import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastcssl.distributed import world as dist
from fastcssl.distributed.world import RankLost, World


def lost_task(world: World, how: str, action: str) -> list[str]:
    world.barrier()
    if world.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    x = torch.ones(3, requires_grad=True)
    actions: dict[str, Callable[[], object]] = {
        "agree": lambda: world.agree(1),
        "gather": lambda: world.gather(x),
        "total": lambda: world.total(x),
        "share": lambda: world.share("text"),
    }
    said = []
    for name in (action, *actions):  # also when it was known already
        with pytest.raises(RankLost) as caught:
            actions[name]()
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize(("how", "action"), [("killed", "agree"), ("killed", "gather"), ("stuck", "total")])
def test_a_lost_rank_is_named_as_such(how: str, action: str) -> None:
    with Ranks(2, timeout_s=4.0 if how == "stuck" else 60.0) as short_lived:
        short_lived.send(lost_task, how, action)
        (said,) = short_lived.results([0], timeout_s=30)
    for message in said:
        assert message.startswith("Another rank was lost during ") and message.endswith("other ranks says why.")
        assert "\n" not in message and ".cc:" not in message
    assert ("imed out" if how == "stuck" else "onnection") in said[0]


def lost_in_backward_task(world: World) -> tuple[str, str]:
    model = DistributedDataParallel(nn.Linear(3, 2))
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLost) as caught, dist.watched("the backward pass"):
        model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="shape mismatch") as other, dist.watched("a step"):
        raise RuntimeError("shape mismatch")
    return str(caught.value), type(other.value).__name__


def test_a_rank_lost_in_ddps_backward_is_named_when_watched() -> None:
    with Ranks(2) as short_lived:
        short_lived.send(lost_in_backward_task)
        ((said, other),) = short_lived.results([0], timeout_s=30)
    assert said.startswith("Another rank was lost during the backward pass (") and other == "RuntimeError"


def lost_between_steps_task(world: World) -> str:
    """DDP arranges its buckets, and communicates, at the beginning of its second forward pass."""
    model = DistributedDataParallel(nn.Linear(3, 2))
    model(torch.ones(2, 3)).sum().backward()
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLost) as caught, dist.watched("the forward pass", by_type=True):
        model(torch.ones(2, 3))
    return str(caught.value)


def test_a_rank_lost_in_ddps_forward_is_named_by_where_the_error_came_from() -> None:
    with Ranks(2) as short_lived:
        short_lived.send(lost_between_steps_task)
        (said,) = short_lived.results([0], timeout_s=30)
    assert said.startswith("Another rank was lost during the forward pass (") and ".cc:" not in said
    with pytest.raises(RuntimeError, match=r"^A socket of the lamp") as other, dist.watched("a step", by_type=True):
        raise RuntimeError("A socket of the lamp is broken.")
    assert not isinstance(other.value, RankLost)
