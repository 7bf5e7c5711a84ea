"""A method declares its own views: their name, their sizes, and who refuses how many."""

import dataclasses
from typing import ClassVar

import pytest

from fastcssl.config.config import Config, ViewsConfig, named_policy
from fastcssl.config.recipes import OURS, recipe
from fastcssl.data.policies import pair, policy
from fastcssl.data.views import Family, Policy
from fastcssl.errors import UserError
from fastcssl.learn import methods, strategies
from fastcssl.learn.methods import Method, MethodConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MineConfig(MethodConfig):
    sharpness: float = 3.0


class Mine(Method):
    """Two large views and six small ones."""

    name = "mine"
    Config = MineConfig
    declared: ClassVar[int] = 8

    @classmethod
    def views(cls, family: Family) -> Policy:
        large = pair(family)
        small = dataclasses.replace(large[0], size_px=large[0].size_px // 2, scale=(0.05, 0.4))
        return (large + (small,) * 6)[: cls.declared]


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> type[Mine]:
    """A method of eight views, known by name as if a package had brought it."""
    find, names, of = methods.find, methods.names, methods.method_of
    monkeypatch.setattr(methods, "find", lambda name: Mine if name == "mine" else find(name))
    monkeypatch.setattr(methods, "names", lambda: (*names(), "mine"))
    monkeypatch.setattr(methods, "method_of", lambda config: Mine if type(config) is MineConfig else of(config))
    return Mine


@pytest.mark.usefixtures("mine")
def test_a_plug_in_starts_from_its_own_defaults_and_views() -> None:
    made = recipe("cifar100-class5", "mine", "cassle")
    assert made.config.method == MineConfig() and made.config.epochs == 500
    assert made.config.views == ViewsConfig(policy="mine-cifar")
    assert made.sources["method.sharpness"] == made.sources["views.policy"] == OURS
    assert [view.size_px for view in made.config.views.views()] == [32] * 2 + [16] * 6
    assert recipe("imagenet100-class5", "mine", "finetune").config.views.policy == "mine-imagenet"


@pytest.mark.usefixtures("mine")
def test_other_sizes_keep_the_proportions_and_probes_see_the_first() -> None:
    views = ViewsConfig(policy="mine-imagenet", size_px=96, min_scale=0.16)
    assert [view.size_px for view in views.views()] == [96] * 2 + [48] * 6
    assert [view.scale for view in views.views()] == [(0.16, 1.0)] * 2 + [(0.1, 0.4)] * 6
    (probe,) = views.probe_view()
    assert (probe.crop, probe.size_px, probe.resize_px) == ("center", 96, 110)
    assert ViewsConfig(policy="mine-cifar").probe_view() == policy("probe-val-cifar")


@pytest.mark.parametrize("family", ["cifar", "imagenet"])
def test_every_method_of_ours_declares_the_views_that_pnr_trains_it_with(family: str) -> None:
    for name in methods.names():
        if methods.find(name).__module__.startswith("fastcssl."):
            assert named_policy(f"{name}-{family}").views == policy(f"pnr-{name}-{family}")


def _with(method: str, strategy: str, **views: str) -> Config:
    config = recipe("demo", method, strategy).config
    return dataclasses.replace(config, views=ViewsConfig(**views))  # type: ignore[arg-type]


@pytest.mark.usefixtures("mine")
def test_the_wrong_number_of_views_is_a_sentence() -> None:
    for name in methods.names():
        if methods.find(name).num_views == 2:
            says = rf"^{name} takes exactly 2 views of an image, but the policy mine-cifar has 8. Use --views.policy "
            with pytest.raises(UserError, match=rf"{says}{name}-cifar.$"):
                _with(name, "finetune", policy="mine-cifar")
    with pytest.raises(UserError, match=r"^moco takes exactly 2 views of an image, but the policy probe-val-imagenet"):
        _with("moco", "pnr", policy="probe-val-imagenet")
    says = r"^pnr takes exactly 2 views of an image, but the policy mine-cifar has 8. Use a --views.policy of 2 views"
    with pytest.raises(UserError, match=rf"{says}, or another strategy, such as finetune.$"):
        recipe("demo", "mine", "pnr")
    assert len(_with("mine", "finetune", policy="pnr-moco-cifar").views.views()) == 2  # it takes any number
    for name in strategies.names():
        if strategies.find(name).num_views is None:
            assert len(recipe("demo", "mine", name).config.views.views()) == 8


def test_a_method_that_contradicts_itself_is_told_so(mine: type[Mine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mine, "num_views", 2)
    with pytest.raises(UserError, match=r"mine takes exactly 2 .* mine-cifar has 8. Make its num_views and its views"):
        recipe("demo", "mine", "finetune")
    monkeypatch.setattr(mine, "declared", 0)
    with pytest.raises(UserError, match=r"The method mine declares no views for cifar images. Its views\(\) must"):
        recipe("demo", "mine", "finetune")


@pytest.mark.usefixtures("mine")
def test_an_unknown_policy_names_the_nearest_of_both_kinds() -> None:
    with pytest.raises(ValueError, match=r"no view policy 'mine-cifr'. Did you mean 'mine-cifar'"):
        ViewsConfig(policy="mine-cifr").views()
    with pytest.raises(ValueError, match=r"no view policy 'pnr-moco-cifr'. Did you mean 'pnr-moco-cifar'"):
        ViewsConfig(policy="pnr-moco-cifr").views()


# ---- Each configuration checks its own -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [name for name in methods.names() if name != "mine"])
@pytest.mark.parametrize(
    ("key", "wrong", "says"),
    [
        ("hidden", 0, "give a width of at least 1"),
        ("dim", -3, "give a width of at least 1"),
        ("temperature", 0.0, "give a number above 0"),
        ("align_temperature", float("inf"), "give a number above 0"),
        ("ema_base", 1.1, "give a share from 0 to 1"),
        ("ema_final", -0.1, "give a share from 0 to 1"),
    ],
)
def test_every_field_that_a_method_has_is_checked(method: str, key: str, wrong: float, says: str) -> None:
    kind = methods.find(method).Config
    if key in {field.name for field in dataclasses.fields(kind)}:
        with pytest.raises(ValueError, match=rf"^method.{key} is {wrong}; {says}.$"):
            kind(**{key: wrong})


def test_banks_and_budgets_can_be_asked_for_everywhere() -> None:
    for name in methods.names():
        has_field = "bank" in {field.name for field in dataclasses.fields(methods.find(name).Config)}
        assert (methods.find(name).Config().bank is not None) == has_field
    for name in strategies.names():
        assert (strategies.find(name).Config().budget is not None) == strategies.find(name).replays
