"""fastcssl-eval as it is used: runs, references, encoder files, other data, and what it refuses."""

import csv
import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from processes import run as on_ranks
from small_runs import prepared, run, tiny

from fastcssl.cli.eval import main
from fastcssl.config.recipes import recipe
from fastcssl.distributed.world import World
from fastcssl.evaluate.downstream import RECIPES, recipe_of
from fastcssl.evaluate.evaluate import evaluate
from fastcssl.evaluate.options import Evaluated, ProbeMachine, Progress, Request
from fastcssl.evaluate.probes import Bench, Hits, ProbedEncoder, plain
from fastcssl.evaluate.scoreboard import Scoreboard
from fastcssl.evaluate.targets import open_references, open_targets
from fastcssl.runs.results import Evaluation, evaluations, metrics_of

pytestmark = pytest.mark.usefixtures("one_thread")

FAST = ("--device", "cpu", "--precision", "fp32", "--num-threads", "1")


@dataclasses.dataclass(frozen=True)
class Trained:
    data: Path
    run: Path
    alone: Path  # trained on task 1 alone


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two tasks of ten classes, one epoch each."""
    root = tmp_path_factory.mktemp("eval")
    data = prepared(root / "data", source="classes=20,train=4,val=2")
    first = tiny(epochs=1)
    published = recipe("demo", "moco", "pnr", settings="published")
    run(published.changed_to(first.config), data, root / "run")  # with its sources
    run(tiny(strategy="finetune", epochs=1, only_task=1), data, root / "alone")
    return Trained(data, root / "run", root / "alone")


@pytest.fixture
def copied(trained: Trained, tmp_path: Path) -> Trained:
    """Runs to leave results in."""
    for folder in (trained.run, trained.alone):
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("evaluations", "checkpoints"))
    return Trained(trained.data, tmp_path / "run", tmp_path / "alone")


def found(folder: Path) -> list[Evaluation]:
    return [made for _, made in evaluations(folder)]


def evaluated(folder: Path, *args: object) -> list[Evaluation]:
    assert main([str(folder), *map(str, args), *FAST]) == 0
    return found(folder)


def refused(capsys: pytest.CaptureFixture[str], *args: object, says: str) -> None:
    capsys.readouterr()
    assert main([*map(str, args), *FAST]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert says in error and "Traceback" not in error


# ---- A run -----------------------------------------------------------------------------------------------------------


def test_a_run_with_its_references(copied: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    (bare,) = evaluated(copied.run, "--probe", "linear-cached")
    assert bare.metrics.P is None and bare.metrics.S is not None and bare.metrics.F is not None
    shown = capsys.readouterr().out
    command = next(line for line in shown.splitlines() if line.startswith("fastcssl-train demo moco finetune"))
    assert "--only-task 1 --out" in command and "--settings published" in command and "--epochs 1" in command
    (made,) = evaluated(copied.run, "--probe", "linear-cached", "--references", copied.alone)
    assert made.reference.ft is not None and made.reference.ft[0] is None
    (alone,) = found(copied.alone)
    assert made.reference.ft[1] == alone.top1[0][1]
    assert made.metrics == metrics_of(made.top1, [[0], [0, 1]], made.reference)
    assert made.metrics.P is not None and not made.metrics.missing
    assert made.top1 == bare.top1 and made.reference.random == bare.reference.random
    assert [encoder.seen for encoder in made.checkpoints] == [[0], [0, 1]] and alone.checkpoints[0].seen == [1]
    assert made.num_val == [20, 20] and made.manifest.scenario == "class"
    assert made.overall_top1 == pytest.approx([sum(row) / 2 for row in made.top1])
    # The reference stays known when it is not named again.
    (later,) = evaluated(copied.run, "--probe", "linear-cached")
    assert later == made and "evaluated before" in capsys.readouterr().out


def test_a_folder_of_references_and_a_joint_run(copied: Trained, tmp_path: Path) -> None:
    run(tiny(strategy="joint", epochs=1), copied.data, tmp_path / "joint")
    found_there = open_references([tmp_path])
    assert [target.folder.name for target in found_there] == ["alone"]
    (made,) = evaluated(tmp_path / "joint", "--probe", "knn", "--metric", "cosine", "--references", tmp_path)
    assert made.checkpoints[0].path == "encoders/joint.safetensors" and made.checkpoints[0].seen == [0, 1]
    assert made.metrics.A == pytest.approx([sum(made.top1[0]) / 2]) and made.metrics.S is None
    assert "S, P and F compare checkpoints" in made.metrics.missing[0]


class Counted(Progress):
    def __init__(self) -> None:
        self.num_images = 0

    def advance(self, num_images: int) -> None:
        self.num_images += num_images


def machine(**changes: object) -> ProbeMachine:
    return ProbeMachine(**{"precision": "fp32", "num_threads": 1, **changes})  # type: ignore[arg-type]


def outcomes(folder: Path, request: Request, progress: Progress | None = None, **changes: object) -> list[Evaluated]:
    targets = open_targets([folder], architecture=None, family="imagenet", size_px=None, out=None)
    return evaluate(targets, request, machine(**changes), progress=progress)


def test_nothing_is_evaluated_twice(copied: Trained) -> None:
    request = Request(probes=("linear",), epochs=2, lrs=(0.5,), batch_sizes=(16,))
    last = copied.run / "encoders" / "task1.safetensors"
    last.rename(copied.run / "kept")
    first = outcomes(copied.run, request, one := Counted())
    assert first[0].evaluation.metrics.S is None and one.num_images >= 200
    assert outcomes(copied.run, request, none := Counted())[0].was_there and none.num_images == 0
    # A task more: only its row is computed, and the random encoder, which is of use now.
    (copied.run / "kept").rename(last)
    second = outcomes(copied.run, request, Counted())
    assert not second[0].was_there and second[0].path == first[0].path
    assert second[0].evaluation.top1[0] == first[0].evaluation.top1[0]
    fresh = outcomes(copied.run, dataclasses.replace(request, again=True), again := Counted())
    assert again.num_images > 0 and fresh[0].evaluation.top1 == second[0].evaluation.top1
    assert fresh[0].evaluation.reference == second[0].evaluation.reference
    assert len(found(copied.run)) == 1
    # Other weights under the same name are another encoder.
    shutil.copy(copied.run / "encoders" / "task0.safetensors", last)
    changed = outcomes(copied.run, request, Counted())[0].evaluation
    assert changed.top1[1] == changed.top1[0] == second[0].evaluation.top1[0]


def test_one_pass_serves_all_probes_and_scopes(copied: Trained) -> None:
    """80 training images and 40 to validate with: once for both probes and both scopes."""
    both = Request(probes=("knn", "linear-cached"), scopes=("all", "per-task"))
    alone = copied.run.with_name("apart")
    shutil.copytree(copied.run, alone)
    together = outcomes(copied.run, both, once := Counted())
    assert once.num_images == 120 and len(together) == 4
    apart = [
        outcome.evaluation
        for probe in both.probes
        for scope in both.scopes
        for outcome in outcomes(alone, Request(probes=(probe,), scopes=(scope,)), Counted())
    ]
    key = {(made.probe, made.scope): made for made in apart}
    for outcome in together:
        made, its = outcome.evaluation, key[outcome.evaluation.probe, outcome.evaluation.scope]
        assert (made.top1, made.top5, made.reference, made.metrics) == (its.top1, its.top5, its.reference, its.metrics)
    more = outcomes(copied.run, both, none := Counted())
    assert none.num_images == 0 and all(outcome.was_there for outcome in more)


def test_only_the_scope_that_is_missing_is_computed(copied: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    first = outcomes(copied.run, Request(probes=("knn",)))
    trained_for: list[frozenset[int] | None] = []
    run = plain.run

    def noting(contenders: Sequence[ProbedEncoder[plain.PlainSettings]], bench: Bench) -> list[list[Hits]]:
        trained_for.extend(contender.groups for contender in contenders)
        assert len(bench.plan.groups) == 2  # those of per-task
        return run(contenders, bench)

    monkeypatch.setattr(plain, "run", noting)
    both = outcomes(copied.run, Request(probes=("knn",), scopes=("all", "per-task")))
    assert [outcome.was_there for outcome in both] == [True, False] and trained_for == [frozenset({0, 1})] * 3
    assert both[0].evaluation == first[0].evaluation


def test_csv_and_latex(copied: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("--csv", tmp_path / "out" / "a.csv", "--latex", tmp_path / "out" / "a.tex")
    made = evaluated(copied.run, "--probe", "knn", "--scope", "all", "per-task", *files, "--tables")
    shown = capsys.readouterr().out
    assert "random encoder" in shown and "chance" in shown and "task 0" in shown and "5.00" in shown
    rows = list(csv.DictReader((tmp_path / "out" / "a.csv").read_text().splitlines()))
    assert [row["scope"] for row in rows] == ["all", "per-task"]
    by_scope = {one.scope: one for one in made}
    assert all(float(row["A"]) == by_scope[row["scope"]].metrics.A[-1] for row in rows)
    assert all(Path(row["file"]).is_file() and row["P"] == "" for row in rows)
    table = (tmp_path / "out" / "a.tex").read_text()
    assert f"{100 * by_scope['per-task'].metrics.A[-1]:.2f}" in table and r"\multicolumn{2}{c}{per-task}" in table


def test_a_grid_leaves_a_file_for_each_setting(copied: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ("--epochs", 2, "--lr", 0.1, 1, "--batch-size", 16, 40, "--momentum", 0, "--no-random-encoder")
    made = evaluated(copied.run, *grid)
    assert {(one.settings["lr"], one.settings["batch_size"]) for one in made} == {
        (a, b) for a in (0.1, 1) for b in (16, 40)
    }
    assert all(one.settings["momentum"] == 0 and one.reference.random is None for one in made)
    assert "linear, lr 0.1, batch size 16" in capsys.readouterr().out


def test_a_reference_of_another_method_is_none(copied: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    file = copied.alone / "config.json"
    file.write_text(file.read_text().replace(json.loads(file.read_text())["manifest_sha256"], "0" * 64))
    (made,) = evaluated(
        copied.run, "--probe", "knn", "--metric", "cosine", "--data", copied.data, "--references", copied.alone
    )
    assert made.reference.ft is None and "is not a reference for these runs" in capsys.readouterr().out


def test_per_task_and_domain_scopes(copied: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    made = evaluated(copied.run, "--probe", "knn", "--metric", "cosine", "--scope", "per-task", "all")
    by_scope = {one.scope: one for one in made}
    # Ten classes to tell apart instead of twenty.
    assert all(a >= b for a, b in zip(by_scope["per-task"].top1[1], by_scope["all"].top1[1], strict=True))
    refused(capsys, copied.run, "--probe", "knn", "--scope", "semi-1", says="1 % of the 4 training images of class")
    refused(capsys, copied.run, "--scope", "alll", says="Did you mean 'all'?")


def test_the_method_decides_the_learning_rate(copied: Trained) -> None:
    made = evaluated(copied.run, "--epochs", 1)[0]
    assert made.settings["lr"] == 3.0 and made.settings["batch_size"] == 128 and made.settings["momentum"] == 0.9


def test_interrupted_and_resumed(copied: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("--epochs", 4, "--lr", 0.5, "--batch-size", 16)
    whole = copied.run.with_name("whole")
    shutil.copytree(copied.run, whole)
    (expected,) = evaluated(whole, *args)
    plain, calls = Scoreboard.advance, 0

    def interrupting(self: Scoreboard, num_images: int) -> None:
        nonlocal calls
        calls += 1
        plain(self, num_images)
        if calls == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Scoreboard, "advance", interrupting)
    assert main([str(copied.run), *map(str, args), *FAST]) == 128 + signal.SIGTERM
    assert not found(copied.run) and list(copied.run.glob("evaluations/.underway/*/step-*.pt"))
    notes: list[str] = []
    monkeypatch.setattr(Scoreboard, "note", lambda _, text: notes.append(text))
    (made,) = evaluated(copied.run, *args)
    assert notes == ["Continuing in epoch 2 of 4."]  # whose only chunk of images was done
    assert made.top1 == expected.top1 and made.reference == expected.reference
    assert not list(copied.run.glob("evaluations/.underway"))


def on_a_rank(world: World, folder: Path) -> list[list[list[float]]]:
    torch.set_num_threads(1)
    request = Request(probes=("linear", "linear-cached", "knn"), epochs=2, lrs=(0.5,), batch_sizes=(16,))
    return [outcome.evaluation.top1 for outcome in outcomes(folder, request, world=world)]


def test_two_ranks_evaluate_as_one(copied: Trained) -> None:
    both = copied.run.with_name("both")
    shutil.copytree(copied.run, both)
    one = on_a_rank(World(), copied.run)
    assert on_ranks(2, on_a_rank, both, timeout_s=300) == [one, one]
    assert [made.top1 for made in found(both)] == [made.top1 for made in found(copied.run)]


# ---- Encoder files and other data ------------------------------------------------------------------------------------


def test_an_encoder_file_of_ours(trained: Trained, copied: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    file = copied.run / "encoders" / "task1.safetensors"
    refused(capsys, file, says="an encoder file does not name its data. Give --data DIR")
    knn = ("--probe", "knn", "--metric", "cosine", "--data", trained.data)
    assert main([str(file), *map(str, knn), *FAST]) == 0
    (made,) = found(file.with_suffix(""))
    (of_run,) = evaluated(copied.run, *knn[:-2])
    assert made.top1 == of_run.top1[1:] and made.checkpoints[0].seen == [] and made.metrics.S is None
    refused(capsys, file, *knn, "--architecture", "resnet50", says="resnet18-w8 (cifar stem), not a resnet50")


def test_a_state_dict_of_torchvision(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    file = tmp_path / "their.pth"
    torch.save(resnet18().state_dict(), file)
    args = (file, "--data", trained.data, "--probe", "knn", "--metric", "cosine", "--size-px", 32)
    refused(capsys, *args, says="does not say which encoder it holds. Give --architecture")
    refused(capsys, *args, "--architecture", "resnet34", says="does not hold a resnet34 (imagenet stem): missing keys")
    refused(capsys, *args, "--architecture", "resnet18", "--stem", "cifar", says="conv1.weight is")
    refused(capsys, *args, "--architecture", "resnet17", says="There is no encoder 'resnet17'")
    assert main([*map(str, args), "--architecture", "resnet18", "--out", str(tmp_path / "out"), *FAST]) == 0
    (made,) = found(tmp_path / "out")
    assert made.settings["size_px"] == 32 and made.settings["mean"] == [0.485, 0.456, 0.406]
    assert len(made.top1) == 1 and made.checkpoints[0].path == str(file)


class Code:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, ("touch opened",)


def test_pickles_are_refused(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--data", trained.data, "--architecture", "resnet18")
    torch.save({"fc.weight": Code()}, tmp_path / "code.pth")
    refused(capsys, tmp_path / "code.pth", *args, says="could run arbitrary code, so it is refused")
    torch.save({"epoch": 3}, tmp_path / "other.pth")
    refused(capsys, tmp_path / "other.pth", *args, says="is not a state dict of tensors by name")
    (tmp_path / "half.pth").write_bytes((tmp_path / "other.pth").read_bytes()[:200])
    refused(capsys, tmp_path / "half.pth", *args, says="does not hold only tensors")
    (tmp_path / "no.safetensors").write_bytes(b"nothing")
    refused(capsys, tmp_path / "no.safetensors", "--data", trained.data, says="not a safetensors file")


def test_downstream_sets(copied: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = prepared(tmp_path / "other", source="classes=60,train=2,val=1", tasks=4)
    knn = ("--probe", "knn", "--metric", "cosine", "--scope", "none")
    (made,) = evaluated(copied.run, *knn, "--downstream", f"pets={other}")
    assert made.scope == "downstream:pets" and len(made.columns) == 4 and len(made.top1) == 2
    assert made.settings["size_px"] == 16 and made.metrics.S is None
    assert made.reference.random is not None and made.reference.chance == pytest.approx([1 / 60] * 4)
    assert made.metrics.A == pytest.approx([sum(row) / 4 for row in made.top1])
    refused(capsys, copied.run, *knn, "--downstream", f"stl10={other}", says="made for stl10, but the data was")
    refused(capsys, copied.run, *knn, "--downstream", "pets", says="give NAME=DIR")
    refused(capsys, copied.run, "--data", other, says="has other classes (60,")


def test_the_papers_downstream_recipes_see_96_px(copied: Trained) -> None:
    (target,) = open_targets([copied.run], architecture=None, family="imagenet", size_px=None, out=None)
    for name in ("cifar10", "cifar100", "stl10"):
        recipe = recipe_of(name, name, Path("d"))
        views = target.style.views(size_px=recipe.size_px, crop=recipe.crop)
        assert (views.train[0].size_px, views.train[0].crop, views.train[0].flip_p) == (96, "random", 0.5)
        assert (views.val[0].size_px, views.val[0].crop) == (96, "whole")
        assert views.val[0].mean == target.style.mean and recipe.batch_size == 256
    clipart = dataclasses.replace(target.style, family="imagenet", size_px=224).views(crop=RECIPES["clipart"].crop)
    assert (clipart.val[0].resize_px, clipart.val[0].size_px, clipart.val[0].crop) == (256, 224, "center")


# ---- What is refused -------------------------------------------------------------------------------------------------


def test_runs_that_cannot_be_evaluated(copied: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "--k", 3, says="Give a run")
    refused(capsys, tmp_path / "nothing", says="neither a run of fastcssl-train")
    refused(capsys, copied.run, copied.run, says="is given twice")
    refused(capsys, copied.run, "--references", copied.run, says="it holds no finished run of a single task")
    refused(capsys, copied.run, "--lr", "-1", says="Give an lr above 0")
    refused(capsys, copied.run, "--probe", "knn", "--k", "0", says="--k 0: give 1 or more")
    refused(capsys, copied.run, "--size-px", "0", says="--size-px 0: give 1 or more")
    refused(capsys, copied.run, "--strength", "0", says="give finite numbers above 0")
    refused(capsys, copied.run, "--scope", "none", says="There is nothing to evaluate")
    config = copied.run / "config.json"
    kept = config.read_text()
    config.write_text(kept[:50])
    refused(capsys, copied.run, says="config.json cannot be read")
    config.write_text(kept.replace("resnet18-w8", "resnet50"))
    refused(capsys, copied.run, says="holds a resnet18-w8 (cifar stem), but the run trained a resnet50")
    config.write_text(kept.replace(json.loads(kept)["manifest_sha256"], "0" * 64))
    refused(capsys, copied.run, says="its manifest has changed")
    config.write_text(kept.replace(str(copied.data), str(tmp_path / "moved")))
    refused(capsys, copied.run, says="no longer exists. Give its new place with --data")
    config.write_text(kept)
    shutil.rmtree(copied.run / "encoders")
    refused(capsys, copied.run, says="has no finished task")


def test_a_half_written_result_is_refused(copied: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    knn = (copied.run, "--probe", "knn", "--metric", "cosine")
    assert main([*map(str, knn), *FAST]) == 0
    (path,) = (copied.run / "evaluations").glob("*.json")
    path.write_bytes(path.read_bytes()[:300])
    refused(capsys, *knn, says="half-written or damaged. Delete it and run fastcssl-eval again")
