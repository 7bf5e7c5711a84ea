"""What is said before a run that may not do what its user expects, and what is refused."""

import dataclasses
from pathlib import Path

import fake_cuda
import numpy as np
import pytest
import torch
from conftest import prep_ok
from PIL import Image
from small_runs import prepared, tiny

from fastcssl import ops
from fastcssl.config.recipes import COMMAND_LINE, Recipe
from fastcssl.distributed.world import World
from fastcssl.errors import UserError
from fastcssl.train.build import Run
from fastcssl.train.startup_warnings import _about_the_card, startup_warnings

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("cautions") / "data")


def _said(found: Recipe, data: Path) -> list[str]:
    run = Run(found.config, data, World(), CPU)
    try:
        return list(startup_warnings(run, found.sources))
    finally:
        run.loader.close()


def _folder(out: Path, classes: tuple[str, ...], count: int) -> Path:
    drawn = np.random.default_rng(0)
    for name in classes:
        (out / "images" / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(drawn.integers(0, 255, (16, 16, 3), np.uint8)).save(out / f"images/{name}/{number}.png")
    tasks = min(2, len(classes))
    prep_ok("build", f"folder:{out}/images", "--scenario", "class", "--tasks", tasks, "--out", out / "data")
    return out / "data"


def test_an_ordinary_run_is_not_commented_on(data: Path) -> None:
    for method, strategy in (("moco", "pnr"), ("byol", "pnr"), ("simclr", "finetune")):
        assert _said(tiny(method, strategy), data) == []


@pytest.mark.parametrize("strategy", ["der", "lump"])
def test_a_budget_larger_than_the_past(strategy: str, data: Path) -> None:
    found = tiny("simclr", strategy)
    own = dataclasses.replace(found.config.strategy, budget=41)  # type: ignore[call-arg]
    changed = dataclasses.replace(found, config=dataclasses.replace(found.config, strategy=own))
    (said,) = _said(changed, data)
    assert "budget 41 is more than the 40 images" in said and f"{strategy} keeps every one" in said
    fits = dataclasses.replace(found.config.strategy, budget=40)  # type: ignore[call-arg]
    assert _said(dataclasses.replace(found, config=dataclasses.replace(found.config, strategy=fits)), data) == []


def test_a_weight_that_nobody_chose_for_this_data(tmp_path: Path) -> None:
    other = _folder(tmp_path, ("cat", "dog"), 20)
    for method, weight in (("byol", "0.5"), ("vicreg", "23")):
        found = tiny(method, "pnr")
        (said,) = _said(found, other)
        assert f"none is known for folder: {weight} is used" in said and "--strategy.weight" in said
        chosen = dataclasses.replace(found, sources={**found.sources, "strategy.weight": COMMAND_LINE})
        assert _said(chosen, other) == []
    assert _said(tiny("simclr", "pnr"), other) == []


def test_labels_that_say_nothing(tmp_path: Path) -> None:
    alike = _folder(tmp_path, ("all",), 40)
    with pytest.raises(UserError, match="supcon learns from labels, but"):
        Run(tiny("supcon", "finetune").config, alike, World(), CPU)
    Run(tiny("simclr", "finetune").config, alike, World(), CPU).loader.close()


def test_micro_batches_that_change_what_is_compared(data: Path) -> None:
    (said,) = _said(tiny("simclr", "finetune", accumulate=2), data)
    assert "sees only 8 at a time" in said


CARD = """
import torch
from fastcssl.train.startup_warnings import _about_the_card
for dtype in (torch.float16, torch.bfloat16):
    print(*_about_the_card(torch.device("cuda"), dtype), sep="|")
"""


def test_a_card_that_runs_plain_torch() -> None:
    if not ops.architectures():
        pytest.skip("needs operators that are compiled for CUDA")
    assert fake_cuda.run(CARD, capability=80).split() == []
    half, emulated = fake_cuda.run(CARD, capability=75).splitlines()
    assert half.startswith("The compiled CUDA operators are not used: this card has compute capability 7.5, and they")
    assert emulated.startswith(f"{half}|") and "Use --precision fp16 or auto." in emulated
    assert list(_about_the_card(CPU, torch.bfloat16)) == []
