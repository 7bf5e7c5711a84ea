"""fastcssl-train as a person meets it. What it starts is replaced here; test_train.py trains."""

import dataclasses
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import prep_ok

import fastcssl.cli.train as command
import fastcssl.distributed.world
import fastcssl.train.forecast as forecasting
import fastcssl.train.loop as training
from dataprep.manifest import ManifestError
from fastcssl.cli.listing import COMMON
from fastcssl.config.recipes import COMMAND_LINE, RECIPES, Recipe, flat, recipe
from fastcssl.data.backends import LoaderError, backends
from fastcssl.distributed.world import RankLost, World
from fastcssl.errors import Diverged, UserError
from fastcssl.learn import methods, strategies
from fastcssl.runs.checkpoint import CheckpointError
from fastcssl.runs.log import TaskReport
from fastcssl.runs.ownership import RunFolderError
from fastcssl.runs.status import Status, write_status
from fastcssl.train.session import Outcome

DEMO = ("demo", "moco", "pnr")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)  # where runs/ would be made


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Status, what it said, and what it said of errors."""

    def call(*args: object) -> tuple[int, str, str]:
        try:
            status = command.main([str(arg) for arg in args])
        except SystemExit as end:  # tyro's way
            assert isinstance(end.code, int)
            status = end.code
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli-train") / "data"
    prep_ok("build", "synthetic:train=8,val=2", "--scenario", "class", "--tasks", 3, "--out", out)
    return out


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `train` was called with, instead of training."""
    calls: list[dict[str, Any]] = []

    def train(found: Recipe, **options: Any) -> Outcome:
        calls.append({"recipe": found, **options})
        knn = 0.5 + 0.1 * found.config.seed
        numbers = {"step": 1, "task": 0, "num_images": 1, "num_epochs": 1, "loss": 0.0}
        speed = {"images_per_s": 1.0, "data_wait_share": 0.0, "seconds": 1.0}
        task = TaskReport(name="first", **numbers, **speed, accuracy={"knn": knn, "linear": 0.25})  # type: ignore[arg-type]
        return Outcome(folder=options["out"], status="finished", tasks=(task,))

    monkeypatch.setattr(training, "train", train)
    return calls


# ---- The three words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("cifar100-clas5", "moco", "pnr"), "no recipe 'cifar100-clas5'. Did you mean 'cifar100-class5'?"),
        (("demo", "mocco", "pnr"), "no method 'mocco'. Did you mean 'moco'?"),
        (("demo", "moco", "casle", "--data", "x"), "no strategy 'casle'. Did you mean 'cassle'?"),
        (("demo", "mocco", "--help"), "Did you mean 'moco'?"),
        (("--list", "dmo"), "Did you mean 'demo'?"),
        (("demo", "moco", "pnr", "extra"), "'extra' is a fourth word"),
        (("demo",), f"METHOD is one of {', '.join(methods.names())}"),
        (("demo", "moco", "--data", "x"), f"STRATEGY is one of {', '.join(strategies.names())}"),
        (("--data", "x", *DEMO), "begins with fastcssl-train RECIPE METHOD STRATEGY"),
        ((*DEMO, "--settings", "publishd"), "Did you mean 'published'?"),
        ((*DEMO, "--settings"), "--settings needs a name"),
        (DEMO, "fastcssl-prep build synthetic --scenario class --tasks 3"),
        (("demo-styles", *DEMO[1:]), "fastcssl-prep build synthetic:set=forms --scenario domain --tasks 4"),
        (("cifar100-class5", "moco", "pnr"), "fastcssl-prep build cifar100:ROOT --scenario class --tasks 5"),
    ],
)
def test_words_that_are_wrong_or_missing(args: tuple[str, ...], says: str, run: Run) -> None:
    status, out, err = run(*args)
    assert status == 2 and out == ""
    assert says in err and len(err.splitlines()) == 1


