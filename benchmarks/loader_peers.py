"""Runs the peers that loader.py measures, each in its best documented settings.

They are built from the same ViewSpecs as ours and draw their own random numbers:

PIL      a Dataset over single JPEGs: Pillow decodes once, then torchvision's transforms run on PIL images, as in CaSSLe
         and solo-learn; DataLoader(num_workers=threads), prefetch_factor 2.
tensors  the same with torchvision.transforms.v2 on uint8 tensors.
DALI     readers.file, one decoders.image, then for each view random_resized_crop, color_twist, grey, gaussian_blur
         (window 23), solarize, crop_mirror_normalize; with conditionals, so that only chosen samples are processed; no
         GPU.
FFCV     one RandomResizedCropRGBImageDecoder per view over one .beton, os_cache, batches_ahead 3. Only the geometry,
         because FFCV has no hue, grey or blur.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from loader_process import Feed, Job, die_with_parent, files_of, table_rows

from fastcssl.data.views import Policy, ViewSpec

# ---- torchvision -----------------------------------------------------------------------------------------------------


class Pictures:
    """A data set in torchvision's style: opens a PIL image from a file or an array in memory, and returns all views."""

    def __init__(self, items: Any, views: list[Callable[[Any], Any]]) -> None:
        self.items, self.views = items, views

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> list[Any]:
        from PIL import Image

        item = self.items[index]
        if isinstance(item, np.ndarray):
            image = Image.fromarray(item)
        else:
            with open(item, "rb") as file:  # like torchvision's pil_loader
                image = Image.open(file).convert("RGB")
        return [view(image) for view in self.views]


