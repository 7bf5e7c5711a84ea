"""NVIDIA apex as an optimiser: used when it is there and asked for, and in all its absences."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from fastcssl.errors import UserError
from fastcssl.learn.optim import OptimConfig, build_optimizer, describe, set_lr

APEX = OptimConfig(name="sgd", implementation="apex", weight_decay=0.1)


def module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(attributes)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def on_a_device() -> list[nn.Parameter]:
    """Not on the CPU, which apex refuses."""
    return [nn.Parameter(torch.empty(shape, device="meta")) for shape in ((4, 3), (6,))]


def refusal() -> str:
    with pytest.raises(UserError) as caught:
        build_optimizer([{"params": on_a_device(), "name": "net"}], APEX)
    text = str(caught.value)
    for words in ("FusedSGD of NVIDIA's apex", "PyPI's 'apex' is an unrelated package", "github.com/NVIDIA/apex"):
        assert words in text
    assert "\n" not in text and text.endswith("or use --optim.implementation foreach.")
    return text


def test_apex_is_used_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class FusedSGD(torch.optim.SGD):
        __module__ = "apex.optimizers.fused_sgd"

    module(monkeypatch, "apex", __path__=[])
    module(monkeypatch, "apex.optimizers", FusedSGD=FusedSGD)
    optimizer = build_optimizer([{"params": on_a_device(), "name": "net"}], APEX)
    assert type(optimizer) is FusedSGD and describe(optimizer) == "apex FusedSGD"
    set_lr(optimizer, 0.25)
    assert [(g["lr"], g["momentum"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0.25, 0.9, 0.1),
        (0.25, 0.9, 0.0),
    ]


def test_apex_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    monkeypatch.delitem(sys.modules, "apex.optimizers", raising=False)
    assert "ModuleNotFoundError" in refusal()


def test_the_apex_of_pypi(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "apex")
    monkeypatch.delitem(sys.modules, "apex.optimizers", raising=False)
    assert "No module named 'apex.optimizers'" in refusal()


def test_apex_without_the_class_or_its_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_extensions(*_: Any, **__: Any) -> None:
        raise RuntimeError("requires cuda extensions")

    module(monkeypatch, "apex", __path__=[])
    optimizers = module(monkeypatch, "apex.optimizers")
    assert "AttributeError" in refusal()
    vars(optimizers)["FusedSGD"] = no_extensions
    assert "RuntimeError: requires cuda extensions" in refusal()


def test_apex_would_pass_over_these() -> None:
    for param, seen in (
        (nn.Parameter(torch.ones(2, 2)), "torch.float32 on cpu"),
        (nn.Parameter(torch.empty(2, 2, device="meta", dtype=torch.bfloat16)), "torch.bfloat16 on meta"),
    ):
        with pytest.raises(UserError, match=rf"one is {seen}\. Use --optim.implementation foreach"):
            build_optimizer([{"params": [param], "name": "net"}], APEX)
