"""What ranks say to each other, on two and four real processes, against one process that holds everything.

The convention: rank r has a loss L_r, the mean over ranks is trained. So on each rank, the gradient of a weight
averaged over ranks is that of mean(L_r), and the gradient of an activation is that of sum(L_r).
"""

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from processes import RanksFailed, ranks, run
from torch import Tensor

from fastcssl.distributed import world as dist
from fastcssl.distributed.world import RankLost, World, connect, disconnect

CPU = torch.device("cpu")
sizes = pytest.mark.parametrize("size", [2, 4])


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def equal(a: Tensor, b: Tensor, within: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=within, atol=within)


# gather and total


def gather_loss(world: World, rank: int, z_ND: Tensor, z_GD: Tensor) -> Tensor:
    """Another function of all rows on every rank."""
    rows_N = rank * len(z_ND) + torch.arange(len(z_ND))
    similarity_NG = z_ND @ z_GD.T
    similarity_NG[torch.arange(len(z_ND)), rows_N] = -torch.inf
    return (rank + 1) * (torch.logsumexp(similarity_NG, dim=1) ** 2).mean() + z_GD[rank].sin().sum() / world.size


def gather_task(world: World, x_GF: Tensor, weight_FD: Tensor) -> tuple[Tensor, ...]:
    num_local = len(x_GF) // world.size
    first = world.first_row(num_local)
    weight_FD = weight_FD.clone().requires_grad_()
    z_ND = x_GF[first : first + num_local] @ weight_FD
    z_ND.retain_grad()
    z_GD = world.gather(z_ND)
    loss = gather_loss(world, world.rank, z_ND, z_GD)
    loss.backward()
    assert z_ND.grad is not None and weight_FD.grad is not None
    return z_GD.detach(), loss.detach(), z_ND.grad, weight_FD.grad


@sizes
def test_gather_has_the_value_and_the_gradient_of_one_process(size: int) -> None:
    x_GF, weight_FD = numbers(12, 5), numbers(5, 3, seed=1)
    weight = weight_FD.clone().requires_grad_()
    z_GD = x_GF @ weight
    z_GD.retain_grad()
    losses = [gather_loss(World(0, size), r, part, z_GD) for r, part in enumerate(z_GD.chunk(size))]
    torch.stack(losses).mean().backward()
    assert z_GD.grad is not None and weight.grad is not None

    parts = run(size, gather_task, x_GF, weight_FD)
    for rank, (gathered, loss, z_grad, _) in enumerate(parts):
        equal(gathered, z_GD.detach())
        equal(loss, losses[rank].detach())
        equal(z_grad, size * z_GD.grad.chunk(size)[rank])
    equal(torch.stack([part[3] for part in parts]).mean(0), weight.grad)


def total_loss(rank: int, z_ND: Tensor, moment_DD: Tensor, mean: Tensor) -> Tensor:
    return (rank + 1) * (moment_DD**3).sum() + (z_ND * mean).sum().tanh()


def total_task(world: World, x_GF: Tensor, weight_FD: Tensor) -> tuple[Tensor, ...]:
    weight_FD = weight_FD.clone().requires_grad_()
    z_ND = x_GF.chunk(world.size)[world.rank] @ weight_FD
    z_ND.retain_grad()
    # One of a matrix that is not contiguous, one without dimensions.
    moment_DD = world.total((z_ND.T @ z_ND.sin()).T) / len(x_GF)
    loss = total_loss(world.rank, z_ND, moment_DD, world.total(z_ND.sum()) / len(x_GF))
    loss.backward()
    assert z_ND.grad is not None and weight_FD.grad is not None
    return moment_DD.detach(), loss.detach(), z_ND.grad, weight_FD.grad


@sizes
def test_total_has_the_value_and_the_gradient_of_one_process(size: int) -> None:
    x_GF, weight_FD = numbers(8, 5), numbers(5, 3, seed=1) / 4
    weight = weight_FD.clone().requires_grad_()
    z_GD = x_GF @ weight
    z_GD.retain_grad()
    moment_DD, mean = (z_GD.T @ z_GD.sin()).T / 8, z_GD.sum() / 8
    losses = [total_loss(r, part, moment_DD, mean) for r, part in enumerate(z_GD.chunk(size))]
    torch.stack(losses).mean().backward()
    assert z_GD.grad is not None and weight.grad is not None

    parts = run(size, total_task, x_GF, weight_FD)
    for rank, (moment, loss, z_grad, _) in enumerate(parts):
        equal(moment, moment_DD.detach())
        equal(loss, losses[rank].detach())
        equal(z_grad, size * z_GD.grad.chunk(size)[rank])
    equal(torch.stack([part[3] for part in parts]).mean(0), weight.grad)


