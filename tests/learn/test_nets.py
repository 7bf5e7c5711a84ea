"""Encoders against torchvision, heads against the table of the methods, seeds, and the file of a trained encoder."""

import copy
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torchvision
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastcssl.distributed.batchnorm import synchronised
from fastcssl.distributed.world import World
from fastcssl.learn import encoder_file, nets
from fastcssl.learn.encoder_file import EncoderFileError, load_encoder, save_encoder
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.learn.nets import build_encoder, mlp, seeded

TINY = EncoderConfig(name="resnet18-w8", stem="cifar")
NUM_FEATURES = {"resnet18": 512, "resnet34": 512, "resnet50": 2048, "resnet101": 2048}
NUM_FEATURES |= {"resnet18-w8": 64, "resnet18-w9": 72, "resnet18-w16": 128, "resnet50-w16": 512, "resnet50-w256": 8192}
RUN = {"recipe": "cifar100-class5", "method": "moco", "mean": "0.5 0.5 0.5", "task": "0", "note": 'π "\n', "seed": "5"}


def images(num: int = 2, size_px: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(num, 3, size_px, size_px, generator=torch.Generator().manual_seed(seed))


def trained(config: EncoderConfig = TINY, seed: int = 0) -> nn.Module:
    """Its BatchNorms have seen images, and none of their weights is 1 or 0."""
    encoder = build_encoder(config, seed)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter += 0.01
        encoder(images())
    return encoder


def torchvision_twin(name: str, stem: str = "imagenet") -> nn.Module:
    twin = torchvision.models.get_model(name)
    twin.fc = nn.Identity()
    if stem == "cifar":
        twin.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=2, bias=False)
        twin.maxpool = nn.Identity()
    return twin


@cache
def torchvision_shapes(name: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {key: tuple(tensor.shape) for key, tensor in torchvision_twin(name).state_dict().items()}


def differ(a: nn.Module, b: nn.Module) -> set[str]:
    theirs = b.state_dict()
    assert list(a.state_dict()) == list(theirs)
    return {key for key, tensor in a.state_dict().items() if not torch.equal(tensor, theirs[key])}


def says(words: list[str], error: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} not in {str(caught.value)!r}"


# Encoders.


@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
@pytest.mark.parametrize("name, num_features", NUM_FEATURES.items())
def test_shapes_of_every_name(name: str, num_features: int, stem: str) -> None:
    config = EncoderConfig(name=name, stem=stem)  # type: ignore[arg-type]
    encoder = encoder_file._blank(config).eval()
    assert encoder.num_features == num_features
    assert encoder(torch.empty(3, 3, 40, 40, device="meta")).shape == (3, num_features)
    # As deep as torchvision's, and every channel count scaled alike.
    base, dash, suffix = name.partition("-w")
    width = int(suffix) if dash else 64
    expected = {
        key: tuple(n * width // 64 for n in shape[:2]) + shape[2:] for key, shape in torchvision_shapes(base).items()
    }
    expected["conv1.weight"] = (width, 3, 7, 7) if stem == "imagenet" else (width, 3, 3, 3)
    seen = {key: tuple(tensor.shape) for key, tensor in encoder.state_dict().items()}
    assert seen == expected and list(seen) == list(expected)


@pytest.mark.parametrize("name, stem", [("resnet18", "cifar"), ("resnet50", "imagenet")])
def test_standard_width_is_torchvisions(name: str, stem: str, tmp_path: Path) -> None:
    config = EncoderConfig(name=name, stem=stem)  # type: ignore[arg-type]
    encoder = trained(config).eval()
    assert type(encoder) is torchvision.models.ResNet
    twin = torchvision_twin(name, stem).eval()
    assert "conv1.weight" in differ(encoder, twin)
    save_encoder(tmp_path / "encoder", encoder, config, {})
    twin.load_state_dict(load_file(tmp_path / "encoder"), strict=True)  # without fastcssl
    assert not differ(encoder, twin)
    x = images(1, 24)
    features_NF = encoder(x)
    assert torch.equal(features_NF, twin(x))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter += 0.01
    assert not torch.equal(encoder(x), features_NF)
    encoder.load_state_dict(twin.state_dict(), strict=True)
    assert torch.equal(encoder(x), features_NF)


def test_initial_weights_are_drawn_as_torchvision_draws_them() -> None:
    twin = torchvision_twin("resnet18").state_dict()
    for key, tensor in build_encoder(EncoderConfig(), seed=0).state_dict().items():
        if tensor.dim() == 4:
            few = 5 * (2 * tensor.numel()) ** -0.5  # relative; five standard errors of a standard deviation
            assert float(tensor.std()) == pytest.approx(float(twin[key].std()), rel=2 * few), key
            assert abs(tensor.mean()) < few * tensor.std() * 2, key
        else:
            assert torch.equal(tensor, twin[key]), key  # also the last BatchNorm of a block starts at 1
    conv1 = build_encoder(EncoderConfig(stem="cifar"), seed=0).conv1.weight
    assert float(conv1.detach().std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.1)


@pytest.mark.parametrize("stem, conv1_px, layer1_px", [("cifar", 34, 34), ("imagenet", 16, 8)])
def test_stem(stem: str, conv1_px: int, layer1_px: int) -> None:
    encoder = build_encoder(EncoderConfig(name="resnet18-w8", stem=stem), seed=0)  # type: ignore[arg-type]
    sides = []
    for module in (encoder.conv1, encoder.layer1):
        module.register_forward_hook(lambda _module, _inputs, output: sides.append(output.shape[2:]))
    encoder(images(2, 32))
    assert sides == [(conv1_px, conv1_px), (layer1_px, layer1_px)]
    assert encoder.conv1.bias is None


def test_channels_last_gives_the_same() -> None:
    plain = trained().eval()
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    assert last.num_features == plain.num_features == 64
    x = images(4, 32)
    torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), plain(x), rtol=1e-4, atol=1e-5)


