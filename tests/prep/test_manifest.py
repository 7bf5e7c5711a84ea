"""A manifest that is not whole, or that reaches out of its folder, is refused with a sentence."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from conftest import prep_ok
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataprep.api import verify_data
from dataprep.cli import main
from dataprep.contract import FORMATS, SCENARIOS
from dataprep.id_ranges import format_ids, parse_ids
from dataprep.manifest import ManifestError, load_manifest, sha256_of
from dataprep.scenario import Kind
from dataprep.table import load_table
from dataprep.writers import formats


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


HOSTILE: dict[str, tuple[Any, str]] = {
    "huge ranges": (
        lambda m: m["tasks"][0]["train"].update(ids="0-99999999999999999", count=10**17),
        "more than its array shards hold",
    ),
    "huge everything": (
        lambda m: (
            m["tasks"][0]["train"].update(ids="0-99999999999999999", count=10**17),
            m["shards"][0].update(count=10**17),
            m["source"].update(num_train=10**17),
        ),
        "do not fit into",
    ),
    "a number of 5,000 digits": (lambda m: m["tasks"][0]["train"].update(ids="9" * 5000), "not a range of ids"),
    "NUL in a path": (lambda m: m["shards"][0].update(path="a\0b"), "not a usable path"),
    "half a character in a path": (lambda m: m["keys"].update(path="\ud800"), "not a usable path"),
    "a long path": (lambda m: m["keys"].update(path="a" * 5000), "not a usable path"),
    "an unknown format": (lambda m: m.update(formats=["zip"]), "format 'zip' is unknown"),
    "no formats": (lambda m: m.update(formats=[]), "is empty"),
    "a shard of another format": (lambda m: m["shards"][0].update(format="tar"), "not in the list of formats"),
    "no tasks": (lambda m: (m["tasks"].clear(), m["scenario"].update(num_tasks=0)), "lists no tasks"),
    "no shards": (lambda m: m["shards"].clear(), "lists no shards"),
    "an empty shard": (lambda m: m["shards"][0].update(count=0), "holds 0 samples"),
    "a negative size": (lambda m: m["keys"].update(bytes=-1), "has -1 bytes"),
    "a wrong checksum": (lambda m: m["keys"].update(sha256="x" * 64), "not a SHA-256"),
    "one file twice": (lambda m: m["shards"][1].update(path=m["shards"][0]["path"]), "twice"),
    "one file under two names": (lambda m: m["shards"][1].update(path="./" + m["shards"][0]["path"]), "twice"),
    "an unknown class": (lambda m: m["tasks"][0]["classes"].append(999), "names class 999"),
    "a class twice": (lambda m: m["tasks"][0]["classes"].append(m["tasks"][0]["classes"][0]), "names a class twice"),
    "an unknown domain": (lambda m: m["tasks"][0]["domains"].append(-1), "names domain -1"),
    "too few class names": (lambda m: m.update(classes=m["classes"][:9]), "names 9"),
    "no classes": (lambda m: m.update(classes=[]), "names no classes"),
    "a shard of the other split": (
        lambda m: m["tasks"][0]["train"].update(shards=m["tasks"][0]["val"]["shards"]),
        "not of the format array and the split train",
    ),
    "shards of no format": (lambda m: m["tasks"][0]["train"].update(shards={}), "shards of no format"),
    "samples that nobody has": (lambda m: m["source"].update(num_train=121), "145 samples|241 samples"),
    "an unknown scenario": (lambda m: m["scenario"].update(kind="magic"), "'magic' is unknown"),
    "truth for a number": (lambda m: m["source"].update(num_val=False), "not a valid value"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_manifests_are_named(edited: Any, what: str) -> None:
    change, says = HOSTILE[what]
    with pytest.raises(ManifestError, match=says):
        load_manifest(edited(change), check_sizes=False)


@pytest.mark.parametrize("verb", [["verify"], ["verify", "--quick"], ["inspect"], ["split", "--scenario", "joint"]])
@pytest.mark.parametrize("what", ["huge everything", "NUL in a path", "no shards", "an unknown class"])
def test_every_verb_says_so(edited: Any, verb: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = edited(HOSTILE[what][0])
    assert main([verb[0], str(folder), *verb[1:], *(["--name", "x"] if verb[0] == "split" else [])]) == 2
    assert "error:" in capsys.readouterr().err


def test_nesting_is_not_followed(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    for text in ("[" * 100_000, '{"schema": 1, "a": ' + "[" * 100_000):
        bad.write_text(text)
        with pytest.raises(ManifestError, match="not valid JSON"):
            load_manifest(bad)
    with bad.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ManifestError, match="not a manifest"):
        load_manifest(bad)


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["..", "/", "0-9"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_is_accepted_or_a_sentence(edited: Any, built: Path, data: st.DataObject) -> None:
    def change(content: Any) -> None:
        here = content
        while True:
            key = data.draw(st.sampled_from(sorted(here) if isinstance(here, dict) else list(range(len(here)))))
            if not isinstance(here[key], dict | list) or not here[key] or data.draw(st.booleans()):
                here[key] = data.draw(_JUNK)
                return
            here = here[key]

    with contextlib.suppress(ManifestError):
        manifest = load_manifest(edited(change))
        load_table(manifest, built)


def _with_table(folder: Path, change: Callable[[Any], Any]) -> list[str]:
    """Returns what verify finds when the table is changed and the manifest's checksum with it."""
    path, manifest = folder / "samples.npy", folder / "manifest.json"
    before, text = path.read_bytes(), manifest.read_text()
    table = np.load(path)
    changed = change(table)
    np.save(path, table if changed is None else changed)
    content = json.loads(text)
    content["samples"].update(bytes=path.stat().st_size, sha256=sha256_of(path))
    manifest.write_text(json.dumps(content))
    try:
        with pytest.raises(ManifestError):
            load_table(load_manifest(folder), folder)
        return list(verify_data(folder, num_workers=1).problems)
    finally:
        path.write_bytes(before)
        manifest.write_text(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t["label"].__setitem__(3, 30), "sample 3 has the label 30, but the manifest lists 30"),
        (lambda t: t["label"].__setitem__(3, -1), "sample 3 has the label -1"),
        (lambda t: t["domain"].__setitem__(3, 4), "sample 3 has the domain 4"),
        (lambda t: t["width"].__setitem__(3, 0), "sample 3 has the width 0, although it is stored"),
        (lambda t: t["id"].__setitem__(3, 2), "not in rising order"),
        (lambda t: t.reshape(-1, 2), "are not (120, 2) rows of its columns"),
        (lambda t: t[:-1], "has 239 rows, but the manifest says 240 samples"),
    ],
)
def test_a_table_out_of_range(built: Path, change: Any, says: str) -> None:
    assert any(says in problem for problem in _with_table(built, change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["tasks"][0]["classes"].reverse() or m["tasks"][0]["classes"].pop(), "which it does not name"),
        (lambda m: m["tasks"][0]["domains"].pop(), "which it does not name"),
    ],
)
def test_verify_compares_the_tasks_with_the_table(edited: Any, change: Any, says: str) -> None:
    assert any(says in problem for problem in verify_data(edited(change), quick=True).problems)


