"""Recipes: every combination builds, and its numbers are those of the published tables, typed here a second time."""

import dataclasses
import itertools
import subprocess
import sys
from typing import Any, get_args

import pytest

from fastcssl.cli.train import parsed
from fastcssl.config import recipes
from fastcssl.config.recipes import ABLATIONS, COMMAND_LINE, OURS, RECIPES, flat, recipe
from fastcssl.config.recipes.own_data import FROM_DATA
from fastcssl.data.views import Family
from fastcssl.errors import UserError
from fastcssl.learn import methods, strategies
from fastcssl.learn.optim import lr_peak

SETTINGS = ("matched", "published")
METHODS = ("moco", "simclr", "barlow", "byol", "vicreg", "supcon")
STRATEGIES = ("finetune", "cassle", "pnr", "joint", "ewc", "der", "lump", "lessforget")
NAMES = (
    *(f"{data}-{split}" for data in ("cifar100", "imagenet100") for split in ("class5", "class10", "data5", "data10")),
    "imagenet1k-class5",
    "imagenet1k-class10",
    "domainnet-domain6",
)

OF_AUTHORS = {
    "paper table 14",
    "paper table 15",
    "paper text",
    "PNR script",
    "PNR script, 2 x 128",
    "PNR code",
    "CaSSLe script",
    "CaSSLe script, 2 x 128",
    "CaSSLe script, 4 x 64",
    "CaSSLe script of ImageNet-100",
    "CaSSLe code",
    "LUMP script",
}
FROM = {f"{data} ({source})" for data in ("CIFAR-100", "ImageNet-100", "SimCLR") for source in OF_AUTHORS}
SOURCES = OF_AUTHORS | {f"as {it}" for it in FROM} | {f"ours, as {it}" for it in FROM}
SOURCES |= {OURS, "ours, as ImageNet-100", "ours, as LUMP"}


def found(text: str, settings: str = "matched") -> tuple[dict[str, Any], dict[str, str]]:
    made = recipe(*text.split(), settings=settings)  # type: ignore[arg-type]
    return dict(flat(made.config)), dict(made.sources)


# ---- What the paper's tables and the scripts have: CIFAR-100, ImageNet-100, DomainNet --------------------------------

PAPER_LR = {"moco": (0.6, 0.6, 0.6), "simclr": (0.6, 0.6, 0.6), "barlow": (0.3, 0.4, 0.4), "byol": (1.0, 0.6, 0.6)}
PNR_LR = {
    "moco": (0.6, 0.6, 0.6),
    "simclr": (0.6, 0.4, 0.4),
    "barlow": (0.4, 0.4, 0.4),
    "byol": (1.0, 0.6, 0.6),
    "vicreg": (0.3, 0.4, 0.4),
}
CASSLE_LR = {
    "moco": (0.4, 0.4, 0.4),  # on CIFAR from the paper's table
    "simclr": (0.4, 0.4, 0.4),
    "barlow": (0.3, 0.4, 0.4),
    "byol": (1.0, 0.6, 0.6),
    "vicreg": (0.3, 0.4, 0.4),
    "supcon": (0.4, 0.4, 0.4),
}
LAMBDA = {  # Barlow, BYOL, VICReg
    "cifar100-class5": (1, 0.5, 23),
    "cifar100-class10": (1, 0.7, 23),
    "imagenet100-class5": (1, 1, 23),
    "imagenet100-class10": (1, 1, 23),
    "imagenet100-data5": (0.1, 0.1, 5),
    "imagenet100-data10": (0.1, 0.1, 5),
    "domainnet-domain6": (1, 1, 8),
    # Ours.
    "cifar100-data5": (0.1, 0.1, 5),
    "cifar100-data10": (0.1, 0.1, 5),
    "imagenet1k-class5": (1, 1, 23),
    "imagenet1k-class10": (1, 1, 23),
}
HEADS = {
    "moco": {"hidden": 2048, "dim": 128, "temperature": 0.2, "align_temperature": 0.2, "ema_base": 0.99}
    | {"ema_final": 0.999, "bank.size": 65536, "bank.at_task_start": "keep"},
    "simclr": {"hidden": 2048, "dim": 128, "temperature": 0.2, "align_temperature": 0.2},
    "supcon": {"hidden": 2048, "dim": 128, "temperature": 0.1, "align_temperature": 0.2},
    "barlow": {"hidden": 2048, "dim": 2048, "off_diagonal_weight": 0.005, "scale": 0.1},
    "byol": {"hidden": 4096, "dim": 256, "ema_base": 0.99, "ema_final": 1.0},
    "vicreg": {"hidden": 2048, "dim": 2048, "similarity_weight": 25, "variance_weight": 25, "covariance_weight": 1},
}
LARS = {"optim.name": "lars", "optim.eta": 0.02, "optim.clip": True, "optim.momentum": 0.9} | {
    "optim.schedule": "warmup-cosine",
    "optim.warmup_epochs": 10,
    "optim.warmup_start_lr": 0.003,
    "optim.min_lr": 0.0,
    "optim.schedule_unit": "epoch",
}
SGD = {"optim.name": "sgd", "optim.momentum": 0.9, "optim.schedule": "cosine"} | {
    "optim.min_lr": 0.0,
    "optim.schedule_unit": "epoch",
}


