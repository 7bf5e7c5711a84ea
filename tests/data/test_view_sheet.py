"""What the augmented views look like: drawn beside their sources, and against torchvision's by histogram."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import prep_ok, prep_refused
from PIL import Image, ImageFilter, ImageOps
from torchvision.transforms import v2

from fastcssl.data.loader import Loader, LoaderConfig
from fastcssl.data.policies import policy
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.data.views import ViewSpec, with_size


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sheet") / "out"
    args = ("build", "synthetic:size=64,train=16,val=2", "--scenario", "class", "--tasks", 3, "--formats", "tar,array")
    prep_ok(*args, "--out", out, "--quality", 95)
    return out


def test_inspect_draws_views(built: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "views.png"
    prep_ok("inspect", built, "--views", "pnr-moco-cifar", "--sheet", sheet)
    with Image.open(sheet) as image:
        assert image.width > 900 and image.height > 600
        assert np.asarray(image.convert("RGB")).std() > 40
    prep_refused("inspect", built, "--views", "pnr-moko-cifar", "--sheet", sheet, says=("pnr-moco-cifar",))
    prep_refused("inspect", built, "--views", "pnr-moco-cifar", says=("Add --sheet",))


def reference(spec: ViewSpec) -> v2.Compose:
    """The view as CaSSLe and solo-learn build it from torchvision and Pillow."""
    jitter = v2.ColorJitter(spec.brightness, spec.contrast, spec.saturation, spec.hue)

    def blurred(image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(float(torch.empty(1).uniform_(*spec.blur_sigma))))

    return v2.Compose(
        [
            v2.RandomResizedCrop(spec.size_px, scale=spec.scale, interpolation=v2.InterpolationMode.BICUBIC),
            v2.RandomApply([jitter], p=spec.jitter_p),
            v2.RandomGrayscale(spec.gray_p),
            v2.RandomApply([v2.Lambda(blurred)], p=spec.blur_p),
            v2.RandomApply([v2.Lambda(lambda image: ImageOps.solarize(image, 128))], p=spec.solarize_p),
            v2.RandomHorizontalFlip(spec.flip_p),
        ]
    )


def histogram(pixels: np.ndarray) -> np.ndarray:
    """32 levels of every channel, and of the difference between neighbours, which shows sharpness."""
    levels = [np.histogram(pixels[..., c], 32, (0, 256))[0] for c in range(3)]
    steps = np.abs(np.diff(pixels.astype(int), axis=2))
    levels += [np.histogram(steps[..., c], 32, (0, 128))[0] for c in range(3)]
    return np.stack([level / level.sum() for level in levels])


def test_views_have_torchvisions_histograms(built: Path) -> None:
    views = with_size(policy("pnr-moco-imagenet"), 48)
    data = Prepared.open(built)
    with Loader(data, LoaderConfig(policy=views, batch_size=96, loader="native", num_threads=2)) as loader:
        stream = loader.open(Selection(tasks=(0, 1, 2)))
        ours: list[list[np.ndarray]] = [[], []]
        for epoch in range(4):
            for batch in stream.epoch(epoch):
                for v, spec in enumerate(views):
                    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (spec.mean, spec.std))
                    levels = ((batch.views[v] * std + mean) * 255).round().clamp(0, 255)
                    ours[v].append(levels.permute(0, 2, 3, 1).numpy().astype(np.uint8))
    array = [np.load(built / s.path) for s in data.manifest.shards if (s.split, s.format) == ("train", "array")]
    images = [Image.fromarray(pixels) for pixels in np.concatenate(array)]
    torch.manual_seed(0)
    for v, spec in enumerate(views):
        transform = reference(spec)
        theirs = np.stack([np.asarray(transform(image)) for _ in range(4) for image in images])
        distance = np.abs(histogram(np.concatenate(ours[v])) - histogram(theirs)).sum(1)
        other = np.stack([np.asarray(transform(image)) for _ in range(4) for image in images])
        noise = np.abs(histogram(other) - histogram(theirs)).sum(1)  # torchvision against itself
        assert (distance < noise + 0.08).all(), (v, distance, noise)
