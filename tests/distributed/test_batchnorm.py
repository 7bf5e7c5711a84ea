"""BatchNorm over all ranks against torch's on one process that holds every row; alone, in copies, and inside DDP."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from processes import run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastcssl.distributed.world import BatchNormAcrossRanks, World, synchronised

CPU = torch.device("cpu")
sizes = pytest.mark.parametrize("size", [2, 4])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def equal(a: Tensor, b: Tensor, within: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=within, atol=within)


SHAPES = {"rows": (12, 5), "signals": (12, 5, 3), "images": (12, 5, 3, 4), "channels-last": (12, 5, 3, 4)}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.0},
    {"momentum": None},
    {"eps": 0.1, "affine": False},
    {"track_running_stats": False},
]


def batch_norm(shape: tuple[int, ...], **options: Any) -> nn.Module:
    """With weights and statistics that are not the initial ones."""
    made = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1], **options).double()
    for seed, tensor in enumerate((*made.parameters(), made.running_mean, made.running_var)):
        if tensor is not None:
            tensor.data = numbers(shape[1], seed=seed).abs() + 0.5
    return made


def batches(kind: str) -> list[Tensor]:
    """Two; the samples differ in mean and spread, so that no rank's statistics are the union's."""
    shape = SHAPES[kind]
    spread_N = torch.linspace(0.5, 3, shape[0], dtype=torch.float64).view(-1, *[1] * (len(shape) - 1))
    both = [(numbers(*shape, seed=seed) + 2) * spread_N for seed in (0, 1)]
    return [x.to(memory_format=torch.channels_last) for x in both] if kind == "channels-last" else both


def parts_of(x_G: Tensor, size: int, even: bool) -> tuple[Tensor, ...]:
    return x_G.chunk(size) if even else x_G.split([len(x_G) - 2 * (size - 1), *[2] * (size - 1)])


def bn_loss(rank: int, y: Tensor) -> Tensor:
    return (rank + 1) * ((y - rank) ** 3).sin().sum()


def bn_task(world: World, kind: str, options: dict[str, Any], even: bool) -> list[tuple[Tensor, ...]]:
    norm = synchronised(batch_norm(SHAPES[kind], **options), replace(world, scope="local"), CPU)
    assert type(norm) is BatchNormAcrossRanks
    found = []
    for x_G in batches(kind):
        norm.zero_grad()
        x = parts_of(x_G, world.size, even)[world.rank].clone().requires_grad_()
        y = norm(x)
        assert y.is_contiguous(memory_format=torch.channels_last) == x.is_contiguous(memory_format=torch.channels_last)
        bn_loss(world.rank, y).backward()
        assert x.grad is not None
        grads = [parameter.grad for parameter in norm.parameters()]
        state = [buffer.clone() for buffer in norm.buffers()]
        alone = norm.eval()(x[:1].detach() + world.rank).detach()  # asks nobody
        norm.train()
        found.append((y.detach(), x.grad, torch.stack(grads) if grads else torch.zeros(0), alone, *state))
    return found


@pytest.mark.parametrize(("kind", "options", "even"), [*((kind, {}, True) for kind in SHAPES), ("rows", {}, False)])
@sizes
def test_batch_norm_is_that_of_the_union(size: int, kind: str, options: dict[str, Any], even: bool) -> None:
    check_batch_norm(size, kind, options, even)


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_batch_norm_with_other_options_is_that_of_the_union(options: dict[str, Any]) -> None:
    check_batch_norm(2, "images", options, True)


def check_batch_norm(size: int, kind: str, options: dict[str, Any], even: bool) -> None:
    norm = batch_norm(SHAPES[kind], **options)
    parts = run(size, bn_task, kind, options, even)
    for step, x_G in enumerate(batches(kind)):
        norm.zero_grad()
        x = x_G.clone().requires_grad_()
        y = norm(x)
        torch.stack([bn_loss(rank, part) for rank, part in enumerate(parts_of(y, size, even))]).sum().backward()
        assert x.grad is not None
        equal(torch.cat([part[step][0] for part in parts]), y.detach())
        equal(torch.cat([part[step][1] for part in parts]), x.grad, within=1e-9)
        grads = [parameter.grad for parameter in norm.parameters()]
        equal(sum(part[step][2] for part in parts), torch.stack(grads) if grads else torch.zeros(0), within=1e-9)
        for rank, part in enumerate(parts):
            state = list(norm.buffers())
            assert len(part[step][4:]) == len(state)
            for mine, theirs in zip(part[step][4:], state, strict=True):
                equal(mine, theirs)
            equal(part[step][3], norm.eval()(parts_of(x_G, size, even)[rank][:1] + rank).detach())
            norm.train()


def bn_copies_task(world: World, x_G: Tensor) -> tuple[Tensor, Tensor, list[str], Tensor]:
    shared = nn.BatchNorm1d(5)
    module = nn.ModuleDict({"a": nn.Sequential(nn.Linear(5, 5), shared), "b": shared, "c": nn.BatchNorm2d(2)})
    plain_keys, weight = list(module.state_dict()), shared.weight
    module = synchronised(module, world, CPU)
    assert module["a"][1] is module["b"] and module["b"].weight is weight and type(module["c"]) is BatchNormAcrossRanks
    assert list(module.state_dict()) == plain_keys
    slow = copy.deepcopy(module["b"]).requires_grad_(False)
    with torch.no_grad():
        y = slow(x_G.float().chunk(world.size)[world.rank])
    assert torch.equal(module["b"].running_mean, torch.zeros(5)) and not y.requires_grad
    half = module["b"](x_G.chunk(world.size)[world.rank].to(torch.bfloat16))
    return y, half, [str(type(m).__name__) for m in synchronised(module, World(), CPU).modules()], slow.running_var


def test_batch_norm_in_copies_under_no_grad_and_in_float32() -> None:
    x_G = numbers(16, 5) + 1000  # the sum of squares would lose the variance
    y_G = nn.functional.batch_norm(x_G.float().double(), None, None, training=True)
    for rank, (y, half, names, running_var) in enumerate(run(2, bn_copies_task, x_G)):
        torch.testing.assert_close(y.double(), y_G.chunk(2)[rank], rtol=0, atol=2e-4)
        torch.testing.assert_close(running_var.double(), 0.9 + 0.1 * x_G.float().double().var(0), rtol=1e-5, atol=0)
        assert y.dtype == torch.float32 and half.dtype == torch.bfloat16 and half.abs().max() < 10
        assert names.count("BatchNormAcrossRanks") == 2


def test_batch_norm_for_gpus_is_torchs_and_one_rank_needs_none() -> None:
    shared = nn.BatchNorm1d(3)
    module = nn.Sequential(shared, nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)), shared)
    assert synchronised(module, World(), torch.device("cuda")) is module and module[0] is shared
    synchronised(module, World(0, 2), torch.device("cuda", 0))
    assert type(module[0]) is nn.SyncBatchNorm and module[2] is module[0] and module[0].weight is shared.weight
    assert type(module[1][1]) is nn.SyncBatchNorm
    with pytest.raises(ValueError, match=r"needs \[N, C\] or \[N, C, ...\], but the input is \[4\]"):
        BatchNormAcrossRanks(4, World(0, 2))(torch.ones(4))


def network() -> nn.Module:
    torch.manual_seed(3)
    stem = (nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*stem, nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5)).double()


def ddp_loss(z_ND: Tensor, world: World) -> Tensor:
    """NT-Xent-like: this rank's rows against those of all."""
    z_ND = nn.functional.normalize(z_ND)
    logits_NG = z_ND @ world.gather(z_ND).T / 0.3
    return nn.functional.cross_entropy(logits_NG, world.first_row(len(z_ND)) + torch.arange(len(z_ND)))


def ddp_task(world: World, x_G: Tensor) -> list[Tensor]:
    model = DistributedDataParallel(synchronised(network(), world, CPU), forward_sync_buffers=False)
    ddp_loss(model(x_G.chunk(world.size)[world.rank]), world).backward()
    return [parameter.grad for parameter in model.parameters()]


@sizes
def test_ddp_with_batch_norm_and_gather_trains_the_union(size: int) -> None:
    x_G, model = numbers(8, 3, 6, 6), network()
    ddp_loss(model(x_G), World()).backward()
    for grads in run(size, ddp_task, x_G):
        for mine, truth in zip(grads, model.parameters(), strict=True):
            assert truth.grad is not None
            equal(mine, truth.grad, within=1e-11)
