"""The recipes `own` and `own-small` follow the data that they are given, and what was asked for stays."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import jpeg_of, picture
from PIL import Image
from small_runs import lines

from dataprep import build_data, split_data
from fastcssl import UserError, evaluate_runs, forecast_run, train_run
from fastcssl.cli import train as command
from fastcssl.config.recipes import COMMAND_LINE, Recipe, flat, recipe, settled
from fastcssl.config.recipes.own_data import FROM_DATA, DataFacts, facts_of, followed, name_of
from fastcssl.evaluate.options import Request
from fastcssl.evaluate.targets import missing_commands, open_targets
from fastcssl.report.comparison import compared
from fastcssl.report.runs import read_run

QUICK = {"epochs": 1, "encoder.name": "resnet18-w8", "method.hidden": 16, "method.dim": 8, "run.device": "cpu"}
QUICK |= {"run.num_threads": 1, "precision": "fp32", "batch_size": 8, "method.bank.size": 32, "views.size_px": 16}


def folder_of_images(root: Path, parts: tuple[str, ...], size: tuple[int, int]) -> Path:
    for p, part in enumerate(parts):
        for c, name in enumerate(("ant", "bee", "cat", "dog")):
            (root / part / name).mkdir(parents=True)
            for i in range(8):
                (root / part / name / f"{i}.jpg").write_bytes(jpeg_of(picture(1000 * p + 50 * c + i, *size)))
    return root


@pytest.fixture(scope="module")
def styles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two domains of photos that are 72 px high."""
    root = tmp_path_factory.mktemp("own")
    source = folder_of_images(root / "source", ("photo", "sketch"), (72, 80))
    build_data(f"folder:{source}", root / "birds", scenario="domain", domains=("sketch", "photo"), num_workers=1)
    return root / "birds"


def value(found: Recipe, key: str) -> object:
    return dict(flat(found.config))[key]


# ---- The rules -------------------------------------------------------------------------------------------------------


def test_facts_are_those_of_the_data(styles: Path, tmp_path: Path) -> None:
    facts = facts_of(styles)
    assert facts == DataFacts(name="birds", scenario="domain", short_px=72, num_train=(28, 28), is_labelled=True)
    split_data(styles, "by-class", scenario="class", sizes=(3, 1))
    other = facts_of(styles / "by-class.json")
    assert (other.name, other.scenario, other.num_train) == ("birds-by-class", "class", (42, 14))
    assert name_of(Path("/data/birds")) == name_of(Path("/data/birds/manifest.json")) == "birds"
    # Unlabelled: one class only.
    for i in range(9):
        path = tmp_path / "plain" / "all" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 40, 3), i, np.uint8)).save(path)
    build_data(f"folder:{tmp_path / 'plain'}", tmp_path / "out", scenario="joint", num_workers=1)
    assert not facts_of(tmp_path / "out").is_labelled
    assert value(recipe("own", "moco", "pnr", data=tmp_path / "out"), "online_probe") == "off"


@pytest.mark.parametrize(
    ("name", "short_px", "size_px", "stem", "policy"),
    [
        ("own", 32, 32, "cifar", "pnr-moco-cifar"),
        ("own", 28, 28, "cifar", "pnr-moco-cifar"),
        ("own", 64, 64, "cifar", "pnr-moco-cifar"),
        ("own", 65, 64, "cifar", "pnr-moco-imagenet"),
        ("own", 84, 84, "imagenet", "pnr-moco-imagenet"),
        ("own", 99, 96, "imagenet", "pnr-moco-imagenet"),
        ("own", 256, 224, "imagenet", "pnr-moco-imagenet"),
        ("own-small", 256, 96, "imagenet", "pnr-moco-imagenet"),
        ("own-small", 64, 64, "imagenet", "pnr-moco-cifar"),
        ("own-small", 32, 32, "imagenet", "pnr-moco-cifar"),
        ("own-small", 24, 24, "cifar", "pnr-moco-cifar"),
    ],
)
def test_views_and_stem_follow_the_size(name: str, short_px: int, size_px: int, stem: str, policy: str) -> None:
    values = settled(name, "moco", "pnr", "matched", DataFacts(short_px=short_px))
    assert values["views.size_px"] == (size_px, f"{FROM_DATA}: {short_px} px")
    assert values["encoder.stem"] == (stem, f"{FROM_DATA}: {short_px} px")
    assert values["views.policy"][0] == policy


@pytest.mark.parametrize(
    ("name", "num_train", "batch_size", "epochs", "optim"),
    [
        ("own", (10_000,) * 10, 256, 500, None),  # as CIFAR-100 in the paper
        ("own", (25_000,) * 5, 256, 210, None),
        ("own", (200_000,) * 5, 256, 100, None),
        ("own", (2_000, 1_000), 128, 500, "adamw"),
        ("own", (40, 9), 2, 500, "adamw"),
        ("own", (3,), 2, 500, "adamw"),
        ("own-small", (25_000,) * 5, 64, 10, "adamw"),
        ("own-small", (2_000,) * 4, 64, 50, "adamw"),
    ],
)
def test_batch_epochs_and_optimiser_follow_the_number_of_images(
    name: str, num_train: tuple[int, ...], batch_size: int, epochs: int, optim: str | None
) -> None:
    values = followed(name, DataFacts(num_train=num_train), "moco")
    assert (values["batch_size"][0], values["epochs"][0]) == (batch_size, epochs)
    assert values.get("optim.name", (None, ""))[0] == optim
    assert values.get("method.bank.size", (8 * batch_size, ""))[0] >= batch_size
    assert "method.bank.size" not in followed(name, DataFacts(num_train=num_train), "simclr")
    assert all(source.startswith(FROM_DATA) for _, source in values.values())


