"""The plain reference, which defines the results of the other back ends: Pillow decodes, crops and resizes."""

import time
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from dataprep import _codec
from dataprep.imagefile import open_image
from dataprep.writers import ShardReader, formats
from fastcssl.data.backends import (
    BackendConfig,
    Crops,
    LoaderError,
    LocalPlan,
    ShardError,
    format_of,
    sample_error,
    shard_error,
)
from fastcssl.data.prepared import Prepared
from fastcssl.data.views import ViewSpec
from fastcssl.errors import UserError

_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


class TorchvisionBackend:
    name: ClassVar[str] = "torchvision"
    formats: ClassVar[tuple[str, ...]] = ("tar", "array", "ffcv")

    def __init__(self, data: Prepared, config: BackendConfig) -> None:
        self._data, self._policy = data, config.policy
        self._pinned = config.device.type == "cuda"
        self._format = format_of(type(self), data)
        self._reader_of = formats()[self._format].reader
        self._readers: dict[int, ShardReader] = {}  # by number in the manifest
        self._seconds = {"decode": 0.0, "crop": 0.0}  # decoding includes reading

    def run(self, plan: LocalPlan, first: int) -> Iterator[Crops]:
        for number in range(first, len(plan)):
            batch = plan[number]
            shapes = [(len(batch.row_N), spec.size_px, spec.size_px, 3) for spec in self._policy]
            crops_V = [torch.zeros(shape, dtype=torch.uint8, pin_memory=self._pinned) for shape in shapes]
            faults: dict[int, str] = {}
            for place, row in enumerate(batch.row_N.tolist()):
                try:
                    for view, crop in enumerate(self.fetch(row, batch.box_VN4[:, place])):
                        crops_V[view][place] = crop
                except ShardError:
                    raise
                except LoaderError as error:
                    faults[place] = str(error)
            yield Crops(crops_V=crops_V, faults=faults)

    def fetch(self, row: int, box_V4: npt.NDArray[np.float32]) -> list[torch.Tensor]:
        began = time.perf_counter()
        image = self.image(row)
        between = time.perf_counter()
        crops = [crop_and_resize(image, spec, box) for spec, box in zip(self._policy, box_V4, strict=True)]
        self._seconds["decode"] += between - began
        self._seconds["crop"] += time.perf_counter() - between
        return crops

    def image(self, row: int) -> Image.Image:
        """Returns a sample as an RGB image. Raises LoaderError when it cannot be decoded."""
        sample = self._data.table[row]
        shard = int(sample[f"{self._format}_shard"])
        try:
            content = self._reader(shard).content(sample)
        except (OSError, ValueError, EOFError, UserError) as error:
            raise shard_error(self._data, shard, error) from None
        if not isinstance(content, bytes):
            return Image.fromarray(content)
        try:
            _codec.decode(content, 8)  # raises where data is missing; Pillow fills in grey
            image = open_image(content)
            image.load()
            if image.size != (int(sample["width"]), int(sample["height"])):
                raise OSError(f"it is {image.size[0]} x {image.size[1]} pixels, not as prepared")
            return image.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise sample_error(self._data, row, self._format, error) from None

    def _reader(self, shard: int) -> ShardReader:
        if shard not in self._readers:
            self._readers[shard] = self._reader_of(self._data.shard_path(shard))
        return self._readers[shard]

    def stage_seconds(self) -> dict[str, float]:
        return dict(self._seconds)

    def close(self) -> None:
        while self._readers:
            self._readers.popitem()[1].close()


def crop_and_resize(image: Image.Image, spec: ViewSpec, box_4: npt.NDArray[np.float32]) -> torch.Tensor:
    """Returns the crop as uint8. As in torchvision, a random crop is cut out first, so the filter stops at its edge."""
    left, top, right, bottom = (float(edge) for edge in box_4)
    if spec.crop != "center":
        image = image.crop((int(left), int(top), int(right), int(bottom)))
        left, top, right, bottom = 0.0, 0.0, float(image.width), float(image.height)
    size = (spec.size_px, spec.size_px)
    if spec.antialias:
        resized = image.resize(size, _FILTERS[spec.interpolation], box=(left, top, right, bottom))
        return torch.from_numpy(np.array(resized))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
    window = pixels[:, :, int(top) : int(bottom), int(left) : int(right)]
    smooth = torch.nn.functional.interpolate(window, size=size, mode=spec.interpolation, align_corners=False)
    return smooth[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8)


BACKEND = TorchvisionBackend
