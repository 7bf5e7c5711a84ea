"""The results of the PNR paper (Cha et al., ICML 2024) in percent, each with the protocol behind it.

Top-1 accuracy after the last task, mean and standard deviation over three seeds unless the protocol says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

_METHODS = ("moco", "simclr", "barlow", "byol", "vicreg")
_STRATEGIES = ("finetune", "cassle", "pnr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How a published number was measured."""

    about: str
    probe: Literal["online", "linear"]
    num_seeds: int = 3
    caution: str = ""  # why our runs cannot be compared with it directly


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The paper's results for one method and strategy, under one recipe and scope."""

    where: str  # the table or figure of the paper
    protocol: Protocol
    values: Mapping[str, float]  # by metric, in percent
    deviations: Mapping[str, float] = field(default_factory=dict)  # over seeds, where the paper gives them
    caution: str = ""

    def value(self, name: str) -> float | None:
        """Returns a metric, or None if the paper does not give it."""
        return self.values.get(name)

    def text(self, name: str) -> str | None:
        """Returns a metric with its deviation as tables show it, or None if the paper does not give it."""
        if name not in self.values:
            return None
        deviation = f" ± {self.deviations[name]:.2f}" if name in self.deviations else ""
        return f"{self.values[name]:.2f}{deviation}"


ONLINE = Protocol(
    about="linear layer trained along with the encoder, on all classes from the first task on",
    probe="online",
    caution="The published CIFAR-100 numbers come from a layer trained online, while batch-norm statistics include "
    "data of tasks not yet learnt; ours come from a probe of the finished encoder.",
)
OFFLINE = Protocol(
    about="linear probe of the last checkpoint over all classes: SGD, 100 epochs, steps at 60 and 80",
    probe="linear",
    caution="There is more than one ImageNet-100: the authors' release refers to another list of classes than "
    "CaSSLe's, which fastcssl-prep uses.",
)
ONE_SEED = Protocol(about="linear probe of the last checkpoint over all classes, one seed", probe="linear", num_seeds=1)
DOMAINS = Protocol(about="one linear probe per domain, accuracies averaged (domain-aware)", probe="linear")
SEMI = Protocol(
    about="linear probe trained on a stratified subset of the labels", probe="linear", caution=OFFLINE.caution
)
DOWNSTREAM = Protocol(
    about="linear probe on other data: SGD, 100 epochs, batches of 256", probe="linear", caution=OFFLINE.caution
)
SUPERVISED = Protocol(about=f"{OFFLINE.about}; no deviation printed", probe="linear", caution=OFFLINE.caution)

_OTHERS = (
    "The paper copied this value from CaSSLe's, which gives neither a definition nor code; ours is our own version."
)
_SWAPPED = "Tables 1 and 2 of the paper swap the Joint values of Barlow and BYOL."
_REPEATED = "Table 1 repeats BYOL's value for VICReg."

Key = tuple[str, str, str, str]  # recipe, method, strategy, scope
Pair = tuple[float, float | None]
_found: dict[Key, Published] = {}


def _add(recipe: str, method: str, strategy: str, scope: str, found: Published) -> None:
    assert (recipe, method, strategy, scope) not in _found
    _found[recipe, method, strategy, scope] = found


def _table(
    where: str,
    recipe: str,
    protocol: Protocol,
    strategies: tuple[str, ...],
    rows: Mapping[str, tuple[Pair, ...]],
    scope: str = "all",
    caution: dict[tuple[str, str], str] | None = None,
) -> None:
    for method, pairs in rows.items():
        for strategy, (A, A_std) in zip(strategies, pairs, strict=True):
            others = _S_AND_P.get((recipe, method, strategy, scope))
            found = Published(
                where=where if others is None else f"{where}, S and P: figures 4 and 5",
                protocol=protocol,
                values={"A": A} if others is None else {"A": A, "S": others[0], "P": others[1]},
                deviations={} if A_std is None else {"A": A_std},
                caution=(caution or {}).get((method, strategy), ""),
            )
            _add(recipe, method, strategy, scope, found)


