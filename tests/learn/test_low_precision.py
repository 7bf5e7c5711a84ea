"""A low-precision twin computes under autocast what its network computes, to the last bit."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fastcssl.distributed.batchnorm import synchronised
from fastcssl.distributed.world import World
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.learn.low_precision import LowPrecisionTwin
from fastcssl.learn.memory import EmaCopy, FrozenCopy
from fastcssl.learn.nets import Online, ViewPass, build_encoder, mlp

AUTOCAST = {"device_type": "cpu", "dtype": torch.bfloat16}


def network(name: str = "resnet18-w8") -> nn.Module:
    encoder = build_encoder(EncoderConfig(name=name), seed=0, size_px=32)
    torch.manual_seed(1)
    online = Online(encoder, mlp((encoder.num_features, 16, 8), norm=True))
    return synchronised(online.to(memory_format=torch.channels_last), World())


def views(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 3, 32, 32, generator=generator).bfloat16() for _ in range(2)]


@pytest.mark.parametrize("name", ["resnet18-w8", "vit-tiny"])
@torch.no_grad()
def test_outputs_and_statistics_are_the_networks(name: str) -> None:
    plain, twinned = network(name), network(name)
    twin = LowPrecisionTwin(twinned, torch.bfloat16)
    with torch.autocast(**AUTOCAST):
        for expected, found in zip(ViewPass(plain)(views()), twin.each(views()), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    for key, value in plain.state_dict().items():  # running statistics are shared with the network
        assert torch.equal(value, twinned.state_dict()[key]), key


def test_the_weights_are_cast_once() -> None:
    net = network()
    twin = LowPrecisionTwin(net, torch.bfloat16)
    kinds = {
        type(layer).__name__: {p.dtype for p in layer.parameters(recurse=False)} for layer in twin.network.modules()
    }
    assert kinds["Conv2d"] == kinds["Linear"] == {torch.bfloat16} and kinds["ViewBatchNorm"] == {torch.float32}
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert twin.network.encoder.bn1 is net.encoder.bn1


@pytest.mark.parametrize("kind", [EmaCopy, FrozenCopy])
def test_a_copy_follows_its_weights_under_autocast(kind: type[EmaCopy] | type[FrozenCopy]) -> None:
    """Through an update and a loaded state; without autocast it computes in float32."""
    source, other = network(), network()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1)
    held, plain = kind(source), copy.deepcopy(kind(source))
    for change in ("none", "update", "load"):
        for item in (held, plain):
            if change == "update" and isinstance(item, EmaCopy):
                item.update(other, 0.5)
            elif change == "load":
                item.load_state_dict(other.state_dict())
        with torch.autocast(**AUTOCAST):
            found = held.each(views(1))
            expected = [plain(view) for view in views(1)]
        for view, parts in enumerate(expected):
            assert all(torch.equal(a, b[view]) for a, b in zip(parts, found, strict=True)), change
    assert held.each([view.float() for view in views()])[1][0].dtype == torch.float32
