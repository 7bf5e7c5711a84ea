"""docs/own_data.md is a walk: its commands alone take images with domains through prep, train, eval and report."""

import json

import pytest
from documented_commands import Shell, quick
from documented_commands import shell as shell  # a fixture, and not that of the other documents
from documents import ROOT, commands
from standins import VARIABLES

from dataprep import load_manifest


def test_the_commands_of_the_page_make_a_report(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shell.standins.cwd)
    quick(monkeypatch)
    for command in commands((ROOT / "docs" / "own_data.md").read_text(encoding="utf-8"), VARIABLES):
        shell.run(command)
    data, cwd = shell.standins.root / "data", shell.standins.cwd
    assert [task.name for task in load_manifest(data / "pacs").tasks] == ["photo", "art", "cartoon", "sketch"]
    first = [task.name for task in load_manifest(data / "pacs" / "sketch-first.json").tasks]
    assert first == ["sketch", "art, cartoon, photo"]
    assert [len(task.classes) for task in load_manifest(data / "prepared" / "listed.json").tasks] == [2, 1, 1]
    assert (cwd / "runs/own-prepared-moco-pnr-seed5/encoders/task1.safetensors").is_file()
    for run in ("finetune", "pnr"):
        saved = json.loads((cwd / "runs" / run / "config.json").read_text())
        assert saved["task_names"] == ["photo", "art", "cartoon", "sketch"]
        assert list((cwd / "runs" / run / "evaluations").glob("*.json"))
    page = (cwd / "report/index.html").read_text()
    assert "own-small on pacs" in page and "MoCo + PNR" in page and "MoCo + fine-tune" in page
