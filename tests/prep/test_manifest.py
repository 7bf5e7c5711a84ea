"""A manifest that is not whole, or that reaches out of its folder, is refused with a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import prep_ok
from hypothesis import given
from hypothesis import strategies as st

from dataprep.id_ranges import format_ids, parse_ids
from dataprep.manifest import ManifestError, load_manifest


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "out"
    prep_ok("build", "synthetic:train=4,val=4", "--scenario", "class", "--tasks", 5, "--out", out)
    return out


@pytest.fixture
def edited(built: Path) -> Any:
    """Changes the manifest's JSON for one test."""
    path = built / "manifest.json"
    original = path.read_text()

    def edit(change: Any) -> Path:
        content = json.loads(original)
        change(content)
        path.write_text(json.dumps(content))
        return built

    yield edit
    path.write_text(original)


def test_loads_what_was_saved(built: Path) -> None:
    manifest = load_manifest(built)
    assert manifest == load_manifest(built / "manifest.json")
    assert [len(task.classes) for task in manifest.tasks] == [6] * 5
    assert sum(task.train.count for task in manifest.tasks) == 120


@pytest.mark.parametrize("path", ["../escape.npy", "/etc/passwd", "task-00/../../x", "", "a\\..\\b"])
@pytest.mark.parametrize("where", ["shard", "samples"])
def test_paths_that_leave_the_folder(edited: Any, path: str, where: str) -> None:
    def change(m: dict[str, Any]) -> None:
        (m["shards"][0] if where == "shard" else m["samples"])["path"] = path

    with pytest.raises(ManifestError, match="leaves its folder"):
        load_manifest(edited(change))


def test_a_link_that_leaves_the_folder(built: Path, edited: Any, tmp_path: Path) -> None:
    outside = tmp_path / "outside.npy"
    outside.write_bytes(b"x")
    link = built / "link.npy"
    link.symlink_to(outside)
    try:
        with pytest.raises(ManifestError, match="leaves its folder"):
            load_manifest(edited(lambda m: m["shards"][0].update(path="link.npy")))
    finally:
        link.unlink()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(schema=99), "schema version 99"),
        (lambda m: m.pop("schema"), "schema version None"),
        (lambda m: m.pop("tasks"), "'tasks' is missing"),
        (lambda m: m.update(extra=1), "'extra' is unknown"),
        (lambda m: m["tasks"].pop(), "says 5 tasks but lists 4"),
        (lambda m: m["tasks"][0]["train"].update(count=3), "lists 24 train ids but says 3"),
        (lambda m: m["tasks"][0]["train"].update(ids="5-2"), "out of order"),
        (lambda m: m["tasks"][0]["train"].update(ids="0-3,x"), "not a range"),
        (lambda m: m["tasks"][0]["train"]["shards"].update(array=[99]), "does not list"),
        (lambda m: m["shards"][0].update(bytes="many"), "is not a valid value"),
        (lambda m: m["shards"][0].update(split="testing"), "is not a valid value"),
        (lambda m: m["shards"][0].update(bytes=7), "bytes instead of 7"),
        (lambda m: m["shards"][0].update(path="task-00/gone.npy"), "is missing"),
    ],
)
def test_damage_is_named(edited: Any, change: Any, says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        load_manifest(edited(change))


def test_not_json(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    for text in ("{", "[]", '"x"', ""):
        bad.write_text(text)
        with pytest.raises(ManifestError):
            load_manifest(bad)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"holds no manifest\.json"):
        load_manifest(tmp_path)
    with pytest.raises(ManifestError, match="does not exist"):
        load_manifest(tmp_path / "nowhere")
    (tmp_path / ".build").mkdir()
    with pytest.raises(ManifestError, match="unfinished build"):
        load_manifest(tmp_path)


@given(st.sets(st.integers(0, 400)))
def test_ids_round_trip(ids: set[int]) -> None:
    assert list(parse_ids(format_ids(sorted(ids)))) == sorted(ids)