def expected(name: str, method: str, strategy: str, settings: str) -> dict[str, Any]:
    column = next(n for n, data in enumerate(("cifar", "imagenet", "domainnet")) if name.startswith(data))
    published, by_pnr = settings == "published", settings == "matched" or strategy == "pnr"
    like = "simclr" if method == "supcon" else method
    if not published:
        lr = PAPER_LR.get(like, PNR_LR[like])[column]
    else:
        lr = PNR_LR[like][column] if by_pnr else CASSLE_LR[method][column]
    sgd = method == "moco" and not by_pnr
    cassle_simclr = like == "simclr" and column == 0 and not by_pnr
    several_gpus = published and column > 0
    wanted = {
        "epochs": (500, 400, 200)[column],
        "batch_size": 256,
        "seed": 5,
        "encoder.name": "resnet50" if name.startswith("imagenet1k") else "resnet18",
        "encoder.stem": "imagenet" if column else "cifar",
        "views.policy": f"{'pnr' if by_pnr else 'cassle'}-{method}-{'imagenet' if column else 'cifar'}",
        "optim.lr": lr,
        "optim.weight_decay": 1e-5 if method == "byol" or cassle_simclr else 1e-4,
        "optim.exclude_bias_and_norm": method != "moco",
        "expect.source": "imagenet" if name.startswith("imagenet1k") else name.partition("-")[0],
        "expect.scenario": name.partition("-")[2].rstrip("0123456789"),
        "expect.num_tasks": 10 if name.endswith("10") else 6 if name.endswith("6") else 5,
        **{f"method.{key}": value for key, value in HEADS[method].items()},
        **(SGD if sgd else LARS),
    }
    if several_gpus:
        wanted["scope"] = "global" if method == "barlow" else "local"
    if cassle_simclr:
        wanted["method.dim"] = 256
    if method == "byol":
        wanted["method.predictor_hidden"] = 8192 if column else 4096
    if method == "moco":
        wanted |= {"probe_lr": 0.3, **({"method.bank.initial": "random"} if published else {})}
    elif (column == 0 and method not in ("vicreg", "supcon")) or method == "byol":
        wanted["probe_lr"] = 0.1
    if method == "barlow" and several_gpus:
        wanted["method.gradient"] = "reference"
    if strategy == "cassle":
        wanted |= {"strategy.weight": 1.0, **({"strategy.frozen": "batch"} if published else {})}
    if strategy == "pnr":
        wanted |= {"strategy.form": "code", "strategy.pn1": True, "strategy.pn2": True}
        if published:
            wanted["strategy.frozen"] = "eval" if column else "batch"
        if method in ("moco", "simclr", "supcon"):
            wanted["strategy.temperature"] = 0.2
        else:
            wanted["strategy.weight"] = LAMBDA[name][("barlow", "byol", "vicreg").index(method)]
            wanted["strategy.align_weight"] = 1.0
    if strategy == "lump" and column == 0:
        wanted |= {"strategy.alpha": 0.4, "strategy.budget": 256}
    if strategy == "der" and column == 0:
        wanted["strategy.budget"] = 256
    return wanted


