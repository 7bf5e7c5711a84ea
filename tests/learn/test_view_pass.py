"""All views in one pass: the numbers of separate passes, for every method and strategy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lab import Lab, batches
from small_runs import prepared
from torch import Tensor, nn

from fastcssl.distributed.batchnorm import ViewBatchNorm, synchronised
from fastcssl.distributed.world import World
from fastcssl.learn import methods, strategies
from fastcssl.learn.memory import EmaCopy, FrozenCopy
from fastcssl.learn.nets import ViewPass, adjacent, side_by_side


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("views") / "data")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(3)
    stem = (nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    made = nn.Sequential(*stem, nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.ReLU(), nn.Linear(6, 5))
    return synchronised(made.double().to(memory_format=torch.channels_last), World())


def separately(self: ViewPass, views: Any) -> Any:
    found = [self.network(view) for view in views]
    return tuple(zip(*found, strict=True)) if isinstance(found[0], tuple) else tuple(found)


def close(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(
                b[key], value, rtol=1e-12, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}"
            )
        elif isinstance(value, dict):
            close(value, b[key])
        else:
            assert value == b[key], key


@pytest.mark.parametrize("strategy", strategies.names())
@pytest.mark.parametrize("method", methods.names())
def test_a_step_is_that_of_separate_passes(
    method: str, strategy: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Terms, gradients, and every state that a step leaves behind, running statistics of all networks included."""
    found = []
    for each in (ViewPass.__call__, separately):
        monkeypatch.setattr(ViewPass, "__call__", each)
        lab = Lab(method, strategy, data, first_task_steps=1)
        terms = lab.backward()
        gradients = {name: p.grad for name, p in lab.parameters().items() if p.grad is not None}
        found.append({"terms": terms, "gradients": gradients, "state": lab.state(), "banks": lab.banks()})
        lab.close()
    close(*found)


def test_sizes_are_passes_and_views_keep_their_places() -> None:
    passes: list[tuple[int, ...]] = []
    net = network()
    net.register_forward_pre_hook(lambda _, inputs: passes.append(tuple(inputs[0].shape)))
    views = [numbers(4, 3, size, size, seed=seed) for seed, size in enumerate((12, 8, 12, 8, 8))]
    together = ViewPass(net)(views)
    assert passes == [(8, 3, 12, 12), (12, 3, 8, 8)]
    assert int(net[1].num_batches_tracked) == 5
    for view, found in zip(views, together, strict=True):
        torch.testing.assert_close(found, network()(view), rtol=1e-12, atol=1e-12)


class Coupled(nn.BatchNorm1d):
    """A BatchNorm that knows nothing of views."""


def test_an_unknown_batch_norm_takes_views_one_by_one() -> None:
    net = synchronised(nn.Sequential(nn.Linear(5, 4), Coupled(4)).double(), World())
    views = [numbers(6, 5, seed=seed) for seed in (0, 1)]
    expected = [nn.functional.batch_norm(net[0](view), None, None, training=True) for view in views]
    for found, truth in zip(ViewPass(net)(views), expected, strict=True):
        torch.testing.assert_close(found, truth)


def test_copies_count_their_own_batches() -> None:
    net, views = network(), [numbers(4, 3, 8, 8, seed=seed) for seed in (0, 1)]
    slow, frozen, batch = EmaCopy(net), FrozenCopy(net), FrozenCopy(net, batch_statistics=True)
    kept = {key: value.clone() for key, value in net.state_dict().items()}
    ViewPass(net)(views)
    for item, num_batches in ((slow, 2), (frozen, 0), (batch, 0)):
        found = item.each(views)
        assert int(item.module[1].num_batches_tracked) == num_batches and not found[0].requires_grad
        for view, part in zip(views, found, strict=True):
            torch.testing.assert_close(part, item(view), rtol=1e-12, atol=1e-12)
    for item in (frozen, batch):
        assert all(torch.equal(value, kept[key]) for key, value in item.state_dict().items())


def test_views_side_by_side_are_not_copied() -> None:
    views = next(batches()).views
    laid_out = adjacent(views)
    stack = side_by_side(laid_out)
    assert all(torch.equal(a, b) for a, b in zip(views, laid_out, strict=True))
    assert stack.data_ptr() == laid_out[0].data_ptr() and len(stack) == sum(map(len, views))
    for other in (laid_out[::-1], (laid_out[0], laid_out[0]), (laid_out[1], views[1]), laid_out[:1]):
        assert torch.equal(side_by_side(other), torch.cat(other))
    assert side_by_side((laid_out[0], laid_out[0])).data_ptr() != stack.data_ptr()
    weights = numbers(6, 2).requires_grad_()
    assert side_by_side(weights.chunk(2)).requires_grad


def test_timms_batch_norm_keeps_its_activation() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    plain = timm.create_model("efficientnet_lite0", num_classes=0, pretrained=False).double()
    torch.manual_seed(0)
    ours = synchronised(timm.create_model("efficientnet_lite0", num_classes=0, pretrained=False).double(), World())
    assert sum(isinstance(layer, ViewBatchNorm) for layer in ours.modules()) > 40
    assert list(ours.state_dict()) == list(plain.state_dict())
    views = [numbers(4, 3, 32, 32, seed=seed) for seed in (0, 1)]
    for found, view in zip(ViewPass(ours)(views), views, strict=True):
        torch.testing.assert_close(found, plain(view), rtol=1e-9, atol=1e-9)
