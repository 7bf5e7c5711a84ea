"""Builds encoders by name.

    resnet18, 34, 50, 101    torchvision's class, with a choice of stem and width
    conv4                    four convolutions of stride 2, which learns in minutes on a CPU
    vit-tiny                 torchvision's VisionTransformer, small enough for a laptop
    torchvision:NAME         any classification model of torchvision, such as torchvision:vit_b_16
    timm:NAME                any model of timm, such as timm:vit_small_patch16_224

An encoder maps images to features [N, F]. Its `num_features` is F. Its `size_px` is the only image size that it takes,
or None for any size; a ViT takes the size that it was built for. Encoders have no classification head and none of its
dropout. torchvision's models are imported where they are built, because the import takes seconds and a command's help
does not need them.
"""

import difflib
import importlib
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import nn

from dataprep.suggest import nearest
from fastcssl.errors import UserError

Stem = Literal["imagenet", "cifar"]

RESNETS = {  # whether a block has three convolutions instead of two; blocks in each stage
    "resnet18": (False, (2, 2, 2, 2)),
    "resnet34": (False, (3, 4, 6, 3)),
    "resnet50": (True, (3, 4, 6, 3)),
    "resnet101": (True, (3, 4, 23, 3)),
}
CONV = "conv4"
OWN_WIDTHS = {**dict.fromkeys(RESNETS, 64), CONV: 32}
# Below 8 channels, torch's channels-last convolutions on the CPU write past their buffers (seen in 2.14.1).
MIN_WIDTH = 8
MAX_WIDTH = 256  # four times the usual width; more is likely a mistake and would exhaust the memory

VIT = "vit-tiny"
VIT_WIDTH, VIT_DEPTH, VIT_HEAD = 192, 6, 32  # features, blocks, features per attention head
VIT_MAX_WIDTH = 768

