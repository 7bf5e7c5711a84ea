"""Named experiments as data: the values that a run starts with, each with its source.

A value is looked up in several tables, and the first table that has it wins. The order depends on the settings:
- `matched` (the default) asks the paper's tables, then PNR's scripts, then CaSSLe's scripts. The order is the same for
  every strategy, because PNR's scripts change more than the loss and would make a comparison of strategies unfair.
- `published` asks the scripts of a strategy's own authors first, and also follows what their code does.
A value that no table has is our own choice.

To add a recipe, add an entry to RECIPES, and rows where its numbers differ from those of its family. To add a method or
a strategy, add rows; without rows it starts from its own defaults. Nothing here needs torch until a configuration is
built.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataprep.suggest import nearest
from fastcssl.config.recipes.experiments import ABLATIONS, RECIPES, Data
from fastcssl.config.recipes.ours import OWN
from fastcssl.config.recipes.own_data import DataFacts, facts_of, followed
from fastcssl.config.recipes.paper import PAPER
from fastcssl.config.recipes.rows import COMMAND_LINE, OURS, SCRIPT, Authors, Row, RowTable, Settings
from fastcssl.config.recipes.scripts import CASSLE, PNR
from fastcssl.data.policies import EXTRAPOLATED, NAMED
from fastcssl.data.views import Family
from fastcssl.errors import UserError

if TYPE_CHECKING:
    from fastcssl.config.config import Config

__all__ = ["ABLATIONS", "COMMAND_LINE", "OURS", "RECIPES", "Data", "Recipe", "Settings", "flat", "recipe", "settled"]


def _authority(settings: Settings, authors: Authors) -> tuple[RowTable, ...]:
    """Returns the tables in the order in which a value is looked up."""
    if settings == "matched":
        return OWN, PAPER, PNR, CASSLE
    return (OWN, PNR, PAPER, CASSLE) if authors == "pnr" else (OWN, CASSLE, PAPER)


# Combinations that no author trained borrow the numbers of a similar one. SupCon is SimCLR with labels. For ImageNet-1k
# the paper states "the same hyper-parameters" as ImageNet-100, for the two methods that it trains there.
_LIKE_METHOD = {"supcon": ("simclr", "SimCLR")}
_LIKE_DATA = {"imagenet100": "ImageNet-100"}
_ON_IMAGENET_1K = ("moco", "byol")


# ---- Looking up ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The configuration of a run, and where each of its values comes from."""

    config: "Config"
    sources: Mapping[str, str]  # by dotted key, one for each value of the configuration
    settings: Settings = "matched"
    awaits_data: bool = False  # values follow the data, which is not known yet; see `completed`

    def changed(self, values: Mapping[str, Any]) -> "Recipe":
        """Returns the recipe with other values, by dotted key as in the flags: {"epochs": 1, "optim.lr": 0.3}."""
        known = dict(flat(self.config))
        tree: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                raise UserError(f"There is no setting {key!r}. {nearest(key, known)}")
            _put(tree, key, value)
        found = self.changed_to(_filled(self.config, tree))
        if not self.awaits_data:
            return found
        # A value that was asked for stays, even if it equals the one that stands in for the data's.
        return dataclasses.replace(found, sources={**found.sources, **dict.fromkeys(values, COMMAND_LINE)})

    def changed_to(self, config: "Config") -> "Recipe":
        """Returns the recipe with another configuration; values that differ count as given on the command line."""
        before, after = dict(flat(self.config)), dict(flat(config))
        sources = {
            key: self.sources.get(key, OURS) if key in before and before[key] == value else COMMAND_LINE
            for key, value in after.items()
        }
        return dataclasses.replace(self, config=config, sources=sources)

    def completed(self, data: Path) -> "Recipe":
        """Returns the recipe with the values that follow the data; values that were changed stay."""
        if not self.awaits_data:
            return self
        from fastcssl.learn import methods, strategies

        config = self.config
        words = config.recipe, methods.method_of(config.method).name, strategies.strategy_of(config.strategy).name
        kept = {key: value for key, value in flat(config) if self.sources[key] == COMMAND_LINE and key != "recipe"}
        return recipe(*words, settings=self.settings, data=data).changed(kept)


