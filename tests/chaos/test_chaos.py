"""The quick tier of the chaos suite."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from chaos import campaign
from chaos.campaign import Found, discover
from chaos.experiment import Fault

_MAX_LISTED = 500  # quick faults come first


def _quick() -> Iterator[tuple[Found, Fault]]:
    for found in discover():
        for fault in islice(found.experiment.faults(0), _MAX_LISTED):
            if fault.is_quick:
                yield found, fault


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.parametrize(
    ("found", "fault"), [pytest.param(*one, id=f"{one[0].name}: {one[1].name}") for one in _quick()]
)
def test_holds(found: Found, fault: Fault, folder: Path) -> None:
    if found.missing is not None:
        pytest.skip(found.missing)
    found.experiment.prepare(folder / "references" / found.name)
    record = campaign.inject(found, fault, folder, "test")
    assert record.held, "; ".join(record.broken)
    if not record.injected and "random time" in fault.kind:
        pytest.skip("the command had ended before the signal was sent")
    assert record.injected, f"the moment of this fault never came: {record.seen}"