def test_unknown_names() -> None:
    says(["'resnet81'", "Did you mean 'resnet18'?", "resnet101"], ValueError, lambda: EncoderConfig(name="resnet81"))
    says(["'resent18-w8'", "Did you mean 'resnet18'?"], ValueError, lambda: EncoderConfig(name="resent18-w8"))
    for suffix in ("16", "w0", "w7", "w016", "w257", "w9999999", "w", "", "w8-w8"):
        name = f"resnet50-{suffix}"
        says([repr(name), repr(suffix), "'resnet50-w16'"], ValueError, lambda name=name: EncoderConfig(name=name))
    says(["'cifra'", "'cifar'"], ValueError, lambda: EncoderConfig(stem="cifra"))  # type: ignore[arg-type]


# Seeds.

ENCODER_0, PROJECTOR_1 = 0.5467805852661181, 0.9744374774819681  # the first draws of (0, "encoder"), (1, "projector")


def test_weights_follow_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = build_encoder(TINY, seed=3)
    torch.manual_seed(2)
    torch.rand(7)
    assert not differ(first, build_encoder(TINY, seed=3))
    assert {"conv1.weight", "layer4.1.conv2.weight"} <= differ(first, build_encoder(TINY, seed=4))


def test_parts_are_independent_and_stable() -> None:
    def draw(seed: int, what: str) -> float:
        with seeded(seed, what):
            return float(torch.rand((), dtype=torch.float64))

    drawn = {(seed, what): draw(seed, what) for seed in (0, 1, 11) for what in ("encoder", "projector", "1", "")}
    assert len(set(drawn.values())) == len(drawn)
    # Of another process, too: not hash(), which changes with it.
    assert drawn[0, "encoder"] == ENCODER_0 and drawn[1, "projector"] == PROJECTOR_1
    with seeded(0, "encoder"):
        torch.rand(5)
        with seeded(1, "projector"):
            assert float(torch.rand((), dtype=torch.float64)) == PROJECTOR_1


def test_global_generators_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds_gpus = Mock()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds_gpus)
    before = torch.get_rng_state()
    build_encoder(TINY, seed=3)
    with seeded(3, "projector"):
        mlp((8, 8, 8), norm=True)
    with pytest.raises(KeyError), seeded(3, "projector"):
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before) and not seeds_gpus.called


# Heads.


@pytest.mark.parametrize(
    "dims, norm, layers",
    [
        ((8, 6, 4), False, ["8-6", "ReLU", "6-4"]),  # MoCo, SimCLR
        ((8, 6, 4), True, ["8-6", "BN6", "ReLU", "6-4"]),  # BYOL, and the predictors
        ((8, 6, 5, 4), True, ["8-6", "BN6", "ReLU", "6-5", "BN5", "ReLU", "5-4"]),  # Barlow Twins, VICReg
        ((8, 4), True, ["8-4"]),
    ],
)
def test_heads(dims: tuple[int, ...], norm: bool, layers: list[str]) -> None:
    head = mlp(dims, norm=norm)
    seen = []
    for layer in head:
        if type(layer) is nn.Linear:
            assert layer.bias is not None
            seen.append(f"{layer.in_features}-{layer.out_features}")
        elif type(layer) is nn.BatchNorm1d:
            assert layer.affine and layer.track_running_stats
            seen.append(f"BN{layer.num_features}")
        else:
            seen.append(type(layer).__name__)
    assert seen == layers
    assert head(torch.randn(3, dims[0])).shape == (3, dims[-1])