def recipe(
    name: str, method: str, strategy: str, *, settings: Settings = "matched", data: Path | str | None = None
) -> Recipe:
    """Returns the recipe for three words.

    `settings`: "matched" uses the same values for all strategies of a method, "published" those of each strategy's
    authors. `data`: a prepared folder, for recipes that follow the data (`own`); without it they have the values of
    photos until training starts. Other recipes do not depend on it.
    """
    from fastcssl.config.config import Config, ExpectConfig, ViewsConfig
    from fastcssl.learn import methods, strategies  # imported here because a list of recipes does not need torch
    from fastcssl.learn.encoders import EncoderConfig
    from fastcssl.learn.optim import OptimConfig

    if name not in RECIPES:
        raise UserError(f"There is no recipe {name!r}. {nearest(name, RECIPES)}")
    follows = RECIPES[name].follows_data
    facts = facts_of(Path(data)) if follows and data is not None else DataFacts()
    values = settled(name, method, strategy, settings, facts)
    tree: dict[str, Any] = {}
    for key, (value, _) in values.items():
        _put(tree, key, value)
    parts = {
        "method": methods.find(method).Config(),
        "strategy": strategies.find(strategy).Config(),
        "expect": ExpectConfig(),
        "encoder": EncoderConfig(),
        "views": ViewsConfig(),
        "optim": OptimConfig(),
    }
    config = Config(**{**tree, **{key: _filled(part, tree.get(key, {})) for key, part in parts.items()}})
    sources = {key: values[key][1] if key in values else OURS for key, _ in flat(config)}
    return Recipe(config=config, sources=sources, settings=settings, awaits_data=follows and data is None)


def settled(
    name: str, method: str, strategy: str, settings: Settings, facts: DataFacts | None = None
) -> dict[str, tuple[Any, str]]:
    """Returns, by dotted key, each value that a table has, with its source. Does not need torch."""
    data, facts = RECIPES[name], facts or DataFacts()
    if data.follows_data:
        data = dataclasses.replace(data, family=facts.family, scenario=facts.scenario)
    authors = authors_of(strategy, settings)
    where = {
        "recipe": name,
        "data": data.like or data.source,
        "scenario": data.scenario,
        "family": data.family,
        "method": method,
        "strategy": strategy,
        "authors": authors,
        "settings": settings,
    }
    known = {
        "recipe": (name, COMMAND_LINE),
        "expect.source": (data.source, OURS),
        "expect.scenario": (RECIPES[name].scenario, OURS),
        "expect.num_tasks": (data.num_tasks, OURS),
    }
    values = {"views.policy": _views(method, authors, data.family)}
    if data.follows_data:
        values |= followed(name, facts, method)
    tables = _authority(settings, authors)
    for row in _rows(tables, where):
        # A row that names the recipe describes it. Any other row describes the data that this data borrows from.
        source = _borrowed(row.source, data, method) if data.like and not row.recipe else row.source
        for key, value in row.values.items():
            values.setdefault(key, (value, source))
    if method in _LIKE_METHOD:
        other, title = _LIKE_METHOD[method]
        for row in _rows(tables, where | {"method": other}):
            source = _borrowed(row.source, data, method) if data.like else f"{OURS}, as {title} ({row.source})"
            for key, value in row.values.items():
                values.setdefault(key, (value, source))
    if data.like:
        policy, source = values["views.policy"]
        values["views.policy"] = policy, _borrowed(source, data, method)
    return known | values


def authors_of(strategy: str, settings: Settings) -> Authors:
    """Returns the authors whose way of training a strategy follows under these settings."""
    return "pnr" if settings == "matched" or strategy == "pnr" else "cassle"


def _rows(tables: tuple[RowTable, ...], where: Mapping[str, str]) -> Iterator[Row]:
    return (row for table in tables for row in table if row.holds(where))


def _borrowed(source: str, data: Data, method: str) -> str:
    """Returns the name of a source whose numbers this data borrows from the data it is like."""
    if source.startswith(OURS):
        return source
    title = _LIKE_DATA[data.like]
    return f"as {title} ({source})" if method in _ON_IMAGENET_1K else f"{OURS}, as {title}"


def _views(method: str, authors: Authors, family: Family) -> tuple[str, str]:
    """Returns the name of a policy and its source: the authors' policy, or the one that the method itself declares."""
    name = f"{authors}-{method}-{family}"
    if name not in NAMED:
        return f"{method}-{family}", OURS
    return name, OURS if name in EXTRAPOLATED else SCRIPT[authors]


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of every setting of nested configurations."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from flat(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
    tree[last] = value


def _filled(config: Any, values: Mapping[str, Any]) -> Any:
    """Returns the configuration with all these values replaced in one step, so that only the result is checked."""
    return dataclasses.replace(
        config,
        **{k: _filled(getattr(config, k), v) if isinstance(v, dict) else v for k, v in values.items()},
    )