# From the captions of figures 4 and 5.
_S_AND_P: dict[Key, tuple[float, float]] = {
    ("imagenet100-class5", method, strategy, "all"): values
    for method, strategy, values in (
        ("moco", "pnr", (1.23, 3.47)),
        ("moco", "cassle", (2.80, 2.52)),
        ("moco", "finetune", (3.13, 2.38)),
        ("byol", "pnr", (0.4, -0.07)),
        ("byol", "cassle", (1.5, -0.47)),
        ("byol", "finetune", (4.9, 1.6)),
        ("barlow", "cassle", (2.52, 2.8)),
        ("simclr", "cassle", (2.22, 1.95)),
    )
}

_ALL = ("joint", *_STRATEGIES)
_table(
    "table 1", "cifar100-class5", ONLINE, _ALL,
    {
        "moco": ((66.90, 0.11), (51.95, 0.26), (60.11, 0.30), (62.36, 0.29)),
        "simclr": ((63.78, 0.22), (48.97, 0.74), (57.73, 1.07), (58.87, 0.16)),
        "barlow": ((68.99, 0.21), (55.81, 0.57), (60.10, 0.38), (60.28, 0.36)),
        "byol": ((69.36, 0.28), (52.43, 0.62), (61.36, 1.38), (63.19, 0.39)),
        "vicreg": ((68.01, 0.36), (52.43, 0.62), (53.13, 0.64), (56.47, 0.94)),
    },
    caution={("barlow", "joint"): _SWAPPED, ("byol", "joint"): _SWAPPED, ("vicreg", "finetune"): _REPEATED},
)  # fmt: skip
_table(
    "table 1", "cifar100-class5", ONLINE, ("ewc", "der", "lump", "lessforget"),
    {
        "simclr": ((53.60, None), (50.70, None), (52.30, None), (52.50, None)),
        "barlow": ((56.70, None), (55.30, None), (57.80, None), (56.40, None)),
        "byol": ((56.40, None), (54.80, None), (56.40, None), (58.60, None)),
    },
    caution={(m, s): _OTHERS for m in ("simclr", "barlow", "byol") for s in ("ewc", "der", "lump", "lessforget")},
)  # fmt: skip
_table(
    "table 2", "cifar100-class10", ONLINE, _ALL,
    {
        "moco": ((66.90, 0.11), (34.11, 0.90), (53.58, 0.41), (56.62, 0.31)),
        "simclr": ((63.78, 0.22), (39.48, 1.00), (53.02, 0.47), (53.47, 0.33)),
        "barlow": ((69.36, 0.21), (49.46, 0.67), (54.46, 0.24), (54.69, 0.21)),
        "byol": ((68.99, 0.28), (46.13, 0.88), (57.36, 0.86), (59.29, 0.25)),
        "vicreg": ((68.01, 0.36), (46.88, 0.28), (47.76, 0.46), (49.56, 0.56)),
    },
    caution={("barlow", "joint"): _SWAPPED, ("byol", "joint"): _SWAPPED},
)  # fmt: skip
_table(
    "table 2", "imagenet100-class5", OFFLINE, _STRATEGIES,
    {
        "moco": ((57.87, 0.49), (63.49, 0.44), (67.85, 0.44)),
        "simclr": ((56.11, 0.57), (62.53, 0.11), (62.88, 0.19)),
        "barlow": ((60.27, 0.27), (64.98, 0.79), (65.38, 0.81)),
        "byol": ((60.77, 0.62), (62.31, 0.09), (64.23, 0.37)),
        "vicreg": ((55.58, 0.22), (59.18, 0.36), (62.48, 0.44)),
    },
)  # fmt: skip
_table(
    "table 2", "imagenet100-class10", OFFLINE, _STRATEGIES,
    {
        "moco": ((47.48, 0.42), (52.71, 0.47), (60.75, 0.39)),
        "simclr": ((46.66, 0.59), (54.55, 0.12), (54.79, 0.11)),
        "barlow": ((51.83, 0.46), (56.27, 0.63), (56.54, 0.42)),
        "byol": ((51.04, 0.52), (57.47, 0.75), (60.11, 0.91)),
        "vicreg": ((46.88, 0.34), (49.98, 0.53), (51.82, 0.50)),
    },
)  # fmt: skip
_table(
    "table 4", "imagenet100-data5", OFFLINE, _STRATEGIES,
    {
        "moco": ((65.51, 0.72), (66.88, 0.32), (69.98, 0.30)),
        "simclr": ((62.88, 0.30), (66.05, 0.95), (66.93, 0.12)),
        "barlow": ((66.47, 0.24), (69.24, 0.36), (70.16, 0.40)),
        "byol": ((69.76, 0.45), (66.22, 0.13), (66.08, 0.15)),
        "vicreg": ((64.02, 0.11), (67.18, 0.15), (67.68, 0.12)),
    },
)  # fmt: skip
_table(
    "table 4", "imagenet100-data10", OFFLINE, _STRATEGIES,
    {
        "moco": ((60.50, 0.92), (59.72, 0.61), (67.83, 0.45)),
        "simclr": ((56.47, 0.11), (61.68, 0.38), (62.04, 0.28)),
        "barlow": ((59.48, 1.33), (63.12, 0.28), (64.06, 0.33)),
        "byol": ((61.39, 0.44), (63.33, 0.19), (63.10, 0.28)),
        "vicreg": ((57.30, 0.09), (61.50, 0.21), (62.08, 0.20)),
    },
)  # fmt: skip
for _recipe, _where in (
    ("imagenet100-class5", "table 2"),
    ("imagenet100-class10", "table 2"),
    ("imagenet100-data5", "table 4"),
    ("imagenet100-data10", "table 4"),
):
    _table(
        _where, _recipe, OFFLINE, ("joint",),
        {
            "moco": ((76.67, 0.56),),
            "simclr": ((71.91, 0.57),),
            "barlow": ((75.89, 0.22),),
            "byol": ((75.52, 0.17),),
            "vicreg": ((75.08, 0.14),),
        },
    )  # fmt: skip
