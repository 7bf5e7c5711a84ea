"""Settings are known from source text alone, so that help and a slip are shown immediately."""

import re
import subprocess
import sys
from typing import get_args

import pytest

from fastcssl.cli.declared import _OWN, check_flags, declared, flag_names
from fastcssl.cli.listing import imported_settings, read_settings
from fastcssl.config.recipes import RECIPES, Settings, recipe
from fastcssl.errors import UserError
from fastcssl.learn import methods, strategies


@pytest.mark.parametrize("strategy", strategies.names())
@pytest.mark.parametrize("method", methods.names())
def test_they_are_those_of_the_configuration(method: str, strategy: str) -> None:
    words = ("demo", method, strategy)
    assert read_settings(words, "matched", None) == imported_settings(recipe(*words))
    names = flag_names(declared(method, strategy).values())
    assert len(names) == len(set(names)) and set(_OWN) <= set(names)


@pytest.mark.parametrize("settings", get_args(Settings))
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_the_values_of_its_configuration(name: str, settings: Settings) -> None:
    words = (name, "byol", "cassle")
    assert read_settings(words, settings, None) == imported_settings(recipe(*words, settings=settings))


def test_a_slip_names_the_nearest() -> None:
    words = ("demo", "moco", "pnr")
    with pytest.raises(UserError, match=r"There is no flag --optim\.lrr\. Did you mean --optim\.lr"):
        check_flags(words, ["--data", "x", "--optim.lrr", "3"])
    check_flags(words, ["--optim.lr=3", "--log_every", "-1", "--strategy.no-pn1", "--no-tensorboard"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--learning-rate", "3"], "Did you mean --optim.lr?"),
        (["--weight-decay=3"], "Did you mean --optim.weight-decay?"),
        (["--batch-size", "x"], "--batch-size x: give a whole number."),
        (["--optim.lr=fast"], "--optim.lr fast: give a number."),
        (["--stop-after-task", "last"], "--stop-after-task last: give a whole number, or None."),
        (["--device", "gpu"], "--device gpu: Did you mean 'cpu'?"),
    ],
)
def test_a_mistake_says_what_to_write(args: list[str], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        check_flags(("demo", "moco", "pnr"), args)


def test_torch_is_not_imported_for_a_slip() -> None:
    program = (
        "import sys; from fastcssl.cli.train import main\n"
        "words = ['demo', 'moco', 'pnr']\n"
        "assert main([*words, '--help']) == 0 and main(['own', 'moco', 'pnr', '--help']) == 0\n"
        "for args in (['demo', 'moko', 'pnr'], [*words, '--batchsize', '8'], [*words, '--epochs', 'x'], []):\n"
        "    assert main(args) == 2\n"
        "    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Did you mean 'moco'" in done.stderr and "--batch-size" in done.stderr
