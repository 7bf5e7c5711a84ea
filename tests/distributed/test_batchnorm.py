"""BatchNorm over all ranks against torch's on one process that holds every row; alone, in copies, and inside DDP."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from processes import run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastcssl.distributed.batchnorm import ViewBatchNorm, synchronised, view_batch_norm
from fastcssl.distributed.world import World
from fastcssl.errors import UserError

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


def bn_loss(rank: int, y: Tensor) -> Tensor:
    return (rank + 1) * ((y - rank) ** 3).sin().sum()


def bn_task(world: World, kind: str, options: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    norm = synchronised(batch_norm(SHAPES[kind], **options), replace(world, scope="local"))
    assert type(norm) is ViewBatchNorm
    found = []
    for x_G in batches(kind):
        norm.zero_grad()
        x = x_G.chunk(world.size)[world.rank].clone().requires_grad_()
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


@pytest.mark.parametrize(("kind", "options"), [(kind, {}) for kind in SHAPES])
@sizes
def test_batch_norm_is_that_of_the_union(size: int, kind: str, options: dict[str, Any]) -> None:
    check_batch_norm(size, kind, options)


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_batch_norm_with_other_options_is_that_of_the_union(options: dict[str, Any]) -> None:
    check_batch_norm(2, "images", options)


def check_batch_norm(size: int, kind: str, options: dict[str, Any]) -> None:
    norm = batch_norm(SHAPES[kind], **options)
    parts = run(size, bn_task, kind, options)
    for step, x_G in enumerate(batches(kind)):
        norm.zero_grad()
        x = x_G.clone().requires_grad_()
        y = norm(x)
        torch.stack([bn_loss(rank, part) for rank, part in enumerate(y.chunk(size))]).sum().backward()
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
            equal(part[step][3], norm.eval()(x_G.chunk(size)[rank][:1] + rank).detach())
            norm.train()


def views_task(world: World, kind: str, options: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    """Two views stacked: this rank's rows of each."""
    norm = synchronised(batch_norm(SHAPES[kind], **options), world)
    norm.views.count = 2
    parts = [x_G.chunk(world.size)[world.rank] for x_G in batches(kind)]
    x = torch.cat(parts).requires_grad_()
    y = norm(x)
    bn_loss(world.rank, y).backward()
    assert x.grad is not None
    grads = [parameter.grad for parameter in norm.parameters()]
    running = [buffer for buffer in (norm.running_mean, norm.running_var) if buffer is not None]
    return [(y.detach(), x.grad, torch.stack(grads) if grads else torch.zeros(0), *running)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in SHAPES), *(("images", options) for options in OPTIONS[1:])], ids=str
)
def test_stacked_views_are_views_one_after_the_other(size: int, kind: str, options: dict[str, Any]) -> None:
    norm, xs = batch_norm(SHAPES[kind], **options), [x_G.clone().requires_grad_() for x_G in batches(kind)]
    ys = [norm(x) for x in xs]
    for rank in range(size):
        bn_loss(rank, torch.cat([y.chunk(size)[rank] for y in ys])).backward(retain_graph=True)
    grads = [parameter.grad for parameter in norm.parameters()]
    found = [views_task(World(), kind, options)] if size == 1 else run(size, views_task, kind, options)
    for rank, ((y, grad, _, *running),) in enumerate(found):
        equal(y, torch.cat([whole.chunk(size)[rank] for whole in ys]).detach())
        equal(grad, torch.cat([x.grad.chunk(size)[rank] for x in xs if x.grad is not None]), within=1e-9)
        for mine, theirs in zip(running, (norm.running_mean, norm.running_var), strict=False):
            equal(mine, theirs)
    equal(sum(part[0][2] for part in found), torch.stack(grads) if grads else torch.zeros(0), within=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_quick_form_on_one_rank_is_the_plain_one(dtype: torch.dtype) -> None:
    found = []
    for quick in (True, False):
        norm = synchronised(nn.BatchNorm2d(5), World())
        norm.views.count = 2
        x = torch.cat(batches("channels-last")).to(dtype, memory_format=torch.channels_last).requires_grad_()
        if dtype == torch.float64:
            norm.double()
        running = (norm.running_mean, norm.running_var)
        y = norm(x) if quick else view_batch_norm(x, norm.weight, norm.bias, running, [0.1, 0.1], 1e-5)
        assert y.is_contiguous(memory_format=torch.channels_last) and y.dtype == dtype
        bn_loss(0, y.double()).backward()
        found.append((y, x.grad, norm.weight.grad, norm.bias.grad, *running))
    for mine, theirs in zip(*found, strict=True):
        assert mine is not None and theirs is not None
        torch.testing.assert_close(mine, theirs)


def bn_copies_task(world: World, x_G: Tensor) -> tuple[Tensor, Tensor, list[str], Tensor]:
    shared = nn.BatchNorm1d(5)
    module = nn.ModuleDict({"a": nn.Sequential(nn.Linear(5, 5), shared), "b": shared, "c": nn.BatchNorm2d(2)})
    plain_keys, weight = list(module.state_dict()), shared.weight
    module = synchronised(module, world)
    assert module["a"][1] is module["b"] and module["b"].weight is weight and type(module["c"]) is ViewBatchNorm
    assert list(module.state_dict()) == plain_keys
    slow = copy.deepcopy(module["b"]).requires_grad_(False)
    with torch.no_grad():
        y = slow(x_G.float().chunk(world.size)[world.rank])
    assert torch.equal(module["b"].running_mean, torch.zeros(5)) and not y.requires_grad
    half = module["b"](x_G.chunk(world.size)[world.rank].to(torch.bfloat16))
    return y, half, [str(type(m).__name__) for m in synchronised(module, World()).modules()], slow.running_var


def test_batch_norm_in_copies_under_no_grad_and_in_float32() -> None:
    x_G = numbers(16, 5) + 1000  # the sum of squares would lose the variance
    y_G = nn.functional.batch_norm(x_G.float().double(), None, None, training=True)
    for rank, (y, half, names, running_var) in enumerate(run(2, bn_copies_task, x_G)):
        torch.testing.assert_close(y.double(), y_G.chunk(2)[rank], rtol=0, atol=2e-4)
        torch.testing.assert_close(running_var.double(), 0.9 + 0.1 * x_G.float().double().var(0), rtol=1e-5, atol=0)
        assert y.dtype == torch.float32 and half.dtype == torch.bfloat16 and half.abs().max() < 10
        assert names.count("ViewBatchNorm") == 2


def test_layers_are_replaced_around_their_own_weights() -> None:
    shared = nn.BatchNorm1d(3)
    module = nn.Sequential(shared, nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)), shared)
    for world in (World(), World(0, 2)):
        assert synchronised(module, world) is module
        assert type(module[0]) is ViewBatchNorm and module[2] is module[0] and module[0].weight is shared.weight
        assert type(module[1][1]) is ViewBatchNorm and module[1][1].views is module[0].views
    with pytest.raises(ValueError, match=r"needs \[N, C\] or \[N, C, ...\], but the input is \[4\]"):
        module[0](torch.ones(4))


class Other(nn.BatchNorm1d):
    """One whose forward may do anything."""


def test_an_unknown_batch_norm_is_left_on_one_rank_and_refused_on_several() -> None:
    assert type(synchronised(nn.Sequential(Other(3)), World())[0]) is Other
    with pytest.raises(UserError, match=r"class Other, whose statistics cannot be shared among ranks\. Train on one"):
        synchronised(nn.Sequential(Other(3)), World(0, 2))


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
    model = DistributedDataParallel(synchronised(network(), world), forward_sync_buffers=False)
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