# ---- When the data becomes known -------------------------------------------------------------------------------------


def test_a_recipe_is_completed_and_keeps_what_was_asked_for(styles: Path) -> None:
    open_recipe = recipe("own", "moco", "pnr")
    assert open_recipe.awaits_data and value(open_recipe, "views.size_px") == 224
    asked = open_recipe.changed({"views.size_px": 224, "optim.lr": 0.1})  # the first equals the value without data
    done = asked.completed(styles)
    assert not done.awaits_data and done.completed(Path("nowhere")) is done
    assert (value(done, "views.size_px"), done.sources["views.size_px"]) == (224, COMMAND_LINE)
    assert (value(done, "optim.lr"), value(done, "batch_size")) == (0.1, 4)
    assert done.sources["batch_size"] == f"{FROM_DATA}: 28 images in the smallest task"
    assert recipe("own", "moco", "pnr", data=styles).config == open_recipe.completed(styles).config
    fixed = recipe("demo", "moco", "pnr")
    assert not fixed.awaits_data and fixed.completed(Path("nowhere")) is fixed


def test_python_trains_evaluates_and_reports_it(styles: Path, tmp_path: Path) -> None:
    made = recipe("own", "moco", "pnr").changed({k: v for k, v in QUICK.items() if k != "views.size_px"})
    assert forecast_run(made, data=styles, measure=False).config.views.views()[0].size_px == 72
    outcome = train_run(made.changed({"views.size_px": 16}), data=styles, out=tmp_path / "run")
    assert outcome.status == "finished" and [task.name for task in outcome.tasks] == ["sketch", "photo"]
    assert all("knn" in task.accuracy for task in outcome.tasks)
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["sources"]["encoder.stem"] == f"{FROM_DATA}: 72 px"
    assert saved["config"]["encoder"]["stem"] == "imagenet"
    assert saved["sources"]["epochs"] == COMMAND_LINE
    # The same call again, and one with the completed recipe, resume the finished run.
    before = lines(tmp_path / "run")
    again = recipe("own", "moco", "pnr", data=styles).changed(QUICK)
    assert train_run(again, data=styles, out=tmp_path / "run").status == "finished"
    assert lines(tmp_path / "run") == before
    evaluate_runs([tmp_path / "run"], Request(probes=("knn",)), device="cpu", num_threads=1)
    tables = compared([read_run(tmp_path / "run")])
    assert tables and {(it.recipe, it.about) for it in tables} == {("own on birds", f"{styles}, 2 tasks")}
    (target,) = open_targets([tmp_path / "run"], architecture=None, family="imagenet", size_px=None, out=None)
    (reference,) = missing_commands(target, [1], styles / "manifest.json")
    assert f"fastcssl-train own moco finetune --data {styles} --only-task 1" in reference
    assert "/own-birds-moco-only1-seed5" in reference


# ---- The command -----------------------------------------------------------------------------------------------------


def flags(values: dict[str, object]) -> list[str]:
    return [word for key, it in values.items() for word in (f"--{key.removeprefix('run.').replace('_', '-')}", str(it))]


def test_the_command_follows_the_data(
    styles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["own-small", "moco", "pnr", "--data", str(styles)]
    small = flags({key: it for key, it in QUICK.items() if key not in ("epochs", "views.size_px")})
    assert command.main([*words, *small, "--epochs", "2,1", "--stop-after-task", "0"]) == 0
    assert command.main([*words, *small, "--epochs", "2,1"]) == 0
    run = tmp_path / "runs/own-small-birds-moco-pnr-seed5"
    assert [line["num_epochs"] for line in lines(run, "task")] == [2, 1]
    saved = json.loads((run / "config.json").read_text())
    assert saved["config"]["views"]["size_px"] == 72 and saved["config"]["epochs"] == [2, 1]
    assert command.main(["status", str(run)]) == 0
    assert "own-small · moco · pnr" in capsys.readouterr().out
    # A value that equals the data's is not a change; one that equals the value without data is.
    assert command.main([*words, "--list", "--views.size-px", "96", f"--data={styles}"]) == 0
    assert "96 command line" in " ".join(capsys.readouterr().out.split())


def test_without_data_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    for last in (["--list"], ["--help"]):
        assert command.main(["own", "moco", "pnr", *last]) == 0
        assert "follows the data, which is not known yet" in " ".join(capsys.readouterr().out.split())
    for last in ([], ["--dry-run"]):
        assert command.main(["own", "moco", "pnr", *last]) == 2
        said = capsys.readouterr().err
        assert "--data is missing" in said and "fastcssl-prep build folder:ROOT --scenario class --tasks 5" in said
    assert command.main(["own", "moco", "pnr", "--data", "nowhere", "--list"]) == 2
    assert "nowhere does not exist. Give a prepared folder" in capsys.readouterr().err
    with pytest.raises(UserError, match="nowhere does not exist"):
        recipe("own", "moco", "pnr", data="nowhere")


def test_with_data_nothing_is_missing(styles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for last in (["--list"], ["--help"]):
        assert command.main(["own", "moco", "pnr", "--data", str(styles), *last]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "not known yet" not in out and "--views.size-px 72" in out