# ---- Help and lists --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("demo",), ("demo", "moco")])
@pytest.mark.parametrize("columns", [80, 120])
def test_help_before_and_between_the_words(
    words: tuple[str, ...], columns: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    status, out, err = run(*words, "--help")
    assert status == 0 and err == ""
    assert out.startswith(f"usage: {' '.join(('fastcssl-train', *words))} ")
    assert len(out.splitlines()) <= 16 and max(map(len, out.splitlines())) <= columns
    missing = ("RECIPE", "METHOD", "STRATEGY")[len(words) :]
    assert all(word in out for word in (*missing, "status RUN", "--list"))
    assert ("cifar100-class5" in out) is (not words) and "cassle" in out


@pytest.mark.parametrize("args", [(*DEMO, "--help"), ("--help", *DEMO), ("demo", "-h", "moco", "pnr")])
def test_help_with_the_words_shows_the_flags_with_their_values(args: tuple[str, ...], run: Run) -> None:
    status, out, err = run(*args)
    assert status == 0 and err == ""
    common = out.partition("All other flags")[0]
    assert len(common.splitlines()) <= 24 and max(map(len, out.splitlines())) <= 80
    for flag, *_ in COMMON:
        assert f"{flag} " in common
    assert "--epochs 12 " in common and "runs/demo-moco-pnr-seed5" in common
    rest = out.partition("All other flags")[2]
    for line in ("--method.bank.size 512", "--encoder.name resnet18-w16", "--strategy.pn1 on", "--log-every 10"):
        assert line in rest
    assert "lars | sgd | adamw" in rest and 'the "queue size" of the papers' in rest


def test_every_value_has_its_place_in_the_help(run: Run) -> None:
    _, out, _ = run("cifar100-class5", "byol", "cassle", "--help")
    shown = set(re.findall(r"--[\w.-]+", out))
    for key, _ in flat(recipe("cifar100-class5", "byol", "cassle").config):
        assert key == "recipe" or f"--{key.removeprefix('run.').replace('_', '-')}" in shown


def test_list_shows_all_there_is(run: Run) -> None:
    status, out, _ = run("--list")
    assert status == 0
    first_words = {line.split()[0] for line in out.splitlines() if line.strip()}
    assert {*RECIPES, *methods.names(), *strategies.names()} <= first_words
    assert "MoCo v2+" in out and "CIFAR-100, 5 tasks of 20 classes" in out


def rows_of(out: str) -> dict[str, list[str]]:
    return {cells[0]: cells[1:] for line in out.splitlines() if (cells := re.split(r"\s{2,}", line.strip()))}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--list", "cifar100-class5"), "cifar100-class5 moco pnr"),
        (("--list", "cifar100-class5", "byol"), "cifar100-class5 byol pnr"),
        (("cifar100-class5", "simclr", "cassle", "--list"), "cifar100-class5 simclr cassle"),
    ],
)
def test_list_of_a_recipe_shows_every_value_with_its_source(args: tuple[str, ...], words: str, run: Run) -> None:
    status, out, _ = run(*args)
    rows = rows_of(out)
    made = recipe(*words.split())
    assert status == 0 and words in out and max(map(len, out.splitlines())) <= 80
    for key in set(made.sources) - {"recipe"}:
        assert rows[f"--{key.removeprefix('run.').replace('_', '-')}"][-1] == made.sources[key]


def test_list_takes_settings_and_changes(run: Run) -> None:
    _, out, _ = run("--settings", "published", "--list", "cifar100-class5", "moco", "cassle", "--optim.lr", "0.2")
    rows = rows_of(out)
    assert rows["--optim.name"] == ["sgd", "CaSSLe script of ImageNet-100"]
    assert rows["--optim.lr"] == ["0.2", COMMAND_LINE]
    assert "published" in out


# ---- Flags -----------------------------------------------------------------------------------------------------------


def changed(*args: str) -> dict[str, Any]:
    found = recipe(*DEMO)
    _, after = command.parsed(DEMO, found, list(args))
    before = dict(flat(found.config))
    values = {key: value for key, value in flat(after.config) if before[key] != value}
    assert set(values) == {key for key, source in after.sources.items() if source == COMMAND_LINE and key != "recipe"}
    return values


@pytest.mark.parametrize(
    ("args", "values"),
    [
        ((), {}),
        (("--epochs", "3", "--seed", "8"), {"epochs": 3, "seed": 8}),
        (("--optim.lr", "0.3", "--optim.name=sgd"), {"optim.lr": 0.3, "optim.name": "sgd"}),
        (("--method.bank.size", "256"), {"method.bank.size": 256}),
        (("--method.bank.at_task_start", "prefill"), {"method.bank.at_task_start": "prefill"}),
        (("--strategy.no-pn1",), {"strategy.pn1": False}),
        (("--strategy.pn1", "off", "--strategy.pn2=False"), {"strategy.pn1": False, "strategy.pn2": False}),
        (("--strategy.pn1", "on", "--optim.clip", "no"), {"optim.clip": False}),
        (("--tensorboard", "--optim.exclude-bias-and-norm", "true"),
         {"run.tensorboard": True, "optim.exclude_bias_and_norm": True}),
        (("--tensorboard", "yes", "--epochs", "2"), {"run.tensorboard": True, "epochs": 2}),
        (("--checkpoint-minutes", "3", "--device", "cpu"), {"run.checkpoint_minutes": 3.0, "run.device": "cpu"}),
        (("--stop-after-task", "1", "--only-task", "0"), {"run.stop_after_task": 1, "only_task": 0}),
        (("--views.size-px", "24", "--optim.betas", "0.5", "0.6"), {"views.size_px": 24, "optim.betas": (0.5, 0.6)}),
        (("--online-probe", "every=2,parity"), {"online_probe": "every=2,parity"}),
        (("--loader", "torchvision", "--expect.source", "any"), {"loader": "torchvision", "expect.source": "any"}),
    ],
)  # fmt: skip
def test_flags_change_values(args: tuple[str, ...], values: dict[str, Any]) -> None:
    assert changed(*args) == values