class Reshuffled:
    """Yields one permutation after another, so that there are no gaps between the epochs of a small set."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        import torch

        while True:
            yield from torch.randperm(self.count).tolist()


@functools.cache
def _array(path: Path) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = np.load(path)
    return array


def _items(job: Job, task: int | None) -> Any:
    if job.jpegs is not None:
        return files_of(job, task)
    data, rows = table_rows(job, task)
    paths = [data.folder / shard.path for shard in data.manifest.shards]
    return [_array(paths[shard])[place] for shard, place in zip(rows["array_shard"], rows["array_place"], strict=True)]


class Pil(Feed):
    modules = ("torchvision.transforms.v2", "torch.utils.data", "PIL.Image")

    def stream(self, task: int | None) -> Iterator[Any]:
        import torch
        from torch.utils.data import DataLoader

        torch.set_num_threads(1)  # like in the workers
        pictures: Any = Pictures(_items(self.job, task), [self.transform(view) for view in self.job.views()])
        loader: Any = DataLoader(
            pictures,
            batch_size=self.job.batch_size,
            sampler=Reshuffled(len(pictures)),
            num_workers=self.job.num_threads,
            worker_init_fn=die_with_parent,
            drop_last=True,
        )
        yield from loader

    def transform(self, spec: ViewSpec) -> Callable[[Any], Any]:
        from PIL import ImageFilter, ImageOps
        from torchvision import transforms as T

        def blur(image: Any) -> Any:
            return image.filter(ImageFilter.GaussianBlur(radius=np.random.uniform(*spec.blur_sigma)))

        def solarize(image: Any) -> Any:
            return ImageOps.solarize(image, int(spec.solarize_threshold))

        filter = T.InterpolationMode.BILINEAR if self.job.bilinear else T.InterpolationMode.BICUBIC
        steps = [T.RandomResizedCrop(spec.size_px, scale=spec.scale, ratio=spec.ratio, interpolation=filter)]
        if not self.job.photometry:
            return T.Compose([*steps, T.PILToTensor()])
        jitter = T.ColorJitter(spec.brightness, spec.contrast, spec.saturation, spec.hue)
        steps += [T.RandomApply([jitter], spec.jitter_p), T.RandomGrayscale(spec.gray_p)]
        steps += [T.RandomApply([blur], spec.blur_p)] if spec.blur_p else []
        steps += [T.RandomApply([solarize], spec.solarize_p)] if spec.solarize_p else []
        return T.Compose([*steps, T.RandomHorizontalFlip(spec.flip_p), T.ToTensor(), T.Normalize(spec.mean, spec.std)])


class Tensors(Pil):
    def transform(self, spec: ViewSpec) -> Callable[[Any], Any]:
        import torch
        from torchvision.transforms import v2

        filter = v2.InterpolationMode.BILINEAR if self.job.bilinear else v2.InterpolationMode.BICUBIC
        crop = v2.RandomResizedCrop(spec.size_px, spec.scale, spec.ratio, interpolation=filter, antialias=True)
        steps: list[Any] = [v2.ToImage(), crop]
        if not self.job.photometry:
            return v2.Compose([*steps, v2.ToPureTensor()])
        jitter = v2.ColorJitter(spec.brightness, spec.contrast, spec.saturation, spec.hue)
        steps += [v2.RandomApply([jitter], spec.jitter_p), v2.RandomGrayscale(spec.gray_p)]
        steps += [v2.RandomApply([v2.GaussianBlur(23, spec.blur_sigma)], spec.blur_p)] if spec.blur_p else []
        steps += [v2.RandomSolarize(spec.solarize_threshold, spec.solarize_p)] if spec.solarize_p else []
        steps += [v2.RandomHorizontalFlip(spec.flip_p), v2.ToDtype(torch.float32, scale=True)]
        return v2.Compose([*steps, v2.Normalize(spec.mean, spec.std), v2.ToPureTensor()])


# ---- DALI and FFCV ---------------------------------------------------------------------------------------------------


class Dali(Feed):
    ahead = 3
    modules = ("nvidia.dali.plugin.pytorch",)

    def stream(self, task: int | None) -> Iterator[Any]:
        from nvidia.dali import pipeline_def
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        make = pipeline_def(_dali_graph, enable_conditionals=True)
        pipeline = make(
            files_of(self.job, task),
            self.job.views(),
            self.job.photometry,
            batch_size=self.job.batch_size,
            num_threads=self.job.num_threads,
            device_id=None,
            seed=12,
        )
        yield from DALIGenericIterator([pipeline], [f"view{v}" for v in range(len(self.job.views()))], size=-1)


def _dali_graph(files: list[str], views: Policy, photometry: bool) -> Any:
    from nvidia.dali import fn, types

    jpegs, _ = fn.readers.file(files=files, random_shuffle=True, shuffle_after_epoch=False, name="reader")
    image = fn.decoders.image(jpegs, device="cpu", output_type=types.RGB)
    outputs = []
    for spec in views:
        view = fn.random_resized_crop(
            image,
            size=[spec.size_px] * 2,
            random_area=list(spec.scale),
            random_aspect_ratio=list(spec.ratio),
            interp_type=types.INTERP_LINEAR if spec.interpolation == "bilinear" else types.INTERP_CUBIC,
            antialias=True,
        )
        outputs.append(_dali_photometry(view, spec) if photometry else view)
    return tuple(outputs)


def _dali_photometry(view: Any, spec: ViewSpec) -> Any:
    from nvidia.dali import fn, types

    def drawn(low: float, high: float) -> Any:
        return fn.random.uniform(range=[low, high])

    if fn.random.coin_flip(probability=spec.jitter_p, dtype=types.BOOL):
        view = fn.color_twist(
            view,
            brightness=drawn(1 - spec.brightness, 1 + spec.brightness),
            contrast=drawn(1 - spec.contrast, 1 + spec.contrast),
            saturation=drawn(1 - spec.saturation, 1 + spec.saturation),
            hue=drawn(-360 * spec.hue, 360 * spec.hue),
        )
    if fn.random.coin_flip(probability=spec.gray_p, dtype=types.BOOL):
        grey = fn.color_space_conversion(view, image_type=types.RGB, output_type=types.GRAY)
        view = fn.color_space_conversion(grey, image_type=types.GRAY, output_type=types.RGB)
    if spec.blur_p >= 1:  # without a condition, which would split and merge the batch even if it always holds
        view = fn.gaussian_blur(view, sigma=drawn(*spec.blur_sigma), window_size=23)
    elif spec.blur_p > 0:
        if fn.random.coin_flip(probability=spec.blur_p, dtype=types.BOOL):
            view = fn.gaussian_blur(view, sigma=drawn(*spec.blur_sigma), window_size=23)
    if spec.solarize_p > 0:
        if fn.random.coin_flip(probability=spec.solarize_p, dtype=types.BOOL):
            bright = view >= types.Constant(int(spec.solarize_threshold), dtype=types.UINT8)
            inverted = types.Constant(255, dtype=types.UINT8) - view
            view = bright * inverted + (bright ^ True) * view
    return fn.crop_mirror_normalize(
        view,
        mirror=fn.random.coin_flip(probability=spec.flip_p),
        mean=[255 * x for x in spec.mean],
        std=[255 * x for x in spec.std],
        dtype=types.FLOAT,
        output_layout="CHW",
    )


class Ffcv(Feed):
    ahead = 5  # batches_ahead, and batches that wait for a place in the queue
    modules = ("ffcv.loader", "ffcv.transforms")

    def stream(self, task: int | None) -> Iterator[Any]:
        from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.pipeline import PipelineSpec
        from ffcv.transforms import ToTensor

        data, rows = table_rows(self.job, task)
        names = [f"view{v}" for v in range(len(self.job.views()))]
        pipelines: dict[str, Any] = dict.fromkeys(("image", "label", "id", "domain"))
        for name, spec in zip(names, self.job.views(), strict=True):
            decoder = RandomResizedCropRGBImageDecoder((spec.size_px,) * 2, scale=spec.scale, ratio=spec.ratio)
            pipelines[name] = PipelineSpec("image", decoder=decoder, transforms=[ToTensor()])
        loader = Loader(
            str(data.folder / data.manifest.shards[int(rows["ffcv_shard"][0])].path),
            batch_size=self.job.batch_size,
            num_workers=self.job.num_threads,
            os_cache=True,
            order=OrderOption.RANDOM,
            # Repeats each sample many times, so that there are no gaps between the epochs of a small set.
            indices=np.tile(rows["ffcv_place"], max(1, 200_000 // len(rows))),
            pipelines=pipelines,
        )
        iterator = iter(loader)
        try:
            yield from iterator
        finally:
            iterator.close()
