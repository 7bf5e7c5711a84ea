"""Flags are known from source text alone, so that a slip is told at once."""

import subprocess
import sys

import pytest

from fastcssl.cli.flag_names import _OWN, check_flags, flag_names
from fastcssl.config.recipes import flat, recipe
from fastcssl.errors import UserError
from fastcssl.learn import methods, strategies


@pytest.mark.parametrize("strategy", strategies.names())
@pytest.mark.parametrize("method", methods.names())
def test_they_are_those_of_the_configuration(method: str, strategy: str) -> None:
    keys = dict(flat(recipe("demo", method, strategy).config))
    names = {key.removeprefix("run.").replace("_", "-") for key in keys if key != "recipe"}
    found = flag_names(method, strategy)
    assert len(found) == len(set(found))
    assert {name for name in found if ".no-" not in name and not name.startswith("no-")} == names | set(_OWN)


def test_a_slip_names_the_nearest() -> None:
    words = ("demo", "moco", "pnr")
    with pytest.raises(UserError, match=r"There is no flag --optim\.lrr\. Did you mean --optim\.lr"):
        check_flags(words, ["--data", "x", "--optim.lrr", "3"])
    check_flags(words, ["--optim.lr=3", "--log_every", "-1", "--strategy.no-pn1", "--no-tensorboard"])


def test_torch_is_not_imported_for_a_slip() -> None:
    program = (
        "import sys; from fastcssl.cli.train import main\n"
        "for args in (['demo', 'moko', 'pnr'], ['demo', 'moco', 'pnr', '--batchsize', '8']):\n"
        "    assert main(args) == 2\n"
        "    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Did you mean 'moco'" in done.stderr and "--batch-size" in done.stderr
