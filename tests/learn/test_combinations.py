"""Two tasks of the embedded set through the command line: each strategy once, each method at least once, and joint."""

from pathlib import Path

import pytest
import torch
from small_runs import lines, prepared

import fastcssl.cli.train as command
from fastcssl.learn import methods, strategies

SMALL = ("--epochs", "1", "--batch-size", "16", "--encoder.name", "resnet18-w8", "--views.size-px", "16")
QUICK = (
    "--expect.num-tasks",
    "2",
    "--online-probe",
    "off",
    "--log-every",
    "1",
    "--num-threads",
    "1",
    "--device",
    "cpu",
)
# One after the other, so that a newcomer of either kind takes its place by itself.
PAIRS = [(methods.names()[place % len(methods.names())], strategy) for place, strategy in enumerate(strategies.names())]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("combinations") / "data", tasks=2)


def test_the_pairs_leave_nothing_out() -> None:
    assert len(PAIRS) > 7 and {method for method, _ in PAIRS} == set(methods.names())


@pytest.mark.parametrize(("method", "strategy"), PAIRS)
def test_two_tasks_by_the_command(method: str, strategy: str, data: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    out = tmp_path / "run"
    budget = ("--strategy.budget", "8") if strategies.find(strategy).replays else ()
    words = ("demo", method, strategy, "--data", str(data), "--out", str(out), *SMALL, *QUICK, *budget)
    assert command.main(list(words)) == 0
    num_tasks = 1 if strategies.find(strategy).union else 2
    assert [task["task"] for task in lines(out, "task")] == list(range(num_tasks))
    assert len(list((out / "encoders").glob("*.safetensors"))) == num_tasks
    steps = lines(out)
    assert len(steps) == (5 if num_tasks == 1 else 4)  # of 80 images, or twice 40, in batches of 16
    first, last = steps[0]["terms"], steps[-1]["terms"]
    assert set(first) == {"loss"}
    if strategy not in ("finetune", "joint", "lump"):  # these train the method's own loss to the end
        assert len(last) > 1