# What the tables above say nothing of stays as its own default. These must, as the references do otherwise.
OUR_WAY = {"scope": "global", "strategy.frozen": "eval", "method.bank.initial": "empty", "method.gradient": "exact"}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_the_tables(name: str, settings: str) -> None:
    """All methods and strategies of the paper, also those that are not installed: rows are data."""
    for method, strategy in itertools.product(METHODS, STRATEGIES):
        values = recipes.settled(name, method, strategy, settings)  # type: ignore[arg-type]
        wanted = expected(name, method, strategy, settings)
        assert {key: values[key][0] for key in wanted if key in values} == wanted, (method, strategy)
        # Nothing else is set: what the references leave open has the default of its own place.
        open_keys = {"recipe", "probe_lr"}
        assert set(values) - set(wanted) <= open_keys, (method, strategy)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", RECIPES)
def test_every_combination_builds_and_every_value_has_a_source(name: str, settings: str) -> None:
    for method, strategy in itertools.product(methods.names(), strategies.names()):
        made = recipe(name, method, strategy, settings=settings)  # type: ignore[arg-type]
        values = dict(flat(made.config))
        assert made.config.recipe == name
        assert type(made.config.method) is methods.find(method).Config
        assert type(made.config.strategy) is strategies.find(strategy).Config
        assert set(values) == set(made.sources)
        assert made.sources["recipe"] == COMMAND_LINE
        assert {source.partition(":")[0] for source in made.sources.values()} - {COMMAND_LINE, FROM_DATA} <= SOURCES
        strategies.find(strategy).check(made.config.strategy, methods.find(method))
        size_px = {"own-small": 96, "demo": 32, "demo-styles": 32}.get(name, 32 if name.startswith("cifar") else 224)
        assert made.config.views.views()[0].size_px == size_px
        if name in NAMES and method in METHODS and strategy in STRATEGIES:
            wanted = expected(name, method, strategy, settings)
            assert {key: values[key] for key in wanted} == wanted, (method, strategy)
        if settings == "matched":
            ours = {key: value for key, value in OUR_WAY.items() if key in values}
            assert {key: values[key] for key in ours} == ours, (method, strategy)


def test_the_paper_has_these_experiments() -> None:
    assert set(RECIPES) == {*NAMES, "demo", "demo-styles", "own", "own-small"}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("method", METHODS)
def test_matched_is_alike_for_every_strategy(method: str, strategy: str) -> None:
    for name in RECIPES:
        mine, plain = (
            {
                key: value
                for key, value in recipes.settled(name, method, it, "matched").items()
                if "strategy." not in key
            }
            for it in (strategy, "finetune")
        )
        assert mine == plain, name