AWKWARD: list[Callable[[], Tensor]] = [
    lambda: torch.arange(24),
    lambda: torch.arange(24) % 3 == 0,
    lambda: torch.arange(24, dtype=torch.uint8),
    lambda: numbers(24, 2).to(torch.bfloat16),
    lambda: numbers(24, dtype=torch.float32),
    lambda: numbers(2, 24, dtype=torch.float16).T,
    lambda: numbers(24, 3, 4, 5).to(memory_format=torch.channels_last),
    lambda: numbers(24, 6)[:, ::2],
]


def keys_task(world: World, scope: dist.Scope) -> list[tuple[Tensor, bool]]:
    world = replace(world, scope=scope)
    found = []
    for make in AWKWARD:
        x_N = make().chunk(world.size)[world.rank]
        x_N = x_N.requires_grad_() if x_N.is_floating_point() else x_N
        x_G = world.gather_keys(x_N)
        found.append((x_G, x_G.requires_grad))
        if scope == "global":
            assert torch.equal(world.gather(x_N), x_G) and world.gather(x_N).requires_grad == x_N.requires_grad
    return found


@pytest.mark.parametrize("scope", ["global", "local"])
@sizes
def test_keys_are_gathered_in_every_scope_and_type_without_gradient(size: int, scope: dist.Scope) -> None:
    for found in run(size, keys_task, scope):
        for (x_G, has_gradient), make in zip(found, AWKWARD, strict=True):
            assert torch.equal(x_G, make()) and x_G.dtype == make().dtype and not has_gradient


