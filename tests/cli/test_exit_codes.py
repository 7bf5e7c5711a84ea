"""Exit statuses are part of what scripts rely on: their numbers stay."""

import signal

import pytest
from rich.console import Console

from fastcssl.cli.exit_codes import Ended, ExitCode, after_signal, ended
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