@pytest.mark.parametrize(
    ("words", "settings", "key", "value", "source"),
    [
        ("cifar100-class5 moco pnr", "matched", "optim.lr", 0.6, "paper table 14"),
        ("cifar100-class5 moco pnr", "published", "optim.lr", 0.6, "PNR script"),
        ("imagenet100-class5 simclr pnr", "matched", "optim.lr", 0.6, "paper table 14"),
        ("imagenet100-class5 simclr pnr", "published", "optim.lr", 0.4, "PNR script"),
        ("cifar100-class5 moco cassle", "published", "optim.lr", 0.4, "paper table 14"),
        ("cifar100-class5 moco cassle", "published", "optim.name", "sgd", "CaSSLe script of ImageNet-100"),
        ("imagenet100-class5 moco cassle", "published", "optim.name", "sgd", "CaSSLe script"),
        ("cifar100-class5 moco cassle", "published", "views.policy", "cassle-moco-cifar", OURS),
        ("imagenet100-class5 moco pnr", "matched", "batch_size", 256, "PNR script, 2 x 128"),
        ("domainnet-domain6 moco pnr", "matched", "batch_size", 256, "PNR script, 2 x 128"),
        ("domainnet-domain6 byol cassle", "published", "batch_size", 256, "CaSSLe script, 4 x 64"),
        ("domainnet-domain6 moco pnr", "matched", "epochs", 200, "paper table 14"),
        ("cifar100-class5 byol pnr", "matched", "strategy.weight", 0.5, "paper table 15"),
        ("cifar100-class10 byol pnr", "published", "strategy.weight", 0.7, "paper table 15"),
        ("cifar100-data5 byol pnr", "matched", "strategy.weight", 0.1, "ours, as ImageNet-100 (paper table 15)"),
        ("imagenet100-class5 byol pnr", "matched", "strategy.weight", 1.0, "paper table 15"),
        ("imagenet1k-class5 byol pnr", "matched", "strategy.weight", 1.0, "as ImageNet-100 (paper table 15)"),
        ("imagenet1k-class5 byol cassle", "published", "encoder.name", "resnet50", "paper text"),
        ("imagenet1k-class10 moco pnr", "matched", "epochs", 400, "as ImageNet-100 (paper table 14)"),
        ("imagenet1k-class10 simclr pnr", "matched", "epochs", 400, "ours, as ImageNet-100"),
        ("imagenet1k-class5 simclr pnr", "matched", "views.policy", "pnr-simclr-imagenet", "ours, as ImageNet-100"),
        ("cifar100-class5 moco cassle", "matched", "strategy.weight", 1.0, "CaSSLe script"),
        ("cifar100-class5 moco pnr", "matched", "optim.exclude_bias_and_norm", False, "PNR script"),
        ("cifar100-class5 moco pnr", "matched", "method.bank.initial", "empty", OURS),
        ("cifar100-class5 moco pnr", "published", "method.bank.initial", "random", "PNR code"),
        ("cifar100-class5 simclr cassle", "published", "optim.weight_decay", 1e-5, "CaSSLe script"),
        ("cifar100-class5 moco pnr", "matched", "probe_lr", 0.3, "PNR script"),
        ("cifar100-class5 byol pnr", "matched", "probe_lr", 0.1, "CaSSLe script"),
        ("demo moco pnr", "matched", "encoder.name", "resnet18-w16", OURS),
        ("demo-styles moco pnr", "matched", "encoder.name", "conv4-w16", OURS),
    ],
)
def test_values_name_their_source(words: str, settings: str, key: str, value: object, source: str) -> None:
    values, sources = found(words, settings)
    assert (values[key], sources[key]) == (value, source)


@pytest.mark.parametrize(
    ("words", "settings", "key", "value", "source"),
    [
        ("cifar100-class5 barlow pnr", "matched", "optim.lr", 0.3, "paper table 14"),
        ("cifar100-class5 barlow pnr", "published", "optim.lr", 0.4, "PNR script"),
        ("imagenet100-data10 vicreg pnr", "matched", "strategy.weight", 5, "paper table 15"),
        ("imagenet100-class5 vicreg pnr", "matched", "optim.lr", 0.4, "PNR script"),
        ("imagenet100-class5 supcon pnr", "matched", "optim.lr", 0.6, "ours, as SimCLR (paper table 14)"),
        ("imagenet100-class5 supcon cassle", "published", "optim.lr", 0.4, "CaSSLe script"),
        ("imagenet100-class5 supcon pnr", "published", "optim.lr", 0.4, "ours, as SimCLR (PNR script)"),
        ("cifar100-class5 supcon cassle", "published", "optim.weight_decay", 1e-5, "ours, as SimCLR (CaSSLe script)"),
        ("imagenet1k-class5 supcon pnr", "matched", "optim.lr", 0.6, "ours, as ImageNet-100"),
        ("cifar100-class5 moco lump", "matched", "strategy.alpha", 0.4, "LUMP script"),
        ("cifar100-class5 moco der", "published", "strategy.budget", 256, "ours, as LUMP"),
    ],
)
def test_rows_name_their_source(words: str, settings: str, key: str, value: object, source: str) -> None:
    """Of methods and strategies that need not be installed."""
    assert recipes.settled(*words.split(), settings)[key] == (value, source)  # type: ignore[call-arg,arg-type]