def test_heads_need_dimensions() -> None:
    says(["[8]", "two or more"], ValueError, lambda: mlp([8], norm=False))
    says(["[8, 0]", "at least 1"], ValueError, lambda: mlp([8, 0], norm=False))


def test_online() -> None:
    encoder, projector = build_encoder(TINY, seed=0).eval(), mlp((64, 16, 8), norm=False)
    x = images(3)
    h_NF, z_ND = nets.Online(encoder, projector)(x)
    assert torch.equal(h_NF, encoder(x)) and torch.equal(z_ND, projector(h_NF))
    unit = nets.Online(encoder, projector, normalise=True)
    h_again_NF, unit_ND = unit(x)
    assert torch.equal(h_again_NF, h_NF)
    torch.testing.assert_close(unit_ND, z_ND / z_ND.norm(dim=1, keepdim=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert nets.Online(encoder, projector)(x)[1].dtype == torch.bfloat16
        low_ND = unit(x)[1]
    assert low_ND.dtype == torch.float32
    torch.testing.assert_close(low_ND.norm(dim=1), torch.ones(3), rtol=1e-6, atol=0)
    assert unit.double()(x.double())[1].dtype == torch.float64


# Memory.


def test_activation_bytes_of_a_small_net() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.Conv2d(5, 2, 1), nn.Flatten()
    )
    # Kept are the images, the BatchNorm's input and the ReLU's output, though both it and a convolution ask for it.
    images_and_maps, statistics = 7 * 6 * 6 * (3 + 5 + 5), 2 * 5
    expected = 4 * images_and_maps + 4 * statistics
    assert nets.activation_bytes(net, 6, 7, torch.float32) == expected
    assert 0 <= nets.activation_bytes(net, 6, 7, torch.bfloat16) - 2 * images_and_maps <= 4 * statistics
    with torch.no_grad():
        assert nets.activation_bytes(net, 6, 7, torch.float32) == expected
    assert net.training and net[0].weight.device.type == "cpu" and net[0].weight.dtype == torch.float32


@pytest.mark.parametrize("name, stem", [("resnet18-w8", "cifar"), ("resnet50-w8", "imagenet")])
def test_activation_bytes_are_those_of_a_training_step(name: str, stem: str) -> None:
    encoder = build_encoder(EncoderConfig(name=name, stem=stem), seed=0)  # type: ignore[arg-type]
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        encoder(images(3, 33))
    for tensor in (*encoder.parameters(), *encoder.buffers()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    expected = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert nets.activation_bytes(encoder, 33, 3, torch.float32) == expected
    shared = synchronised(copy.deepcopy(encoder), World(rank=0, size=2))
    assert not any(type(module) is nn.BatchNorm2d for module in shared.modules())
    assert nets.activation_bytes(shared, 33, 3, torch.float32) == expected


# Files.


def test_file_round_trip(tmp_path: Path) -> None:
    path, encoder = tmp_path / "task0.safetensors", trained()
    save_encoder(path, encoder, TINY, RUN)
    assert encoder.training
    loaded = load_encoder(str(path))
    assert not loaded.training and not any(module.training for module in loaded.modules())
    assert not differ(loaded, encoder) and loaded.num_features == 64
    assert loaded.bn1.num_batches_tracked == 1
    x = images(2, 32)
    assert torch.equal(loaded(x), encoder.eval()(x))
    assert os.listdir(tmp_path) == ["task0.safetensors"]
    own = {"architecture": "resnet18-w8", "stem": "cifar", "num_features": "64", "format_version": "1"}
    with safe_open(path, framework="pt") as file:
        assert encoder_file.describe_file(path) == file.metadata() == {**RUN, **own}


def test_equal_encoders_give_equal_files(tmp_path: Path) -> None:
    encoder = trained()
    last = copy.deepcopy(encoder).to(memory_format=torch.channels_last)
    assert not last.conv1.weight.is_contiguous()
    shared = synchronised(copy.deepcopy(encoder), World(rank=0, size=2))
    frozen = copy.deepcopy(encoder).requires_grad_(False).eval()
    reordered = dict(reversed(RUN.items()))
    same = [(last, RUN), (shared, RUN), (frozen, RUN), (encoder, reordered)]
    save_encoder(tmp_path / "first", encoder, TINY, RUN)
    for number, (module, metadata) in enumerate(same):
        save_encoder(tmp_path / "second", module, TINY, metadata)
        assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes(), number
    assert int.from_bytes((tmp_path / "first").read_bytes()[:8], "little") % 8 == 0


def test_weights_are_stored_in_float32(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        encoder = trained().to(dtype)
        save_encoder(tmp_path / "encoder", encoder, TINY, {})
        assert not differ(load_encoder(tmp_path / "encoder"), encoder.float())


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    path, encoder = tmp_path / "encoder", build_encoder(TINY, seed=0)
    plain = EncoderConfig(name="resnet18-w8")

    def refused(words: list[str], module: nn.Module, config: EncoderConfig, metadata: dict[str, object]) -> None:
        says(words, ValueError, lambda: save_encoder(path, module, config, metadata))  # type: ignore[arg-type]
        assert not path.exists()

    refused(["conv1.weight is torch.float32 [8, 3, 3, 3], not torch.float32 [8, 3, 7, 7]"], encoder, plain, {})
    words = ["missing keys conv1.weight, bn1.weight, bn1.bias and 117 more", "unexpected keys 0.conv1.weight"]
    refused([*words, "resnet18-w8 with the cifar stem", "without wrappers"], nn.Sequential(encoder), TINY, {})
    refused(["'seed' is 5", "convert it"], encoder, TINY, {"seed": 5})
    refused(["'stem'", "another name"], encoder, TINY, {"stem": "cifar"})


def test_a_crash_while_saving_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, old = tmp_path / "encoder", trained()
    save_encoder(path, old, TINY, RUN)
    for function in ("fsync", "replace"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(os, function, Mock(side_effect=KeyboardInterrupt))
            save_encoder(path, trained(seed=1), TINY, RUN)
        assert not differ(load_encoder(path), old)


def test_torn_files(tmp_path: Path) -> None:
    path, torn = tmp_path / "encoder", tmp_path / "torn"
    save_encoder(path, trained(), TINY, RUN)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for length in (0, 4, 8, 200, header, header + 64, len(content) - 1):
        torn.write_bytes(content[:length])
        for read in (load_encoder, encoder_file.describe_file):
            says([str(torn), "it is incomplete", "again"], EncoderFileError, lambda read=read: read(torn))
    torn.write_bytes(content + b"x")
    says([str(torn), "not a safetensors file"], EncoderFileError, lambda: load_encoder(torn))


def test_files_of_other_kinds(tmp_path: Path) -> None:
    path = tmp_path / "other"
    says([str(path), "not a file", ".safetensors"], EncoderFileError, lambda: load_encoder(path))
    says([str(tmp_path), "not a file"], EncoderFileError, lambda: load_encoder(tmp_path))
    path.write_text("weights, but not really " * 10)
    says([str(path), "not a safetensors file"], EncoderFileError, lambda: load_encoder(path))
    state = trained().state_dict()
    for as_zip in (True, False):
        torch.save(state, path, _use_new_zipfile_serialization=as_zip)
        says([str(path), "pickle", "safetensors"], EncoderFileError, lambda: load_encoder(path))
        says([str(path), "pickle"], EncoderFileError, lambda: encoder_file.describe_file(path))


def test_files_that_do_not_hold_what_they_say(tmp_path: Path) -> None:
    path, state = tmp_path / "encoder", dict(trained().state_dict())
    good = {"architecture": "resnet18-w8", "stem": "cifar", "num_features": "64", "format_version": "1"}

    def refused(words: list[str], tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> None:
        save_file(tensors, path, metadata)
        says([str(path), *words], EncoderFileError, lambda: load_encoder(path))

    save_file(state, path, good)
    assert not differ(load_encoder(path), trained())
    refused(["does not say which encoder", "architecture", "load_state_dict"], state, None)
    refused(["metadata has no architecture, stem, num_features"], state, {"format_version": "1"})
    says(["metadata has no architecture"], EncoderFileError, lambda: encoder_file.describe_file(path))
    refused(["format '2'", "'1'"], state, {**good, "format_version": "2"})
    refused(["'vit_b_16'", "Known: resnet18"], state, {**good, "architecture": "vit_b_16"})
    refused(["stem 'patch'"], state, {**good, "stem": "patch"})
    refused(["conv1.weight", "[8, 3, 3, 3]", "[8, 3, 7, 7]"], state, {**good, "stem": "imagenet"})
    less = {key: tensor for key, tensor in state.items() if key != "layer3.0.bn1.running_mean"}
    refused(["missing keys layer3.0.bn1.running_mean."], less, good)
    refused(["unexpected keys fc.weight."], {**state, "fc.weight": torch.zeros(3)}, good)
    refused(["missing keys layer3.0.bn1.running_mean and unexpected keys x."], {**less, "x": torch.zeros(1)}, good)
    half = {**state, "conv1.weight": state["conv1.weight"].half()}
    refused(["conv1.weight is torch.float16 [8, 3, 3, 3], not torch.float32"], half, good)
