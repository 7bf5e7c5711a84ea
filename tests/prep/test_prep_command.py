"""fastcssl-prep as a person meets it."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import folder_bytes, prep, prep_ok, prep_refused
from PIL import Image

from dataprep.manifest import load_manifest
from dataprep.table import load_table

Tree = Callable[..., Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "out"
    prep_ok("build", "synthetic:train=8,val=4", "--scenario", "class", "--tasks", 5, "--out", out)
    return out


@pytest.mark.parametrize("command", [(), ("build",), ("split",), ("verify",), ("inspect",)])
def test_help(command: tuple[str, ...]) -> None:
    text = prep_ok(*command, "--help")
    assert "usage: fastcssl-prep" in text and "{None}" not in text


def test_an_unknown_option_names_the_nearest(tmp_path: Path) -> None:
    done = prep("build", "synthetic", "--scenario", "joint", "--out", tmp_path / "x", "--qualty", 4)
    assert done.returncode == 2 and "--quality" in done.stderr


def test_build_prints_a_table_and_plain_lines(tmp_path: Path) -> None:
    text = prep_ok("build", "synthetic:train=4,val=4", "--scenario", "class", "--tasks", 3, "--out", tmp_path / "o")
    assert "\x1b" not in text  # no terminal, no escape codes
    for word in ("task", "train", "val", "bytes", "time", "manifest.json"):
        assert word in text


def test_default_formats(tree: Tree, tmp_path: Path) -> None:
    prep_ok("build", "synthetic:train=4,val=4,size=mixed", "--scenario", "joint", "--out", tmp_path / "mixed")
    assert load_manifest(tmp_path / "mixed").formats == ["tar"]
    prep_ok("build", f"folder:{tree()}", "--scenario", "joint", "--out", tmp_path / "small")
    assert load_manifest(tmp_path / "small").formats == ["array"]  # all are 64 x 48
    prep_ok(
        "build",
        f"folder:{tmp_path / 'source'}",
        "--scenario",
        "joint",
        "--out",
        tmp_path / "sq",
        "--resize",
        "square:40",
    )
    assert load_manifest(tmp_path / "sq").formats == ["array"]


@pytest.mark.parametrize(
    ("kind", "tasks"), [("class", 2), ("class", 10), ("class", 30), ("data", 7), ("domain", None), ("joint", None)]
)
def test_split_again_without_touching_a_shard(kind: str, tasks: int | None, built: Path) -> None:
    before = {k: hashlib.sha256(v).hexdigest() for k, v in folder_bytes(built).items()}
    name = f"{kind}{tasks or ''}"
    count = () if tasks is None else ("--tasks", tasks)
    text = prep_ok("split", built, "--scenario", kind, *count, "--name", name)
    assert "no shard was touched" in text
    after = {k: hashlib.sha256(v).hexdigest() for k, v in folder_bytes(built).items()}
    assert {k: v for k, v in after.items() if k in before} == before
    assert set(after) - set(before) == {f"{name}.json"}
    manifest = load_manifest(built / f"{name}.json")
    assert len(manifest.tasks) == (tasks or {"domain": 4, "joint": 1}[kind])
    ids = sorted(i for task in manifest.tasks for split in (task.train, task.val) for i in split.iter_ids())
    assert ids == load_table(manifest, built)["id"].tolist()
    assert prep("verify", built / f"{name}.json").returncode == 0
    prep_ok("split", built, "--scenario", kind, *count, "--name", name)  # the same again is no conflict
    prep_ok("inspect", built / f"{name}.json")


def test_split_is_the_split_that_build_would_have_made(tmp_path: Path, built: Path) -> None:
    spec = "synthetic:train=8,val=4"
    prep_ok("build", spec, "--scenario", "data", "--tasks", 4, "--seed", 9, "--out", tmp_path / "built")
    prep_ok("split", built, "--scenario", "data", "--tasks", 4, "--seed", 9, "--name", "seed9")
    direct, derived = load_manifest(tmp_path / "built"), load_manifest(built / "seed9.json")
    for ours, theirs in zip(direct.tasks, derived.tasks, strict=True):
        assert (ours.train.ids, ours.val.ids, ours.classes) == (theirs.train.ids, theirs.val.ids, theirs.classes)


def test_split_refusals(built: Path, tmp_path: Path) -> None:
    prep_refused("split", built, "--scenario", "class", "--tasks", 4, "--name", "x", says=("30 classes cannot be cut",))
    prep_refused("split", built, "--scenario", "class", "--name", "x", says=("needs --tasks",))
    prep_refused("split", built, "--scenario", "joint", "--name", "manifest", says=("--name",))
    prep_refused("split", built, "--scenario", "joint", "--name", "../x", says=("--name",))
    prep_refused("split", tmp_path, "--scenario", "joint", "--name", "x", says=("holds no manifest.json",))
    prep_ok("split", built, "--scenario", "class", "--tasks", 3, "--name", "taken")
    args = ("split", built, "--scenario", "class", "--tasks", 6, "--name", "taken")
    prep_refused(*args, says=("exists and holds another split",))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--scenario", "class"), "needs --tasks"),
        (("--scenario", "joint", "--resize", "big"), "--resize big"),
        (("--scenario", "joint", "--quality", 0), "--quality 0"),
        (("--scenario", "joint", "--shard-mb", 0), "--shard-mb 0"),
        (("--scenario", "joint", "--workers", 0), "--workers 0"),
        (("--scenario", "joint", "--max-corrupt", 2), "--max-corrupt 2"),
        (("--scenario", "joint", "--limit-per-class", 0), "--limit-per-class 0"),
        (("--scenario", "joint", "--formats", "zip"), "'zip' is not a format"),
        (("--scenario", "joint", "--formats", ""), "--formats is empty"),
        (("--scenario", "joint", "--seed", 1, "--order", "reference"), "exclude each other"),
        (("--scenario", "joint", "--seed", -1), "negative"),
        (("--scenario", "class", "--tasks", 7), "30 classes cannot be cut into 7"),
        (("--scenario", "joint", "--classes", "list.txt"), "--classes does not apply"),
        (("--scenario", "joint", "--domains", "oil"), "'oil' is not a style"),
    ],
)
def test_bad_numbers_and_words(words: tuple[object, ...], says: str, tmp_path: Path) -> None:
    prep_refused("build", "synthetic:train=4", "--out", tmp_path / "out", *words, says=(says,))
    assert not (tmp_path / "out").exists()


def test_limit_and_domains(tmp_path: Path) -> None:
    args = ("build", "synthetic:train=12,val=12", "--scenario", "domain", "--domains", "neon,photo")
    prep_ok(*args, "--limit-per-class", 2, "--out", tmp_path / "out")
    manifest = load_manifest(tmp_path / "out")
    assert manifest.domains == ["photo", "neon"] and [task.train.count for task in manifest.tasks] == [60, 60]


def test_inspect_draws_a_row_a_task(built: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    text = prep_ok("inspect", built, "--sheet", sheet)
    assert "synthetic" in text and str(sheet) in text.replace("\n", "")
    pixels = np.asarray(Image.open(sheet).convert("RGB"))
    # Five rows of pictures, separated by bands of paper.
    busy = pixels.astype(int).std(axis=(1, 2)) > 25
    assert (np.diff(busy.astype(int)) == 1).sum() >= 5
    prep_refused("inspect", built, "--sheet", tmp_path / "no" / "such" / "x.png", says=("cannot be written",))


def test_verify_of_nothing(tmp_path: Path) -> None:
    prep_refused("verify", tmp_path / "nowhere", says=("does not exist",))
