"""Views on a card: fused photometry against plain torch, the loader's buffers under a busy stream, DALI's decoder."""

from typing import Any

import pytest
import torch
from conftest import backend, prep_ok

from fastcssl import ops
from fastcssl.data.augment import NEUTRAL, ORDERS, Column, photometric_torch
from fastcssl.data.loader import Loader, LoaderConfig
from fastcssl.data.policies import policy
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.data.views import with_size

pytestmark = pytest.mark.gpu

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TOLERANCE = {torch.float32: 1.5e-3, torch.float16: 3e-3, torch.bfloat16: 1.2e-2}  # normalised units; largest value 2.7


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    out = tmp_path_factory.mktemp("views") / "out"
    prep_ok(*"build synthetic:size=mixed,train=4,val=1 --scenario class --tasks 2 --formats tar --out".split(), out)
    return Prepared.open(out)


def columns_of(count: int, generator: torch.Generator) -> torch.Tensor:
    """Every order of the jitter, with blur, grey and flips here and there. No solarize: it may fall on either side."""
    columns = torch.tensor(NEUTRAL).repeat(count, 1)
    columns[:, Column.ORDER] = torch.arange(count) % len(ORDERS)
    for column in (Column.BRIGHTNESS, Column.CONTRAST, Column.SATURATION):
        columns[:, column] = 0.6 + 0.8 * torch.rand(count, generator=generator)
    columns[:, Column.HUE] = 0.2 * torch.rand(count, generator=generator) - 0.1
    columns[::3, Column.SIGMA] = 0.1 + 1.9 * torch.rand(len(columns[::3]), generator=generator)
    columns[::5, Column.GRAY] = 1
    columns[::2, Column.FLIP] = 1
    return columns


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(48, 224, 224), (24, 37, 41), (1, 8, 8), (24, 32, 32)])
def test_fused_photometry_is_plain_torchs(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and shape[1] > 100:
        pytest.skip("too slow for a rehearsal")
    count, height, width = shape
    generator = torch.Generator().manual_seed(count)
    crops = torch.randint(0, 256, (count, height, width, 3), generator=generator, dtype=torch.uint8).to(device)
    columns = columns_of(count, generator).to(device)
    assert ops.missing(device) is None
    mine = ops.photometric(crops, columns, MEAN, STD, dtype)
    plain = photometric_torch(crops, columns, MEAN, STD, torch.float32)
    assert mine.dtype == dtype and mine.is_contiguous(memory_format=torch.channels_last)
    assert (mine.float() - plain).abs().max() < TOLERANCE[dtype]


def loader_on(device: str, data: Prepared, **changes: Any) -> Loader:
    views = with_size(policy("pnr-moco-imagenet"), 64)
    given: dict[str, Any] = {"batch_size": 8, "seed": 3, "num_threads": 2, "augment": "torch", **changes}
    return Loader(data, LoaderConfig(policy=views, device=device, **given))


def views_of(loader: Loader, epochs: int = 2, busy: bool = False) -> list[torch.Tensor]:
    found = []
    stream = loader.open(Selection(tasks=(0, 1)))
    for epoch in range(epochs):
        for batch in stream.epoch(epoch):
            if busy:  # the card still has to read these views when the host asks for the next ones
                torch.cuda._sleep(20_000_000)
            found += [view.clone() for view in batch.views]
    return [view.float().cpu() for view in found]


def test_buffers_live_as_long_as_the_card_reads_them(card: str, data: Prepared) -> None:
    """The loader copies on a stream of its own; a view that was overwritten too early would be another batch's."""
    with loader_on("cpu", data) as loader:
        expected = views_of(loader)
    with loader_on(card, data, prefetch=2) as loader:
        found = views_of(loader, busy=True)
    assert len(found) == len(expected)
    for number, (mine, its) in enumerate(zip(found, expected, strict=True)):
        assert (mine - its).abs().mean() < 2e-3, f"view {number}"


def test_a_loader_closed_in_the_middle(card: str, data: Prepared) -> None:
    with loader_on(card, data) as loader:
        stream = loader.open(Selection(tasks=(0,)))
        kept = next(iter(stream.epoch(0))).views[0]
        torch.cuda._sleep(50_000_000)
        copy = kept.clone()
    torch.cuda.synchronize()
    assert torch.isfinite(copy.float()).all()


def test_dalis_mixed_decoder(card: str, data: Prepared) -> None:
    """JPEGs decoded on the card: the same crops as the CPU's decoder gives, up to their rounding."""
    backend("nvidia.dali")
    with loader_on("cpu", data, loader="torchvision") as loader:
        expected = views_of(loader, epochs=1)
    for augment in ("torch", "dali"):
        with loader_on(card, data, loader="dali", augment=augment) as loader:
            found = views_of(loader, epochs=1)
        assert len(found) == len(expected)
        for number, (mine, its) in enumerate(zip(found, expected, strict=True)):
            # 0.02 of a normalised unit is about one grey level; solarize may turn single pixels over.
            assert (mine - its).abs().mean() < 0.05, f"{augment}, view {number}"
