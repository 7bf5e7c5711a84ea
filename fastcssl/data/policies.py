"""Lists the view policies of CaSSLe and PNR by name, and offers building blocks for a method's own views.

The numbers are those of the released scripts. A name is "AUTHORS-METHOD-FAMILY", "probe-train-FAMILY" or
"probe-val-FAMILY". A method that these authors did not train declares its own views (`Method.views`). It may build
them from `plain_view` and `pair`.
"""

from dataclasses import dataclass, replace
from typing import get_args

from dataprep.suggest import nearest
from fastcssl.data.views import Family, Policy, Range, ViewSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPolicy:
    """The policy behind a name: its views, and the family of images that they are made for."""

    views: Policy
    family: Family


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A row of the table: the settings in which methods' views differ. Pairs are (first view, second view)."""

    min_scale: float
    jitter: tuple[float, float, float, float]  # brightness, contrast, saturation, hue
    blur_p: Range  # on large images; the references never blur CIFAR's
    solarize_p: Range


_ASYMMETRIC = _Look(min_scale=0.08, jitter=(0.4, 0.4, 0.2, 0.1), blur_p=(1.0, 0.1), solarize_p=(0.0, 0.2))
_VICREG = _Look(min_scale=0.2, jitter=(0.4, 0.4, 0.2, 0.1), blur_p=(0.5, 0.5), solarize_p=(0.1, 0.1))
_STRONG = _Look(min_scale=0.08, jitter=(0.8, 0.8, 0.8, 0.2), blur_p=(0.5, 0.5), solarize_p=(0.0, 0.0))
_MODERATE = _Look(min_scale=0.08, jitter=(0.4, 0.4, 0.4, 0.1), blur_p=(0.5, 0.5), solarize_p=(0.0, 0.0))

# By authors, then by method, like the authors' scripts.
_LOOKS: dict[str, dict[str, _Look]] = {
    "cassle": {
        "moco": _MODERATE,
        "simclr": _STRONG,
        "barlow": _ASYMMETRIC,
        "byol": _ASYMMETRIC,
        "vicreg": _VICREG,
        "supcon": _STRONG,
    },
    "pnr": {
        "moco": _ASYMMETRIC,
        "simclr": _ASYMMETRIC,
        "barlow": _ASYMMETRIC,
        "byol": _ASYMMETRIC,
        "vicreg": _VICREG,
        "supcon": _ASYMMETRIC,
    },
}

# Names for which the references have no script; the values follow the method's other scripts, or SimCLR's.
EXTRAPOLATED = frozenset({"cassle-moco-cifar", "cassle-supcon-cifar", "pnr-supcon-cifar", "pnr-supcon-imagenet"})


def plain_view(family: Family) -> ViewSpec:
    """Returns the random crop alone, of the family's size and with its normalisation."""
    if family == "cifar":
        return ViewSpec(size_px=32, mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.243, 0.261))
    # The first std is .228 in the references (.229 elsewhere). The published results used it.
    return ViewSpec(size_px=224, mean=(0.485, 0.456, 0.406), std=(0.228, 0.224, 0.225))


def pair(family: Family) -> Policy:
    """Returns the two views that most methods of the references share: one blurred more, the other solarized."""
    return _pretraining(_ASYMMETRIC, family)


def _pretraining(look: _Look, family: Family) -> Policy:
    """Returns the two views that a row of the table describes."""
    brightness, contrast, saturation, hue = look.jitter
    return tuple(
        replace(
            plain_view(family),
            scale=(look.min_scale, 1.0),
            flip_p=0.5,
            jitter_p=0.8,
            brightness=brightness,
            contrast=contrast,
            saturation=saturation,
            hue=hue,
            gray_p=0.2,
            blur_p=blur_p if family == "imagenet" else 0.0,
            solarize_p=solarize_p,
        )
        for blur_p, solarize_p in zip(look.blur_p, look.solarize_p, strict=True)
    )


def _all_policies() -> dict[str, NamedPolicy]:
    """Returns every policy of the references by its name."""
    named = {
        f"{authors}-{method}-{family}": NamedPolicy(views=_pretraining(look, family), family=family)
        for authors, looks in _LOOKS.items()
        for method, look in looks.items()
        for family in get_args(Family)
    }
    cifar, imagenet = plain_view("cifar"), plain_view("imagenet")
    probes: dict[Family, tuple[ViewSpec, ViewSpec]] = {
        "cifar": (replace(cifar, flip_p=0.5), replace(cifar, crop="whole")),
        "imagenet": (replace(imagenet, flip_p=0.5), replace(imagenet, crop="center", resize_px=256)),
    }
    for family, (train, val) in probes.items():
        named[f"probe-train-{family}"] = NamedPolicy(views=(train,), family=family)
        named[f"probe-val-{family}"] = NamedPolicy(views=(val,), family=family)
    return named


NAMED: dict[str, NamedPolicy] = _all_policies()
POLICIES: dict[str, Policy] = {name: named.views for name, named in NAMED.items()}


def policy(name: str) -> Policy:
    """Returns the policy "{cassle|pnr}-{method}-{family}", "probe-train-{family}" or "probe-val-{family}"."""
    if name not in POLICIES:
        raise ValueError(f"There is no view policy {name!r}. {nearest(name, POLICIES)}")
    return POLICIES[name]
