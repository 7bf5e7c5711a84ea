"""Whether a child that misbehaves is noticed."""

import os
from pathlib import Path

import pytest

from chaos.nursery import Errand, nursery


def crash() -> None:
    os.abort()


def fail() -> None:
    raise ValueError("this is meant to fail")


def grow() -> int:
    return len(bytearray(300 << 20).replace(b"\0", b"\1"))


def spin() -> None:
    while True:
        pass


def answer(number: int) -> int:
    return number + 1


def test_an_answer_arrives(tmp_path: Path) -> None:
    ended = nursery().run(Errand("chaos.test_nursery:answer", {"number": 1}), tmp_path / "printed.txt")
    assert ended.value == 2
    assert ended.broken(cpu_seconds=60, more_bytes=100 << 20) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("crash", "signal 6"),
        ("fail", "ValueError: this is meant to fail"),
        ("grow", "MiB more memory"),
        ("spin", "not end in time"),
    ],
)
def test_a_child_that_misbehaves_is_noticed(name: str, says: str, tmp_path: Path) -> None:
    ended = nursery().run(Errand(f"chaos.test_nursery:{name}", {}, cpu_seconds=2), tmp_path / "printed.txt")
    assert says in "; ".join(ended.broken(cpu_seconds=60, more_bytes=100 << 20))