PATCH_EMBEDDINGS = ("conv_proj", "patch_embed.proj")  # in torchvision, in timm


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The settings of an encoder.

    `name`: see the module. `resnet18-w16` has 16 channels in its first stage instead of 64, and `conv4-w16` in its
    first layer instead of 32; `vit-tiny-w64` has 64 features.
    `stem`: the first layers of a ResNet. "imagenet" is a 7x7 convolution of stride 2 and a max pooling, "cifar" a 3x3
    convolution of stride 1. torchvision:resnet18 and all other encoders have their own stem.
    `freeze_patch_embedding`: keeps a ViT's first layer at its random initial weights, which stabilises training (Chen
    et al., An Empirical Study of Training Self-Supervised Vision Transformers, 2021, section 4.2).
    """

    name: str = "resnet18"  # or resnet34, 50, 101, conv4, vit-tiny, torchvision:NAME, timm:NAME
    stem: Stem = "imagenet"  # for resnets
    freeze_patch_embedding: bool = False  # for ViTs: leave it random and untrained, as MoCo v3 advises

    def __post_init__(self) -> None:
        library, colon, name = self.name.partition(":")
        if not colon:
            _own_name(self.name)
        elif library == "torchvision":
            _check_known(library, name, torchvision_names())
        elif library == "timm":
            timm = _timm_package()
            if not timm.is_model(name):
                _check_known(library, name, timm.list_models())
        else:
            raise ValueError(f"There is no encoder {self.name!r}: use torchvision:NAME or timm:NAME.")
        if self.stem not in get_args(Stem):
            raise ValueError(f"There is no stem {self.stem!r}. {nearest(self.stem, get_args(Stem))}")
        if self.freeze_patch_embedding and self.name.startswith(("resnet", CONV)):
            raise ValueError(f"{self.name} has no patch embedding; leave encoder.freeze_patch_embedding off.")


def untrained(config: EncoderConfig, size_px: int) -> nn.Module:
    """Returns an untrained encoder. Its weights are drawn from the default generator, on the default device."""
    library, colon, name = config.name.partition(":")
    encoder: nn.Module
    try:
        if not colon:
            encoder = _own(config, size_px)
        else:
            encoder = _torchvision(name, size_px) if library == "torchvision" else _timm(name, size_px)
            _measure(encoder, size_px)
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise UserError(
            f"The encoder {config.name} cannot be built for images of {size_px} px: {reason}. Choose another "
            "--encoder.name, or another --views.size-px."
        ) from error
    if config.freeze_patch_embedding:
        _freeze_patch_embedding(encoder, config.name)
    return encoder


def _check_known(library: str, name: str, known: list[str]) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        meant = f" Did you mean {' or '.join(f'{library}:{it}' for it in close)}?" if close else ""
        where = {"torchvision": "torchvision.models.list_models()", "timm": "timm.list_models()"}[library]
        raise ValueError(f"There is no encoder '{library}:{name}'.{meant} {where} lists all {len(known)}.")


def _measure(encoder: nn.Module, size_px: int) -> None:
    """Sets `num_features`, by encoding one image of this size. Raises if the encoder cannot process it."""
    device = next(encoder.parameters()).device
    with torch.no_grad():
        h_NF = encoder.eval()(torch.zeros(1, 3, size_px, size_px, device=device))
    encoder.train()
    if h_NF.dim() != 2:
        raise ValueError(f"its output for one image is {list(h_NF.shape)}, not a row of features")
    encoder.num_features = h_NF.shape[1]


def _freeze_patch_embedding(encoder: nn.Module, name: str) -> None:
    there = dict(encoder.named_modules())
    for path in PATCH_EMBEDDINGS:
        if path in there:
            there[path].requires_grad_(False)
            return
    raise UserError(f"{name} has no known patch embedding. Leave --encoder.freeze-patch-embedding off.")


# ---- Our own names ---------------------------------------------------------------------------------------------------


def name_is_vit(name: str) -> bool:
    """Returns whether a name without a library is that of a ViT."""
    return name.startswith(VIT)


def _own_name(name: str) -> tuple[str, int]:
    """Splits a name into base and width: 'resnet18-w16' is ('resnet18', 16), 'vit-tiny' is ('vit-tiny', 192)."""
    base = VIT if name == VIT or name.startswith(f"{VIT}-") else name.partition("-")[0]
    suffix = name.removeprefix(base)
    if base not in (*OWN_WIDTHS, VIT):
        raise ValueError(
            f"There is no encoder {name!r}. {nearest(base, (*OWN_WIDTHS, VIT))[:-1]}, torchvision:NAME, timm:NAME."
        )
    if not suffix:
        return base, VIT_WIDTH if base == VIT else OWN_WIDTHS[base]
    width = re.fullmatch(r"-w([1-9][0-9]{0,2})", suffix)
    if base == VIT:
        if width is None or int(width[1]) % VIT_HEAD or int(width[1]) > VIT_MAX_WIDTH:
            raise ValueError(
                f"There is no encoder {name!r}: {suffix[1:]!r} is not a width; use {VIT!r}, or for instance "
                f"'{VIT}-w64' (64 features; a multiple of {VIT_HEAD} up to {VIT_MAX_WIDTH})."
            )
    elif width is None or not MIN_WIDTH <= int(width[1]) <= MAX_WIDTH:
        raise ValueError(
            f"There is no encoder {name!r}: {suffix[1:]!r} is not a width; use {base!r}, or for instance "
            f"{f'{base}-w16'!r} (16 channels in the first stage; {MIN_WIDTH} to {MAX_WIDTH})."
        )
    return base, int(width[1])


def _own(config: EncoderConfig, size_px: int) -> nn.Module:
    if name_is_vit(config.name):
        return _vit(config.name, size_px)
    return _conv4(config.name) if config.name.startswith(CONV) else _resnet(config)


def _conv4(name: str) -> nn.Module:
    """Returns four 3x3 convolutions with BatchNorm, each with half the resolution and twice the channels of the last.

    With so few layers, a CPU trains it on more images per second than a ResNet of the same width (benchmarks/LOG.md).
    """
    _, width = _own_name(name)
    layers: list[nn.Module] = []
    for before, after in ((3, width), *((width << depth, width << depth + 1) for depth in range(3))):
        conv = nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        layers += [conv, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    encoder = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    encoder.num_features, encoder.size_px = width << 3, None  # type: ignore[assignment]
    return encoder


def _resnet(config: EncoderConfig) -> nn.Module:
    from torchvision.models import ResNet
    from torchvision.models.resnet import BasicBlock, Bottleneck

    base, width = _own_name(config.name)
    is_deep, depths = RESNETS[base]
    block = Bottleneck if is_deep else BasicBlock
    # torchvision's constructor only knows width 64. All its weights are replaced below, so build it on meta for free.
    with torch.device("meta"):
        resnet = ResNet(block, [1, 1, 1, 1])
    if config.stem == "cifar":
        # Padding 2 as in CaSSLe and PNR: a 32 x 32 image becomes a map of 34 x 34.
        resnet.conv1 = nn.Conv2d(3, width, kernel_size=3, stride=1, padding=2, bias=False)
        resnet.maxpool = nn.Identity()
    else:
        resnet.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
    resnet.bn1 = nn.BatchNorm2d(width)
    resnet.inplanes = width
    for stage, depth in enumerate(depths):
        layer = resnet._make_layer(block, width << stage, depth, stride=2 if stage else 1)
        setattr(resnet, f"layer{stage + 1}", layer)
    resnet.fc = nn.Identity()
    resnet.num_features, resnet.size_px = (width << 3) * block.expansion, None
    for module in resnet.modules():
        if isinstance(module, nn.Conv2d):  # as torchvision does; BatchNorm's defaults already match
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    built: nn.Module = resnet
    return built


def _vit(name: str, size_px: int) -> nn.Module:
    """Returns a small ViT. Its patches are 4 x 4 pixels for images up to 64 px, and 16 x 16 for larger ones."""
    from torchvision.models import VisionTransformer

    _, width = _own_name(name)
    vit = VisionTransformer(
        image_size=size_px,
        patch_size=4 if size_px <= 64 else 16,
        num_layers=VIT_DEPTH,
        num_heads=width // VIT_HEAD,
        hidden_dim=width,
        mlp_dim=4 * width,
        num_classes=1,
    )
    vit.heads = nn.Identity()
    vit.num_features, vit.size_px = width, size_px
    built: nn.Module = vit
    return built


# ---- torchvision's ---------------------------------------------------------------------------------------------------


def torchvision_names() -> list[str]:
    """Returns the names of torchvision's classification models."""
    from torchvision import models

    names: list[str] = models.list_models(module=models)  # only classification; detectors are in other modules
    return names


