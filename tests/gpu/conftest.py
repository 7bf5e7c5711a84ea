"""Every test here is skipped, with the reason, where there is no card or where `-m gpu` does not ask for it.

FASTCSSL_GPU_TESTS_ON=cpu rehearses, on a CPU, those whose `device` is the only thing about them that needs a card.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

REHEARSAL = os.environ.get("FASTCSSL_GPU_TESTS_ON") == "cpu"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = None
    if "gpu" not in (config.option.markexpr or ""):
        reason = "run by fastcssl-doctor --full, or with -m gpu"
    elif not torch.cuda.is_available() and not REHEARSAL:
        reason = "needs a CUDA device"
    for item in items:
        if HERE in item.path.parents:
            assert item.get_closest_marker("gpu"), f"{item.nodeid} wants pytestmark = pytest.mark.gpu"
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> str:
    return "cpu" if REHEARSAL else "cuda"


@pytest.fixture
def card() -> str:
    """For what a CPU cannot rehearse."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda"


@pytest.fixture(params=["highest", "high"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """How float32 is multiplied on tensor cores: with all digits, or rounded to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)