def typed_gradient_task(world: World, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x_N = torch.full((3,), world.rank + 1.0, dtype=dtype, requires_grad=True)
    weight_G = torch.arange(3 * world.size).to(dtype)
    (world.gather(x_N) * weight_G).sum().backward()
    assert x_N.grad is not None
    gathered, x_N.grad = x_N.grad, None
    (world.total(x_N) * 3).sum().backward()
    return gathered, x_N.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_keep_their_type(dtype: torch.dtype) -> None:
    for rank, (gathered, total) in enumerate(run(2, typed_gradient_task, dtype)):
        assert torch.equal(gathered, 2 * torch.arange(6).to(dtype).chunk(2)[rank])
        assert torch.equal(total, torch.full((3,), 6.0, dtype=dtype))


def local_task(world: World) -> None:
    world = replace(world, scope="local")
    x = numbers(4, 3, seed=world.rank).requires_grad_()
    assert world.gather(x) is x and world.total(x) is x
    assert world.count == 1 and world.first_row(4) == 0


def test_local_scope_is_the_identity() -> None:
    run(2, local_task)


def test_a_world_of_one_needs_nobody() -> None:
    world, x = World(), numbers(4, 3).requires_grad_()
    assert world.gather(x) is x and world.total(x) is x and torch.equal(world.gather_keys(x), x)
    assert not world.gather_keys(x).requires_grad
    assert (world.count, world.first_row(7), world.agree(3), world.share("text")) == (1, 0, 3, "text")
    world.barrier()
    (alone,) = world.collect(x)
    assert torch.equal(alone, x) and alone.data_ptr() != x.data_ptr()
    assert copy.deepcopy(World(1, 3, "local")) == World(rank=1, size=3, scope="local")


def test_without_a_process_group_the_numbers_are_known_and_sending_is_refused() -> None:
    world = World(1, 4)
    assert world.count == 4 and world.first_row(8) == 8 and replace(world, scope="local").first_row(8) == 0
    for send in (world.gather, world.total, world.gather_keys, world.collect):
        with pytest.raises(RuntimeError, match=r"^Rank 1 of 4 is not connected to the others; start with torchrun"):
            send(torch.ones(2))
    with pytest.raises(RuntimeError, match="not connected"):
        world.barrier()
    with pytest.raises(ValueError, match="rank 4 does not exist in a world of 4"):
        World(4, 4)
    with pytest.raises(ValueError, match="scope is 'node'; use 'global' or 'local'"):
        World(scope="node")  # type: ignore[arg-type]


def misuse_task(world: World) -> tuple[str, str]:
    said = []
    with pytest.raises(RuntimeError) as caught:
        World(world.rank, world.size + 1).barrier()
    said.append(str(caught.value))
    x = torch.ones(2, requires_grad=True)
    (grad,) = torch.autograd.grad((world.gather(x) ** 2).sum() + (world.total(x) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError) as caught:
        grad.sum().backward()
    said.append(str(caught.value))
    return said[0], said[1]


def test_another_world_and_a_second_derivative_are_refused() -> None:
    for rank, (other, second) in enumerate(run(2, misuse_task)):
        assert other == f"This is rank {rank} of 2, not {rank} of 3; use the World that connect() returned."
        assert "once_differentiable" in second


# Flags, texts, tensors


def talk_task(world: World, texts: list[str]) -> tuple[list[int], list[str], list[Tensor]]:
    codes = [world.agree(code) for code in (world.rank, -world.rank, 5 if world.rank == 1 else 0)]
    shared = [world.share(text if world.rank == 0 else "another") for text in texts]
    world.barrier()
    states = world.collect(torch.Generator().manual_seed(world.rank).get_state())
    assert len({state.untyped_storage().data_ptr() for state in states}) == world.size
    assert states[0].untyped_storage().nbytes() == states[0].nbytes  # a checkpoint of one does not hold them all
    return codes, shared, [*states, *world.collect(torch.tensor(world.rank))]


@sizes
def test_agree_share_collect(size: int) -> None:
    texts = ["run/näme", "", "x" * 70_000, "odd \udcff byte"]
    for codes, shared, collected in run(size, talk_task, texts):
        assert codes == [size - 1, 0, 5] and shared == texts
        for rank in range(size):
            assert torch.equal(collected[rank], torch.Generator().manual_seed(rank).get_state())
            assert collected[size + rank] == rank


# connect

PROGRAM = """
import json, sys, torch
from fastcssl.distributed.world import connect, disconnect, World
torch.set_num_threads(1)
world, device = connect("cpu", timeout_s=60)
x = torch.full((2,), float(world.rank), requires_grad=True)
(world.gather(x) * torch.arange(4)).sum().backward()
found = [world.rank, world.size, world.scope, str(device), world.agree(world.rank), world.share(f"from {world.rank}")]
open(sys.argv[1] + f"/{world.rank}.json", "w").write(json.dumps([*found, x.grad.tolist()]))
disconnect()
disconnect()
# One write: lines of two ranks must not mix.
print(f"initialised {torch.distributed.is_initialized()}\\n", end="", flush=True)
"""


def test_connect_under_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*torchrun, str(program), str(tmp_path)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("initialised False") == 2 and "Warning" not in done.stderr, done.stderr
    for rank, grad in enumerate(([0.0, 2.0], [4.0, 6.0])):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == [rank, 2, "global", "cpu", 1, "from 0", grad]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets torchrun's variables, and only these."""

    def launch(**variables: int | str) -> None:
        for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(key, raising=False)
        for key, value in variables.items():
            monkeypatch.setenv(key, str(value))

    return launch


def test_connect_alone_makes_no_process_group(launched: Callable[..., None]) -> None:
    for variables in ({}, {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}):
        launched(**variables)
        assert connect("cpu") == (World(), CPU)
        assert not torch.distributed.is_initialized()
    disconnect()


def test_connect_refuses_half_an_environment_and_an_unknown_device(launched: Callable[..., None]) -> None:
    launched(WORLD_SIZE=2, RANK=0, MASTER_ADDR="localhost")
    with pytest.raises(RuntimeError, match="WORLD_SIZE is 2, but LOCAL_RANK, MASTER_PORT is not set"):
        connect("cpu")
    with pytest.raises(ValueError, match="The device is 'tpu'; use 'auto', 'cpu' or 'cuda'"):
        connect("tpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["auto", "cuda"])
def test_connect_takes_the_gpu_of_the_local_rank(
    kind: dist.DeviceKind, launched: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **_: taken.extend(args))
    monkeypatch.setattr(dist, "_watch_peers", taken.append)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # connect() sets it, and not for the tests after this
    launched(WORLD_SIZE=4, RANK=3, LOCAL_RANK=1, MASTER_ADDR="localhost", MASTER_PORT=1)
    assert connect(kind) == (World(3, 4), torch.device("cuda", 1))
    assert taken == [torch.device("cuda", 1), "cpu:gloo,cuda:nccl", World(3, 4)]
    launched(WORLD_SIZE=4, RANK=3, LOCAL_RANK=3, MASTER_ADDR="localhost", MASTER_PORT=1)
    with pytest.raises(RuntimeError, match=r"needs GPU 3 \(counted from 0\), but it sees 2 GPUs\."):
        connect(kind)


# The harness itself


def broken_task(world: World, how: str) -> None:
    if world.rank == 1 and how == "raises":
        raise ValueError("on purpose")
    if world.rank == 1 and how == "hangs":
        time.sleep(60)
    world.barrier()


@pytest.mark.parametrize(("how", "says"), [("raises", "ValueError: on purpose"), ("hangs", "in broken_task")])
def test_what_fails_on_a_rank_is_reported_and_the_next_call_works(how: str, says: str) -> None:
    before = ranks(2)
    before.run(rank_task)
    with pytest.raises(RanksFailed, match=rf"(?s)rank 1 of 2 .*{says}"):
        before.run(broken_task, how, timeout_s=1 if how == "hangs" else 30)
    assert run(2, rank_task) == [0, 1] and ranks(2) is not before and before.closed


def rank_task(world: World) -> int:
    return world.rank


@pytest.mark.parametrize(("error", "parted"), [(dist.Agreed, 1), (RankLost, 0)])
def test_ranks_part_in_peace_only_when_all_end_alike(
    error: type[Exception], parted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(dist, "disconnect", lambda: calls.append(True))
    with pytest.raises(error), dist.connected("cpu"):
        raise error("so it is")
    assert len(calls) == parted