def test_verify_compares_the_manifests_with_each_other(built: Path) -> None:
    content = json.loads((built / "manifest.json").read_text())
    content["classes"][0] = "another"
    other = built / "other.json"
    other.write_text(json.dumps(content))
    try:
        assert any("describes other samples" in problem for problem in verify_data(built, quick=True).problems)
    finally:
        other.unlink()


def test_the_reader_knows_the_formats_and_scenarios() -> None:
    assert set(FORMATS) == set(formats())
    assert set(SCENARIOS) == set(get_args(Kind))


def test_names_are_printed_literally(edited: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def change(m: dict[str, Any]) -> None:
        m["tasks"][0]["name"] = "[/nothing] \x1b[2J"
        m["domains"][0] = "[/nothing]"

    assert main(["inspect", str(edited(change))]) == 0
    shown = capsys.readouterr().out
    assert "[/nothing]" in shown and "\x1b[2J" not in shown


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


def test_a_file_that_cannot_be_read(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> str:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr("dataprep.verify.sha256_of", fail)
    problems = verify_data(built, num_workers=1).problems
    assert len(problems) == len(load_manifest(built).files())
    assert all("cannot be read (Input/output error)" in problem for problem in problems)


def test_a_sheet_of_a_damaged_shard(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = built / load_manifest(built).shards[0].path
    content = shard.read_bytes()
    shard.write_bytes(bytes(len(content)))
    try:
        assert main(["inspect", str(built), "--sheet", str(tmp_path / "sheet.png")]) == 2
    finally:
        shard.write_bytes(content)
    assert "Run fastcssl-prep verify" in " ".join(capsys.readouterr().err.split())
