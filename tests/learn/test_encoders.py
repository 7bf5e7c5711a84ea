"""Encoders that are no ResNet of ours: the small ViT in every place a ResNet goes, torchvision's and timm's by name."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import backend, prep_ok
from lab import SIZE_PX, Lab
from safetensors.torch import save_file
from small_runs import prepared, run, tiny
from torch import nn

from fastcssl.cli import train as command
from fastcssl.errors import UserError
from fastcssl.learn import encoder_file, encoders, methods
from fastcssl.learn.encoder_file import EncoderFileError, load_encoder, save_encoder
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.learn.memory import EmaCopy, FrozenCopy
from fastcssl.learn.nets import activation_bytes, build_encoder
from fastcssl.learn.optim import OptimConfig, build_optimizer
from fastcssl.runs.checkpoint import load

pytestmark = pytest.mark.usefixtures("one_thread")

VIT = EncoderConfig(name="vit-tiny-w32")
FROZEN = EncoderConfig(name="vit-tiny-w32", freeze_patch_embedding=True)
PATCHES = {"conv_proj.weight", "conv_proj.bias"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vit") / "data"
    prep_ok("build", "synthetic:classes=20,train=8,val=2", "--scenario", "class", "--tasks", 4, "--out", out)
    return out


def frozen_names(module: nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters() if not p.requires_grad}


# ---- The small ViT ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size_px", "width", "patch"),
    [("vit-tiny", 32, 192, 4), ("vit-tiny-w64", 64, 64, 4), ("vit-tiny", 224, 192, 16)],
)
def test_the_small_vit(name: str, size_px: int, width: int, patch: int) -> None:
    vit = build_encoder(EncoderConfig(name=name, stem="cifar"), 0, size_px)
    assert vit.num_features == width and vit.size_px == size_px
    assert vit(torch.randn(2, 3, size_px, size_px)).shape == (2, width)
    assert vit.conv_proj.weight.shape == (width, 3, patch, patch)
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in vit.modules())
    assert all(module.p == 0 for module in vit.modules() if isinstance(module, nn.Dropout))
    assert activation_bytes(vit, size_px, 2, torch.float32) > 2 * 3 * size_px**2 * 4


@pytest.mark.parametrize(("name", "width"), [("conv4", 256), ("conv4-w16", 128)])
def test_four_convolutions(name: str, width: int, tmp_path: Path) -> None:
    conv = build_encoder(EncoderConfig(name=name), 0, 32)
    assert conv.num_features == width and conv.size_px is None
    assert [module.stride for module in conv.modules() if isinstance(module, nn.Conv2d)] == [(2, 2)] * 4
    x_N3HW = torch.randn(4, 3, 32, 32)
    assert conv(x_N3HW).shape == conv(torch.randn(4, 3, 48, 40))[:, :width].shape == (4, width)
    save_encoder(tmp_path / "conv.safetensors", conv, EncoderConfig(name=name), {})
    again = load_encoder(tmp_path / "conv.safetensors")
    assert torch.equal(again(x_N3HW), conv.eval()(x_N3HW))


def test_weights_follow_the_seed_alone() -> None:
    first, again, other = (build_encoder(VIT, seed, 16).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["conv_proj.weight"], other["conv_proj.weight"])


@pytest.mark.parametrize(
    ("config", "size_px", "frozen"),
    [(VIT, 16, set()), (FROZEN, 16, PATCHES), (EncoderConfig(name="resnet18-w8"), 16, set())],
)
def test_what_is_frozen_is_the_patch_embedding(config: EncoderConfig, size_px: int, frozen: set[str]) -> None:
    assert frozen_names(build_encoder(config, 0, size_px)) == frozen


UNDER = [*((method, "pnr", VIT) for method in methods.names()), ("byol", "cassle", VIT)]
UNDER += [("moco", "pnr", FROZEN), ("byol", "cassle", FROZEN)]


@pytest.mark.parametrize(("method", "strategy", "config"), UNDER)
def test_the_small_vit_under_methods_and_strategies(
    method: str, strategy: str, config: EncoderConfig, data: Path
) -> None:
    """Gradients reach all that is trained, nothing that is frozen moves, and a state goes on bit for bit."""

    def lab() -> Lab:
        return Lab(method, strategy, data, encoder=build_encoder(config, 3, SIZE_PX))

    first = lab()
    encoder = first.method.online.encoder
    patches = encoder.conv_proj.weight.clone()
    trains_patches = "method.online.encoder.conv_proj.weight" in first.parameters()
    assert trains_patches is (config is VIT)
    first.train()  # a bank may be empty before
    for name, p in first.parameters().items():
        assert p.grad is not None and p.grad.abs().sum() > 0, f"{name} gets no gradient"
    optimised = {id(p) for group in first.step.groups() for p in group["params"]}
    assert optimised == {id(p) for p in first.parameters().values()}
    state = first.state()
    ahead = [next(first.inputs) for _ in range(2)]
    first.inputs = iter(ahead)
    expected = [first.train() for _ in range(2)]
    if not trains_patches:
        assert torch.equal(encoder.conv_proj.weight, patches)
        for item in first.method.copies.values():
            if isinstance(item, EmaCopy):
                assert torch.equal(item.module.encoder.conv_proj.weight, patches)
    other = lab()
    other.method.load_state_dict(state["method"])
    other.strategy.load_state_dict(state["strategy"])
    for whose, part in (("method", other.method), ("strategy", other.strategy)):
        for name, item in part.copies.items():
            item.load_state_dict(state[f"{whose}_copies"][name])
    other.num_steps, other.inputs = first.num_steps - 2, iter(ahead)
    for terms in expected:
        assert {k: float(v) for k, v in other.train().items()} == {k: float(v) for k, v in terms.items()}
    first.close()
    other.close()


def test_a_vit_is_trained_with_adamw_and_leaves_as_a_file(tmp_path: Path) -> None:
    optim = OptimConfig(name="adamw", lr=0.02, weight_decay=0.1, warmup_epochs=0)
    found = tiny("moco", "pnr", encoder=FROZEN, optim=optim)
    outcome = run(found, prepared(tmp_path / "data"), tmp_path / "run")
    assert outcome.status == "finished" and len(outcome.tasks) == 2
    start = build_encoder(FROZEN, found.config.seed, 16).state_dict()
    files = [load_encoder(tmp_path / "run" / "encoders" / f"task{task}.safetensors") for task in (0, 1)]
    for encoder in files:
        assert encoder.num_features == 32 and encoder.size_px == 16 and not encoder.training
        moved = {key for key, value in encoder.state_dict().items() if not torch.equal(value, start[key])}
        assert moved == set(start) - PATCHES
    groups = load(tmp_path / "run" / "checkpoints" / "task-1.pt")["optimizer"]["param_groups"]
    assert [(group["name"], group["weight_decay"]) for group in groups] == [
        ("method", 0.1),
        ("method 1-D", 0.0),
        ("strategy", 0.1),
        ("strategy 1-D", 0.0),
    ]


def test_an_optimiser_takes_no_frozen_parameter(data: Path) -> None:
    lab = Lab("moco", "pnr", data, encoder=build_encoder(FROZEN, 3, SIZE_PX))
    optimizer = build_optimizer(lab.step.groups(), OptimConfig(name="adamw", lr=0.1, weight_decay=0.5))
    before = lab.method.online.encoder.conv_proj.weight.clone()
    lab.backward()
    optimizer.step()
    assert torch.equal(lab.method.online.encoder.conv_proj.weight, before)
    assert all(p.requires_grad for group in optimizer.param_groups for p in group["params"])
    lab.close()


# ---- Files -----------------------------------------------------------------------------------------------------------


def test_the_file_of_a_vit(tmp_path: Path) -> None:
    path, vit = tmp_path / "encoder", build_encoder(FROZEN, 0, 16)
    save_encoder(path, vit, FROZEN, {"size_px": "16"})
    said = encoder_file.describe_file(path)
    assert said["architecture"] == "vit-tiny-w32" and said["built_for_px"] == "16" and said["num_features"] == "32"
    loaded, x = load_encoder(path), torch.randn(2, 3, 16, 16)
    assert torch.equal(loaded(x), vit.eval()(x)) and loaded.size_px == 16
    with pytest.raises(ValueError, match="save_encoder sets 'built_for_px' itself"):
        save_encoder(path, vit, FROZEN, {"built_for_px": "16"})
    with pytest.raises(ValueError, match=r"is not a vit-tiny-w64: .*without wrappers"):
        save_encoder(path, vit, EncoderConfig(name="vit-tiny-w64"), {})
    state = dict(vit.state_dict())
    own = {"format_version": "1", "stem": "imagenet", "num_features": "32", "architecture": "vit-tiny-w32"}
    for size, says in (
        ("32", r"does not hold the vit-tiny-w32 .*pos_embedding is"),
        ("17", "17 px"),
        ("x", "invalid"),
    ):
        save_file(state, path, {**own, "built_for_px": size})
        with pytest.raises(EncoderFileError, match=says):
            load_encoder(path)


# ---- Names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("vit-tny", r"no encoder 'vit-tny'.*resnet18.*vit-tiny, torchvision:NAME, timm:NAME"),
        ("vit-tiny-w48", r"'w48' is not a width; use 'vit-tiny', or for instance 'vit-tiny-w64'"),
        ("vit-tiny-64", r"'64' is not a width"),
        ("vit-tiny-w800", r"'w800' is not a width"),
        ("torchvision:vit_b16", r"no encoder 'torchvision:vit_b16'. Did you mean torchvision:vit_b_16 or"),
        ("torchvision:fasterrcnn_resnet50_fpn", r"no encoder 'torchvision:fasterrcnn"),
        ("keras:vit", r"use torchvision:NAME or timm:NAME"),
    ],
)
def test_unknown_names(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EncoderConfig(name=name)


def test_freezing_needs_a_patch_embedding() -> None:
    with pytest.raises(ValueError, match=r"resnet50 has no patch embedding; leave encoder.freeze_patch_embedding off"):
        EncoderConfig(name="resnet50", freeze_patch_embedding=True)
    with pytest.raises(UserError, match=r"torchvision:squeezenet1_1 has no known patch embedding"):
        build_encoder(EncoderConfig(name="torchvision:squeezenet1_1", freeze_patch_embedding=True), 0, 32)


def test_a_size_that_does_not_fit_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"vit-tiny cannot be built for images of 18 px: .*--views.size-px"):
        build_encoder(EncoderConfig(name="vit-tiny"), 0, 18)
    with pytest.raises(UserError, match=r"torchvision:alexnet cannot be built for images of 16 px: "):
        build_encoder(EncoderConfig(name="torchvision:alexnet"), 0, 16)
    out = prepared(tmp_path / "data")
    words = ["demo", "moco", "pnr", "--data", str(out), "--out", str(tmp_path / "run"), "--expect.num-tasks", "2"]
    flags = ["--encoder.name", "vit-tiny-w32", "--views.size-px", "18", "--batch-size", "16", "--device", "cpu"]
    assert command.main([*words, *flags]) == 2
    assert "cannot be built for images of 18 px" in capsys.readouterr().err


# One of each family; the features are the inputs of torchvision's last layer.
FAMILIES = {
    "alexnet": 4096,
    "convnext_tiny": 768,
    "densenet121": 1024,
    "efficientnet_b0": 1280,
    "googlenet": 1024,
    "mnasnet0_5": 1280,
    "mobilenet_v3_small": 1024,
    "regnet_x_400mf": 400,
    "resnet18": 512,
    "shufflenet_v2_x0_5": 1024,
    "squeezenet1_1": 512,
    "swin_t": 768,
    "vgg11_bn": 4096,
    "vit_b_32": 768,
}


@pytest.mark.parametrize(("name", "num_features"), FAMILIES.items())
def test_torchvisions_models(name: str, num_features: int) -> None:
    encoder = encoder_file._blank(EncoderConfig(name=f"torchvision:{name}"), 64)
    device = next(encoder.parameters()).device
    assert encoder.num_features == num_features and encoder.training
    assert encoder(torch.zeros(2, 3, 64, 64, device=device)).shape == (2, num_features)
    assert all(module.p == 0 for module in encoder.modules() if isinstance(module, nn.Dropout))
    assert encoder.size_px == (64 if name == "vit_b_32" else None)


def test_every_name_of_torchvision_is_one_of_a_known_family() -> None:
    """A family that torchvision adds would want a look."""
    families = {
        name.rstrip("0123456789").partition("_")[0].rstrip("0123456789") for name in encoders.torchvision_names()
    }
    known = {name.partition("_")[0].rstrip("0123456789") for name in FAMILIES} | {
        "inception",
        "maxvit",
        "wide",
        "resnext",
    }
    assert {family.rstrip("v") for family in families} <= {family.rstrip("v") for family in known}


def test_a_model_of_torchvision_goes_the_way_of_a_file(tmp_path: Path) -> None:
    config = EncoderConfig(name="torchvision:mobilenet_v3_small")
    encoder, x = build_encoder(config, 0, 32), torch.randn(2, 3, 32, 32)
    encoder(x)  # BatchNorms have seen images
    save_encoder(tmp_path / "encoder", encoder, config, {})
    loaded = load_encoder(tmp_path / "encoder")
    assert torch.equal(loaded(x), encoder.eval()(x)) and loaded.num_features == 1024 and loaded.size_px is None


def test_a_frozen_copy_drops_nothing_also_with_batch_statistics() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5))
    frozen, x = FrozenCopy(net, batch_statistics=True), torch.randn(6, 3, 5, 5) + 3
    assert torch.equal(frozen(x), frozen(x))
    assert frozen(x).mean(dim=(0, 2, 3)).abs().max() < 1e-5  # normalised by this batch


def test_timm_is_only_needed_for_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(encoders.importlib, "import_module", missing)
    EncoderConfig(name="vit-tiny")
    with pytest.raises(ValueError, match=r"timm:NAME need the package timm .*: pip install timm\."):
        EncoderConfig(name="timm:vit_tiny_patch16_224")


def test_timms_models(tmp_path: Path) -> None:
    backend("timm")
    vit = EncoderConfig(name="timm:vit_tiny_patch16_224", freeze_patch_embedding=True)
    for config, num_features, size_px, frozen in (
        (vit, 192, 32, {"patch_embed.proj.weight", "patch_embed.proj.bias"}),
        (EncoderConfig(name="timm:resnet10t"), 512, None, set()),
        (EncoderConfig(name="timm:mobilenetv3_small_050"), 1024, None, set()),  # timm's own num_features is not these
    ):
        encoder, x = build_encoder(config, 0, 32), torch.randn(2, 3, 32, 32)
        assert (encoder.num_features, encoder.size_px, encoder.training) == (num_features, size_px, True)
        assert frozen_names(encoder) == frozen
        assert encoder(x).shape == (2, num_features)
        save_encoder(tmp_path / "encoder", encoder, config, {})
        assert torch.equal(load_encoder(tmp_path / "encoder")(x), encoder.eval()(x))
    with pytest.raises(ValueError, match=r"Did you mean timm:vit_tiny_patch16_224"):
        EncoderConfig(name="timm:vit_tiny_patch16_22")
    with pytest.raises(UserError, match=r"timm:resnet10t has no known patch embedding"):
        build_encoder(EncoderConfig(name="timm:resnet10t", freeze_patch_embedding=True), 0, 32)


def test_a_command_takes_any_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    found = tiny("byol", "cassle")
    words = ("demo", "byol", "cassle")
    flags = [
        "--encoder.name",
        "torchvision:vit_b_32",
        "--encoder.freeze-patch-embedding",
        "on",
        "--optim.name",
        "adamw",
    ]
    _, after = command.parsed(words, found, flags)
    assert after.config.encoder == dataclasses.replace(
        found.config.encoder, name="torchvision:vit_b_32", freeze_patch_embedding=True
    )
    assert after.config.optim.name == "adamw"
    with pytest.raises(SystemExit):  # tyro's way
        command.parsed(words, found, ["--encoder.name", "torchvision:vit_b32"])
    assert "torchvision:vit_b_32" in capsys.readouterr().err
