"""The order and the sizes of tasks, as --order, --tasks and --domains ask for them."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import folder_bytes, jpeg_of, picture

from dataprep import PrepError, build_data, load_manifest, split_data
from dataprep.cli import main
from dataprep.contents import class_lines
from dataprep.orders import AskedTasks, asked_tasks
from dataprep.table import load_table

SPEC = "synthetic:classes=20,train=4,val=4"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("orders") / "out"
    build_data(SPEC, out, scenario="class", num_tasks=2, num_workers=1)
    return out


def names_of(where: Path) -> list[list[str]]:
    """The classes of every task by name."""
    manifest = load_manifest(where)
    return [[manifest.classes[label] for label in task.classes] for task in manifest.tasks]


# ---- What is read ----------------------------------------------------------------------------------------------------


def test_numbers_sizes_lists_and_files(tmp_path: Path) -> None:
    assert asked_tasks(None, None, 7) == AskedTasks()
    assert asked_tasks("5", "reference", None) == AskedTasks(num_tasks=5, order="reference")
    assert asked_tasks("50, 10,10", None, 3) == AskedTasks(num_tasks=3, sizes=(50, 10, 10))
    assert asked_tasks(None, "a, b c,d", None) == AskedTasks(order=("a", "b c", "d"))
    file = tmp_path / "tasks.txt"
    file.write_text("# comment\n\nred fox\nowl\n\n\n  bee\n")
    assert asked_tasks(str(file), None, None) == AskedTasks(num_tasks=2, sizes=(2, 1), order=("red fox", "owl", "bee"))
    assert asked_tasks("3", str(file), None) == AskedTasks(num_tasks=3, order=("red fox", "owl", "bee"))


@pytest.mark.parametrize(
    ("tasks", "order", "seed", "says"),
    [
        ("2", "reference", 1, "the reference order has its own seeds. Leave one out."),
        ("2", "a,b", 1, "a seed draws an order. Leave one out."),
        ("FILE", "a,b", None, "--order exclude each other: the file already has an order"),
        ("FILE", None, 3, "--seed exclude each other: the file already has an order"),
        ("EMPTY", None, None, "names nothing. Write one name per line."),
        ("many", None, None, "--tasks many is not a number, and there is no file of that name. Give a number"),
        ("5,0", None, None, "--tasks 5,0: a task of size 0 would be empty. Use sizes of at least 1."),
        ("2", "list.txt", None, "--order list.txt: there is no such file. Give a text file"),
        ("2", ",", None, "--order is empty. Give names"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(
    tasks: str, order: str | None, seed: int | None, says: str, tmp_path: Path
) -> None:
    (tmp_path / "FILE").write_text("a\n\nb\n")
    (tmp_path / "EMPTY").write_text("\n# nothing\n")
    tasks = str(tmp_path / tasks) if tasks in ("FILE", "EMPTY") else tasks
    with pytest.raises(PrepError) as caught:
        asked_tasks(tasks, order, seed)
    assert says in str(caught.value)


# ---- What becomes of it ----------------------------------------------------------------------------------------------


def test_domains_keep_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["build", SPEC, "--scenario", "domain", "--workers", "1"]
    assert main([*words, "--domains", "neon,photo", "--out", str(tmp_path / "given")]) == 0
    manifest = load_manifest(tmp_path / "given")
    assert [task.name for task in manifest.tasks] == ["neon", "photo"]
    assert manifest.domains == ["photo", "neon"] and manifest.scenario.order == "given (neon, photo)"
    assert "given order" in capsys.readouterr().out
    # In the usual order, and where something else decides the order, nothing has changed.
    build_data(SPEC, tmp_path / "usual", scenario="domain", domains=("photo", "neon"), num_workers=1)
    assert load_manifest(tmp_path / "usual").scenario.order == "reference"
    assert main([*words, "--domains", "neon,photo", "--order", "reference", "--out", str(tmp_path / "reference")]) == 0
    assert folder_bytes(tmp_path / "reference") == folder_bytes(tmp_path / "usual")
    build_data(SPEC, tmp_path / "seed", scenario="domain", domains=("neon", "photo"), seed=3, num_workers=1)
    assert load_manifest(tmp_path / "seed").scenario.order == "seed 3"
    with pytest.raises(PrepError, match="--domains names neon twice"):
        build_data(SPEC, tmp_path / "twice", scenario="domain", domains=("neon", "photo", "neon"))
    # Another order in the same folder is another build.
    assert main([*words, "--domains", "photo,neon", "--out", str(tmp_path / "given")]) == 2
    assert "order" in capsys.readouterr().err


def test_classes_in_a_given_order(built: Path, tmp_path: Path) -> None:
    names = sorted(load_manifest(built).classes, reverse=True)
    file = tmp_path / "order.txt"
    file.write_text("\n".join(names))
    words = ["--scenario", "class", "--tasks", "4", "--order", str(file)]
    assert main(["split", str(built), *words, "--name", "reversed"]) == 0
    assert names_of(built / "reversed.json") == [names[at : at + 5] for at in range(0, 20, 5)]
    assert main(["build", SPEC, *words, "--workers", "1", "--out", str(tmp_path / "out")]) == 0
    derived, direct = load_manifest(built / "reversed.json"), load_manifest(tmp_path / "out")
    assert [task.train.ids for task in derived.tasks] == [task.train.ids for task in direct.tasks]
    assert direct.scenario.order.startswith("given (") and len(direct.scenario.order) < 80
    # Two long orders are told apart.
    other = split_data(built, "other", scenario="class", num_tasks=4, order=[*names[1:], names[0]])
    assert other.scenario.order != derived.scenario.order


def test_tasks_of_different_sizes(built: Path, tmp_path: Path) -> None:
    uneven = split_data(built, "uneven", scenario="class", sizes=(12, 5, 3))
    reference = [label for task in load_manifest(built).tasks for label in task.classes]
    assert [label for task in uneven.tasks for label in task.classes] == reference
    assert [task.name for task in uneven.tasks] == ["classes 1-12", "classes 13-17", "classes 18-20"]
    assert [task.train.count for task in uneven.tasks] == [48, 20, 12]
    assert uneven.scenario.order == "reference, sizes 12,5,3"
    table = load_table(uneven, built)
    ids = [i for task in uneven.tasks for part in (task.train, task.val) for i in part.iter_ids()]
    assert sorted(ids) == table["id"].tolist()
    for task in uneven.tasks:
        labels = table["label"][np.isin(table["id"], list(task.train.iter_ids()))]
        assert set(labels.tolist()) == set(task.classes)
    # A file with blank lines between tasks has order and sizes.
    names = load_manifest(built).classes
    file = tmp_path / "tasks.txt"
    file.write_text("\n".join(names[:3]) + "\n\n" + "\n".join(names[3:]) + "\n")
    assert main(["split", str(built), "--scenario", "class", "--tasks", str(file), "--name", "listed"]) == 0
    assert names_of(built / "listed.json") == [names[:3], names[3:]]
    # Data by relative numbers, domains by how many make a task.
    parts = split_data(built, "parts", scenario="data", sizes=(2, 1, 1))
    assert [task.train.count for task in parts.tasks] == [40, 20, 20]
    two = split_data(built, "two", scenario="domain", sizes=(1, 3), order=("neon", "sketch", "photo", "poster"))
    assert [task.name for task in two.tasks] == ["neon", "sketch, photo, poster"]
    assert [len(task.domains) for task in two.tasks] == [1, 3]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "class --tasks 12,5,4",
            "--tasks 12,5,4 adds up to 21, but there are 20 classes. Use sizes that add up to 20.",
        ),
        ("class --tasks 3", "or with a list of sizes that add up to 20."),
        ("class --tasks 2 --order owl,bee", "The order names the class 'owl', which the data does not have."),
        ("domain --order neon,photo,neon,sketch", "The order names the domain 'neon' twice. Name each of the 4"),
        ("domain --order neon,photo,sketch", "3 of the 4 domains; poster is missing. Name each of them once. To leave"),
        ("domain --order noen,photo,sketch,poster", "Did you mean 'neon'?"),
        ("domain --tasks 2", "4 domains make 4 tasks, not 2. Leave out --tasks, or give it a list"),
        ("domain --tasks 2,1", "--tasks 2,1 adds up to 3, but there are 4 domains."),
        ("data --tasks 2 --order neon,photo", "--scenario data has no order of classes or domains."),
        ("joint --tasks 1,1", "Joint training is one task, without sizes. Leave out --tasks."),
    ],
)
def test_what_does_not_fit_is_a_sentence(
    words: str, says: str, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["split", str(built), "--scenario", *words.split(), "--name", "wrong"]) == 2
    assert says in capsys.readouterr().err
    assert not (built / "wrong.json").exists()


def test_python_is_told_the_same(built: Path) -> None:
    with pytest.raises(PrepError, match="The sizes 3,1 do not describe 3 tasks"):
        split_data(built, "x", scenario="class", num_tasks=3, sizes=(3, 1))
    with pytest.raises(PrepError, match="A seed and an order exclude each other"):
        split_data(built, "x", scenario="domain", seed=1, order=("neon",))


def test_a_long_list_of_known_names_is_cut(tmp_path: Path) -> None:
    for number in range(70):
        (tmp_path / "source" / f"class{number:02d}").mkdir(parents=True)
        (tmp_path / "source" / f"class{number:02d}" / "0.jpg").write_bytes(jpeg_of(picture(number, 8, 8)))
    with pytest.raises(PrepError) as caught:
        spec = f"folder:{tmp_path / 'source'}"
        build_data(spec, tmp_path / "out", scenario="class", num_tasks=1, order=["class7"], num_workers=1)
    assert str(caught.value).endswith("class59 and 10 more.") and "Did you mean 'class" in str(caught.value)


# ---- What is shown ---------------------------------------------------------------------------------------------------


def test_inspect_names_the_classes_of_each_task(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(built)]) == 0
    shown = capsys.readouterr().out.splitlines()
    for number, names in enumerate(names_of(built)):
        assert f"classes of task {number}: {', '.join(names)}" in shown
    split_data(built, "styles", scenario="domain")
    assert main(["inspect", str(built / "styles.json")]) == 0
    out = capsys.readouterr().out
    assert f"classes of every task: {', '.join(load_manifest(built).classes)}" in out and "classes of task" not in out


def test_many_classes_are_counted(built: Path) -> None:
    split_data(built, "one", scenario="joint")
    content = json.loads((built / "one.json").read_text())
    content["classes"] = [f"c{number}" for number in range(120)]
    content["tasks"][0]["classes"] = list(range(120))
    content["name"] = "many"
    (built / "many.json").write_text(json.dumps(content))
    (line,) = class_lines(load_manifest(built / "many.json"))
    assert line.startswith("classes of task 0: c0, c1,") and line.endswith("c99 and 20 more, listed in the manifest")