def test_options_are_no_part_of_the_configuration() -> None:
    args = ["--data", "d", "--out", "o", "--resume", "never", "--from", "r@1", "--seeds", "1,2", "--dry-run"]
    options, after = command.parsed(DEMO, recipe(*DEMO), args)
    assert options == command.TrainOptions(
        data=Path("d"), out=Path("o"), resume="never", start_from="r@1", seeds="1,2", dry_run=True
    )
    assert after.config == recipe(*DEMO).config


def test_help_names_every_loader() -> None:
    (about,) = (about for flag, _, about, _ in COMMON if flag == "--loader")
    assert set(about.split(", ")) == {"auto", *backends()}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--optim.lrr", "3"), "--optim.lr "),
        (("--otpim.lr", "3"), "--optim.lr "),
        (("--method.bank.sise", "3"), "--method.bank.size "),
        (("--checkpoint-minute", "3"), "--checkpoint-minutes "),
        (("--strategy.pn3", "off"), "--strategy.pn"),
        (("--optim.name", "lasr"), "--optim.name lasr: Did you mean 'lars'? Known: lars, sgd, adamw."),
        (("--epochs", "many"), "--epochs"),
        (("--epochs", "0"), "epochs is 0; give at least 1"),
        (("--optim.lr", "-1"), "optim.lr is -1.0"),
        (("--strategy.pn1", "maybe"), "--strategy.pn1 maybe: use on or off"),
        (("--views.policy", "pnr-moco-cifr"), "Did you mean 'pnr-moco-cifar'?"),
        (("--encoder.name", "resnet19"), "Did you mean 'resnet18'?"),
        (("--online-probe", "evry=2"), "Did you mean 'every'?"),
        (("--seeds", ""), "such as --seeds 5,6,7"),
        (("--seeds", "5,,7"), "such as --seeds 5,6,7"),
        (("--seeds", "5,x"), "such as --seeds 5,6,7"),
        (("--seeds", "-1"), "--seeds"),
        (("--seeds", "5,6,5"), "a seed occurs twice"),
        (("--seeds", "5,6", "--seed", "7"), "exclude each other"),
    ],
)
def test_flags_that_are_wrong(args: tuple[str, ...], says: str, run: Run, trained: list[dict[str, Any]]) -> None:
    status, _, err = run(*DEMO, "--data", "x", *args)
    assert status == 2 and "Traceback" not in err
    assert says in " ".join(err.replace("│", " ").split()) + " "
    assert trained == []


def test_a_strategys_refusal_comes_before_anything_is_opened(run: Run, trained: list[dict[str, Any]]) -> None:
    status, _, err = run("demo", "byol", "pnr", "--data", "nowhere", "--strategy.pn1", "off")
    assert status == 2 and "strategy.pn1 is off, but byol has no negatives" in err and trained == []


# ---- What is started -------------------------------------------------------------------------------------------------


def test_training_is_given_what_was_said(run: Run, trained: list[dict[str, Any]], data: Path) -> None:
    status, _, err = run(*DEMO, "--data", data, "--epochs", "3", "--from", "other@1", "--resume", "never")
    assert (status, err) == (0, "")
    (call,) = trained
    assert call["recipe"].config.epochs == 3 and call["recipe"].sources["epochs"] == COMMAND_LINE
    assert call["out"] == Path("runs/demo-moco-pnr-seed5")
    assert (call["data"], call["start_from"], call["resume"]) == (data, "other@1", "never")
    assert call["world"] == World() and call["device"] == torch.device("cpu")


