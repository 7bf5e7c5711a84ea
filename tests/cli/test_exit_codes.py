"""Exit statuses are part of what scripts rely on: their numbers stay."""

import signal

import pytest
from rich.console import Console

from fastcssl.cli.exit_codes import Ended, ExitCode, after_signal, ended, explained
from fastcssl.distributed.world import RankLost
from fastcssl.errors import UserError


def test_the_numbers_stay() -> None:
    assert {code.name: int(code) for code in ExitCode} == {"OK": 0, "FAILED": 1, "MISTAKE": 2, "INTERRUPTED": 130}
    assert [after_signal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == [130, 143, 138]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UserError("Give a run."), 2),
        (Ended("A rank is lost.", ExitCode.FAILED), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_how_a_command_ends(error: BaseException, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    def run(_: Console) -> int:
        raise error

    assert ended(run) == status
    assert str(error) in capsys.readouterr().err


def test_any_rank_says_that_another_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lost one may be rank 0."""
    monkeypatch.setenv("RANK", "1")

    def run(_: Console) -> int:
        with explained():
            raise RankLost("Another rank was lost.")

    assert ended(run) == 1
    said = "error: rank 1: Another rank was lost. Run the same command again to resume.\n"
    assert capsys.readouterr().err == said
