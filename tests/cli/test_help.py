"""The --help of the commands: every flag is there, nothing internal is, and it fits a terminal of 80 columns."""

import dataclasses
from collections.abc import Callable

import pytest

from dataprep import cli as prep
from fastcssl import __version__
from fastcssl.cli import demo, doctor, report, train
from fastcssl.cli import eval as evaluate

Main = Callable[[list[str]], int]
PAGES = [
    (prep.main, ["build"], prep.Build),
    (prep.main, ["split"], prep.Resplit),
    (prep.main, ["verify"], prep.Verify),
    (prep.main, ["inspect"], prep.Inspect),
    (evaluate.main, [], evaluate.EvalOptions),
    (report.main, [], report.ReportOptions),
    (doctor.main, [], doctor.DoctorOptions),
]


@pytest.mark.parametrize(("main", "words", "options"), PAGES, ids=lambda it: getattr(it, "__module__", None))
def test_a_page_shows_every_flag(
    main: Main, words: list[str], options: type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: fastcssl-")
    assert max(map(len, text.splitlines())) <= 80
    for field in dataclasses.fields(options):
        if field.name not in ("source", "dir", "runs"):
            assert f"-{field.name.replace('_', '-')} " in text, field.name
    for word in ("None", "PATH", "STR", "INT", "FLOAT", "MISSING", "default:"):
        assert word not in text


def test_the_menu_of_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert prep.main(["-h"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{verb} " in text for verb in ("build", "split", "verify", "inspect"))


@pytest.mark.parametrize("main", [prep.main, evaluate.main, report.main, train.main], ids=lambda it: it.__module__)
def test_a_bare_command_shows_its_usage_and_a_version_is_one_line(
    main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 2 and capsys.readouterr().out.startswith("usage: fastcssl-")
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"fastcssl {__version__}\n"


def test_the_doctor_and_the_demo_have_versions(capsys: pytest.CaptureFixture[str]) -> None:
    for main in (doctor.main, demo.main):
        assert main(["--version"]) == 0 and capsys.readouterr().out == f"fastcssl {__version__}\n"
