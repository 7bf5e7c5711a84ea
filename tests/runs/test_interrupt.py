"""Signals: a flag, the handlers of before put back, and a second Ctrl-C that does not wait."""

import signal
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from fastcssl.cli.exit_codes import ended, together
from fastcssl.distributed.world import RankLost, connected
from fastcssl.runs.interrupt import Stop


@pytest.fixture(autouse=True)
def harmless() -> Iterator[dict[int, int]]:
    """Counts signals that reach the handlers of before, which would otherwise end the test run."""
    caught: dict[int, int] = {}

    def count(number: int, _: object) -> None:
        caught[number] = caught.get(number, 0) + 1

    before = {number: signal.signal(number, count) for number in Stop.SIGNALS}
    yield caught
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_sets_the_flag_and_nothing_else(number: int, harmless: dict[int, int]) -> None:
    with Stop() as stop:
        assert stop.requested == 0
        signal.raise_signal(number)
        assert stop.requested == number
    assert harmless == {}
    signal.raise_signal(number)
    assert harmless == {number: 1}, "the handler of before is back"


def test_a_second_interrupt_does_not_wait(harmless: dict[int, int]) -> None:
    with pytest.raises(KeyboardInterrupt), Stop() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.requested == signal.SIGTERM
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert harmless == {signal.SIGINT: 1}


def test_a_warning_gives_way_to_the_real_thing() -> None:
    with Stop() as stop:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(number)
        assert stop.requested == signal.SIGTERM


def test_outside_of_the_main_thread_nothing_is_caught(harmless: dict[int, int]) -> None:
    entered, leave, seen = threading.Event(), threading.Event(), []

    def run() -> None:
        with Stop() as stop:
            entered.set()
            leave.wait(60)
            seen.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(60)
    signal.raise_signal(signal.SIGUSR1)
    leave.set()
    thread.join()
    assert seen == [0] and harmless == {signal.SIGUSR1: 1}


def test_inside_another_it_knows_what_that_one_was_asked(harmless: dict[int, int]) -> None:
    with Stop():
        with Stop() as first:
            pass
        signal.raise_signal(signal.SIGTERM)  # between two runs
        with Stop() as second:
            assert (first.requested, second.requested) == (0, signal.SIGTERM)
    assert harmless == {}


def test_last_words_come_before_the_signal(harmless: dict[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    """torchrun ends a rank as soon as another is dead, also one that is just leaving to say so."""

    def run(_: Console) -> int:
        with together(connected("cpu")):
            try:
                with Stop():
                    raise RankLost("Another rank was lost.")
            finally:
                signal.raise_signal(signal.SIGTERM)
        return 0

    assert ended(run) == 1
    assert capsys.readouterr().err == "error: Another rank was lost. Run the same command again to resume.\n"
    assert harmless == {}