def test_seeds_train_one_after_the_other_and_are_averaged(run: Run, trained: list[dict[str, Any]], data: Path) -> None:
    status, out, _ = run(*DEMO, "--data", data, "--seeds", "1, 2,3", "--out", "many", "--from", "others@0")
    assert status == 0
    assert [call["recipe"].config.seed for call in trained] == [1, 2, 3]
    assert [call["out"] for call in trained] == [Path(f"many/seed{seed}") for seed in (1, 2, 3)]
    assert [call["start_from"] for call in trained] == [f"others/seed{seed}@0" for seed in (1, 2, 3)]
    # k-NN of 60, 70 and 80 %.
    assert "70.00 ± 10.00" in out and "25.00 ± 0.00" in out and "over 3 seeds" in out
    run(*DEMO, "--data", data, "--seeds", "4")
    assert trained[-1]["out"] == Path("runs/demo-moco-pnr/seed4")


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (UserError("The data is odd."), 2, "The data is odd."),
        (LoaderError("A shard is odd."), 2, "A shard is odd."),
        (ManifestError("No [manifest]."), 2, "No [manifest]."),
        (CheckpointError("It differs."), 2, "It differs."),
        (RunFolderError("No room."), 2, "No room."),
        (Diverged("Step 7: nan."), 1, "Step 7: nan."),
        (RankLost("Rank 1 is gone."), 1, "Rank 1 is gone. Run the same command again to resume."),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), 1, "CUDA out of memory. Use a smaller --batch-size"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_goes_wrong_is_a_sentence(
    error: BaseException, status: int, says: str, run: Run, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: Any, **__: Any) -> Outcome:
        raise error

    monkeypatch.setattr(training, "train", train)
    found, _, err = run(*DEMO, "--data", data)
    assert found == status and says in err and len(err.splitlines()) == (1 if says else 0)


def test_an_error_of_ours_keeps_its_traceback(run: Run, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "train", lambda *_, **__: {}["bug"])
    with pytest.raises(KeyError):
        run(*DEMO, "--data", data)


def test_a_signal_ends_all_seeds(
    run: Run, trained: list[dict[str, Any]], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = training.train

    def stopped(*args: Any, **options: Any) -> Outcome:
        return dataclasses.replace(train(*args, **options), status="stopped", signal=signal.SIGTERM)

    monkeypatch.setattr(training, "train", stopped)
    status, _, _ = run(*DEMO, "--data", data, "--seeds", "1,2")
    assert status == 128 + signal.SIGTERM and len(trained) == 1


def test_a_gpu_that_is_not_there(run: Run, data: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    status, _, err = run(*DEMO, "--data", data, "--device", "cuda")
    assert status == 2 and "GPU" in err and len(err.splitlines()) == 1


def test_only_the_first_rank_speaks(run: Run, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(fastcssl.distributed.world, "connect", lambda *_, **__: (World(1, 2), torch.device("cpu")))
    for args in (("demo", "mocco"), (*DEMO, "--optim.lrr", "3"), ("--help",), ("--list", "demo")):
        _, out, err = run(*args)
        assert (out, err) == ("", "")

    def train(*_: Any, **__: Any) -> Outcome:
        raise LoaderError("A shard is torn.")

    # This may be true of one rank alone, and then no other can say it.
    monkeypatch.setattr(training, "train", train)
    status, _, err = run(*DEMO, "--data", data)
    assert status == 2 and "rank 1: A shard is torn." in err


def test_status(run: Run, tmp_path: Path) -> None:
    assert run("status")[0] == 2 and run("status", "--help")[0] == 0
    status, _, err = run("status", tmp_path / "nowhere")
    assert status == 2 and "is not a run" in err
    for seed in (1, 2):
        folder = tmp_path / "many" / f"seed{seed}"
        folder.mkdir(parents=True)
        state = Status(
            state="finished", title=f"run {seed}", task=0, num_tasks=1, epoch=0, num_epochs=1, step=4, num_steps=4
        )
        write_status(folder, state)
    status, out, _ = run("status", tmp_path / "many" / "seed1")
    assert status == 0 and "run 1" in out and "finished" in out
    status, out, _ = run("status", tmp_path / "many")
    assert status == 0 and "run 1" in out and "run 2" in out


def test_dry_run_says_what_it_takes_and_trains_nothing(
    run: Run, data: Path, trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasting, "_LOADER_SECONDS", 0.05)
    small = ("--encoder.name", "resnet18-w8", "--batch-size", "4", "--num-threads", "1")
    status, out, err = run(*DEMO, "--data", data, "--dry-run", "--epochs", "7", *small)
    assert (status, err, trained) == (0, "", [])
    # 80 images a task: 20 steps an epoch, 140 a task.
    assert "classes 1-10 80 7 20 140" in " ".join(out.split())
    assert not (tmp_path / "runs").exists()
    status, _, err = run(*DEMO, "--data", data, "--dry-run", "--accumulate", "3", *small)
    assert status == 2 and "Use a multiple of 3" in err and len(err.splitlines()) == 1