_table(
    "table 4", "domainnet-domain6", DOMAINS, _ALL,
    {
        "moco": ((48.20, 0.30), (36.48, 1.01), (38.04, 0.24), (43.86, 0.17)),
        "simclr": ((48.50, 0.21), (39.46, 0.20), (45.96, 0.19), (46.37, 0.13)),
        "barlow": ((49.50, 0.32), (41.87, 0.17), (48.49, 0.04), (48.90, 0.07)),
        "byol": ((53.80, 0.24), (47.29, 0.08), (51.52, 0.18), (51.96, 0.08)),
        "vicreg": ((52.12, 0.17), (46.11, 0.14), (48.82, 0.12), (48.95, 0.15)),
    },
    scope="domain-aware",
)  # fmt: skip
for _recipe, _moco, _byol in (
    ("imagenet1k-class5", (60.62, 48.33, 50.57, 56.87), (69.46, 60.76, 64.78, 66.12)),
    ("imagenet1k-class10", (60.62, 42.55, 43.38, 55.88), (69.46, 57.15, 61.93, 62.56)),
):
    _rows = {"moco": tuple((a, None) for a in _moco), "byol": tuple((a, None) for a in _byol)}
    _table("table 3", _recipe, ONE_SEED, _ALL, _rows)
for _recipe, _cassle, _pnr in (
    ("cifar100-class5", 60.38, 60.73),
    ("cifar100-class10", 55.38, 56.16),
    ("imagenet100-class5", 66.26, 66.96),
    ("imagenet100-class10", 60.48, 60.95),
):
    _protocol = ONLINE if _recipe.startswith("cifar") else SUPERVISED
    _table("table 10", _recipe, _protocol, ("cassle", "pnr"), {"supcon": ((_cassle, None), (_pnr, None))})