def _torchvision(name: str, size_px: int) -> nn.Module:
    from torchvision.models import get_model

    options: dict[str, Any] = {}
    if name.startswith("vit_"):
        options["image_size"] = size_px
    elif name.startswith("maxvit"):
        options["input_size"] = (size_px, size_px)
    elif name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": True}
    model: nn.Module = get_model(name, weights=None, **options)
    if name.startswith("squeezenet"):  # its head is a convolution
        model.classifier = nn.AdaptiveAvgPool2d(1)
    else:
        path = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Identity())
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # torchvision's models have it only in the head
            module.p = 0.0
    model.size_px = size_px if name.startswith(("vit_", "maxvit")) else None  # type: ignore[assignment]
    return model


# ---- timm's ----------------------------------------------------------------------------------------------------------


def _timm_package() -> ModuleType:
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise ValueError(f"Encoders named timm:NAME need the package timm ({error}): pip install timm.") from error


def _timm(name: str, size_px: int) -> nn.Module:
    options: dict[str, Any] = {"pretrained": False, "num_classes": 0}
    create: Any = _timm_package().create_model
    fixed: int | None = size_px
    try:
        model: nn.Module = create(name, **options, img_size=size_px)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        model, fixed = create(name, **options), None  # convolutions take any size
    model.size_px = fixed  # type: ignore[assignment]
    return model