def test_every_row_is_used_somewhere() -> None:
    """A slip in a selector would leave a value out without a word."""
    orders = [recipes._authority(settings, authors) for settings in SETTINGS for authors in ("cassle", "pnr")]  # type: ignore[arg-type]
    tables = {id(row): row for order in orders for table in order for row in table}
    used: set[int] = set()
    for name, method, strategy, settings in itertools.product(RECIPES, METHODS, STRATEGIES, SETTINGS):
        data = RECIPES[name]
        kinds = [(data.scenario, data.family)]
        if data.follows_data:
            kinds = list(itertools.product(("class", "data", "domain"), get_args(Family)))
        for scenario, family in kinds:
            where = {"recipe": name, "data": data.source, "scenario": scenario, "family": family}
            where |= {"method": method, "strategy": strategy, "settings": settings}
            where["authors"] = recipes.authors_of(strategy, settings)  # type: ignore[arg-type]
            used |= {number for number, row in tables.items() if row.holds(where)}
    assert [tables[number] for number in set(tables) - used] == []


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, it in ABLATIONS.items() for value in it.values])
def test_an_ablation_is_one_flag(name: str, value: str) -> None:
    item = ABLATIONS[name]
    words = ("cifar100-class5", item.method, item.strategy)
    before = recipe(*words)
    _, after = parsed(words, before, [item.flag, value])
    changed = {key: new for key, new in flat(after.config) if new != dict(flat(before.config))[key]}
    key = item.flag.removeprefix("--")
    # The paper's own size is in its list too.
    assert changed == ({} if value == "65536" else {key: False if value == "off" else int(value)})


def test_the_papers_ablations_are_there() -> None:
    flags = {(item.method, item.strategy, item.flag, value) for item in ABLATIONS.values() for value in item.values}
    assert flags == {
        ("moco", "pnr", "--strategy.pn1", "off"),
        ("moco", "pnr", "--strategy.pn2", "off"),
        ("moco", "cassle", "--method.bank.size", "131072"),
        *(("moco", "pnr", "--method.bank.size", str(2**power)) for power in (8, 9, 11, 14, 16, 17)),
    }


def test_what_is_changed_is_the_command_lines() -> None:
    before = recipe("cifar100-class5", "moco", "pnr")
    optim = dataclasses.replace(before.config.optim, lr=0.3, weight_decay=1e-4)
    after = before.changed_to(dataclasses.replace(before.config, optim=optim, epochs=7))
    changed = {key for key in after.sources if after.sources[key] != before.sources[key]}
    assert changed == {"optim.lr", "epochs"}
    assert after.sources["optim.lr"] == COMMAND_LINE and after.config.optim.lr == 0.3


def test_the_probes_learning_rate_matters_where_it_is_used() -> None:
    config = recipe("cifar100-class5", "moco", "pnr").config
    assert "probe_lr" not in dataclasses.replace(config, online_probe="every=5").identity()
    assert dataclasses.replace(config, online_probe="every=5,parity").identity()["probe_lr"] == 0.3
    with pytest.raises(ValueError, match=r"probe_lr is 0; it must be finite and above 0"):
        dataclasses.replace(config, probe_lr=0)


def test_unknown_words_name_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no recipe 'cifar100-clas5'. Did you mean 'cifar100-class5'"):
        recipe("cifar100-clas5", "moco", "pnr")
    with pytest.raises(ValueError, match=r"no method 'mocco'. Did you mean 'moco'"):
        recipe("demo", "mocco", "pnr")
    with pytest.raises(ValueError, match=r"no strategy 'casle'. Did you mean 'cassle'"):
        recipe("demo", "moco", "casle")


def test_listing_needs_no_torch() -> None:
    code = (
        "import sys; from fastcssl.cli.train import main; "
        "assert main(['--list']) == 0 and main(['--help']) == 0 and main(['demo', 'mocco']) == 2; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["demo-styles", "own-small"])
def test_the_learning_rate_warms_up_to_its_peak(name: str) -> None:
    config = recipe(name, "moco", "pnr").config
    assert config.optim.warmup_start_lr < lr_peak(config.optim, config.batch_size)