# ---- Other probes of the ImageNet-100 encoders -----------------------------------------------------------------------

_PROBED = (*((m, "cassle") for m in ("moco", "simclr", "barlow", "byol")), ("moco", "pnr"), ("byol", "pnr"))


def _probed(where: str, protocol: Protocol, recipe: str, scope: str, values: tuple[float, ...]) -> None:
    for (method, strategy), A in zip(_PROBED, values, strict=True):
        _add(recipe, method, strategy, scope, Published(where=where, protocol=protocol, values={"A": A}))


for _recipe, _scope, _values in (
    ("imagenet100-class5", "semi-10", (56.48, 55.16, 55.10, 54.22, 61.74, 57.36)),
    ("imagenet100-data5", "semi-10", (62.66, 60.14, 62.18, 59.48, 65.28, 58.04)),
    ("imagenet100-class5", "semi-1", (39.14, 40.86, 41.90, 36.86, 46.48, 40.82)),
    ("imagenet100-data5", "semi-1", (51.04, 49.72, 54.10, 46.06, 54.88, 44.46)),
):
    _probed("table 6", SEMI, _recipe, _scope, _values)
for _recipe, _scope, _values in (
    ("imagenet100-class5", "downstream:cifar100", (44.52, 41.99, 43.59, 46.71, 47.80, 48.80)),
    ("imagenet100-class5", "downstream:cifar10", (68.09, 64.90, 65.43, 69.42, 71.26, 70.21)),
    ("imagenet100-class5", "downstream:stl10", (63.23, 63.30, 65.39, 67.93, 67.07, 68.59)),
    ("imagenet100-class10", "downstream:cifar100", (40.84, 40.34, 40.67, 45.49, 45.86, 48.63)),
    ("imagenet100-class10", "downstream:cifar10", (66.01, 64.62, 64.42, 68.02, 68.65, 70.34)),
    ("imagenet100-class10", "downstream:stl10", (60.16, 59.77, 62.38, 65.55, 65.78, 67.51)),
    ("imagenet100-data5", "downstream:cifar100", (44.50, 42.33, 44.50, 47.02, 47.07, 48.14)),
    ("imagenet100-data5", "downstream:cifar10", (68.47, 65.03, 66.92, 69.14, 70.01, 69.03)),
    ("imagenet100-data5", "downstream:stl10", (64.49, 63.54, 67.20, 68.66, 69.98, 68.68)),
    ("imagenet100-data10", "downstream:cifar100", (42.17, 41.30, 43.53, 45.30, 46.88, 48.05)),
    ("imagenet100-data10", "downstream:cifar10", (66.66, 65.90, 65.38, 69.27, 69.84, 70.80)),
    ("imagenet100-data10", "downstream:stl10", (60.35, 61.88, 64.51, 67.35, 67.48, 67.95)),
):
    _probed("table 11", DOWNSTREAM, _recipe, _scope, _values)
for _recipe, _values in (
    ("imagenet100-class5", (28.32, 34.68, 37.42, 38.98, 38.86, 41.57)),
    ("imagenet100-class10", (28.57, 33.33, 38.30, 38.05, 38.19, 39.84)),
    ("imagenet100-data5", (29.74, 34.17, 36.13, 37.04, 38.33, 40.06)),
    ("imagenet100-data10", (32.81, 35.53, 38.45, 35.91, 40.45, 37.83)),
):
    _probed("table 12", DOWNSTREAM, _recipe, "downstream:clipart", _values)

PUBLISHED: dict[Key, Published] = dict(_found)


def published(recipe: str, method: str, strategy: str, scope: str) -> Published | None:
    return PUBLISHED.get((recipe, method, strategy, scope))
