"""The embedded data set: drawn alike everywhere, factorial, and learnable without being trivial."""

from __future__ import annotations

import colorsys
import hashlib
import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dataprep import synthetic

NUM_CLASSES = 30
IMAGES_PER_CLASS = 120
TEST_IMAGES_PER_CLASS = 40
EPOCHS = 10


def image(
    *,
    label: int = 7,
    num_classes: int = NUM_CLASSES,
    style: int = 0,
    size_px: int | tuple[int, int] = 32,
    seed: int = 0,
    index: int = 0,
    forms: bool = False,
) -> npt.NDArray[np.uint8]:
    return synthetic.draw(
        label=label, num_classes=num_classes, style=style, size_px=size_px, seed=seed, index=index, forms=forms
    )


@pytest.mark.parametrize("style", range(len(synthetic.STYLES)))
def test_same_arguments_same_bytes(style: int) -> None:
    first_HW3 = image(style=style, index=3)
    image(style=style, index=4)
    assert first_HW3.tobytes() == image(style=style, index=3).tobytes()


def test_the_factorial_set_keeps_its_bytes() -> None:
    digest = hashlib.sha256()
    for style, num_classes, label in itertools.product(range(4), synthetic.FACTORS, (0, 5, 19)):
        digest.update(image(label=label, num_classes=num_classes, style=style, seed=3, index=label).tobytes())
    assert digest.hexdigest() == "c5dd8909fdcaa9ef3bdabf1e85204f52224969982699526a1b7816ea8c0badec"


def test_forms_have_shape_and_texture_but_any_colour() -> None:
    for num_classes, num_textures in synthetic.FORMS.items():
        names = synthetic.class_names(num_classes, forms=True)
        assert names == sorted(set(names)) and len(names) == num_classes == 5 * num_textures
        assert all(len(name.split("-")) == 2 for name in names)
    solid = synthetic.class_names(20, forms=True).index("square-solid")
    hues = [
        colorsys.rgb_to_hsv(*(image(label=solid, num_classes=20, style=2, index=k, forms=True)[16, 16] / 255))[0]
        for k in range(60)
    ]
    assert np.histogram(hues, 6, (0, 1))[0].min() > 0
    with pytest.raises(ValueError, match=r"num_classes is 30; choose one of \[10, 15, 20, 25\]"):
        synthetic.class_names(30, forms=True)


@pytest.mark.parametrize(("style", "is_grey"), [("photo", False), ("sketch", True), ("poster", False), ("neon", False)])
def test_of_the_forms_only_sketches_are_grey(style: str, is_grey: bool) -> None:
    drawn_HW3 = image(num_classes=20, style=synthetic.STYLES.index(style), forms=True)
    assert (np.ptp(drawn_HW3, axis=2).max() == 0) == is_grey
    assert np.ptp(drawn_HW3) > 100  # and not empty
    assert np.ptp(image(style=synthetic.STYLES.index(style)), axis=2).max() > 0  # the other set keeps its colours


@pytest.mark.parametrize("change", [{"index": 1}, {"seed": 1}, {"style": 1}, {"label": 8}])
def test_any_other_argument_another_image(change: dict[str, int]) -> None:
    difference_HW3 = np.abs(image().astype(int) - image(**change).astype(int))
    assert difference_HW3.mean() > 10


@pytest.mark.parametrize("size_px", [32, 64, 256, (32, 48), (256, 96)])
@pytest.mark.parametrize("style", range(len(synthetic.STYLES)))
def test_form(style: int, size_px: int | tuple[int, int]) -> None:
    drawn_HW3 = image(style=style, size_px=size_px)
    height, width = size_px if isinstance(size_px, tuple) else (size_px, size_px)
    assert drawn_HW3.shape == (height, width, 3)
    assert drawn_HW3.dtype == np.uint8
    assert drawn_HW3.std() > 10


@pytest.mark.parametrize("size_px", [32, 64, 128])
@pytest.mark.parametrize("style", range(len(synthetic.STYLES)))
def test_size_chooses_only_the_resolution(style: int, size_px: int) -> None:
    factor = 256 // size_px
    for index in range(5):
        large_HW3 = image(style=style, label=index, size_px=256, index=index).astype(float)
        small_HW3 = image(style=style, label=index, size_px=size_px, index=index).astype(float)
        box_HW3 = large_HW3.reshape(size_px, factor, size_px, factor, 3).mean((1, 3))
        assert np.abs(box_HW3 - small_HW3).mean() < 6
        other_HW3 = image(style=style, label=index, size_px=size_px, index=index + 1).astype(float)
        assert np.abs(box_HW3 - small_HW3).mean() < 0.3 * np.abs(box_HW3 - other_HW3).mean()


@pytest.mark.parametrize(
    ("num_classes", "factors"), [(20, (5, 2, 2)), (30, (5, 3, 2)), (60, (5, 4, 3)), (100, (5, 5, 4))]
)
def test_classes_are_a_sorted_full_factorial(num_classes: int, factors: tuple[int, int, int]) -> None:
    names = synthetic.class_names(num_classes)
    assert len(names) == len(set(names)) == num_classes
    assert names == sorted(names)
    triples = [tuple(name.split("-")) for name in names]
    assert tuple(len({triple[k] for triple in triples}) for k in range(3)) == factors
    for hidden in range(3):
        seen = [triple[:hidden] + triple[hidden + 1 :] for triple in triples]
        assert all(seen.count(pair) == factors[hidden] > 1 for pair in seen)


def test_label_is_the_index_of_the_name() -> None:
    attributes = synthetic.class_attributes(NUM_CLASSES)
    assert [a.name for a in attributes] == synthetic.class_names(NUM_CLASSES)
    reds = [k for k, a in enumerate(attributes) if a.colour == "red"]
    blues = [k for k, a in enumerate(attributes) if a.colour == "blue"]
    neon = synthetic.STYLES.index("neon")

    def warmth(labels: list[int]) -> float:
        images_NHW3 = np.stack([image(label=label, style=neon) for label in labels]).astype(float)
        return float((images_NHW3[..., 0] - images_NHW3[..., 2]).mean())

    assert warmth(reds) > 20 > -20 > warmth(blues)


def test_styles_differ_visibly() -> None:
    brightness, flatness = {}, {}
    for style, name in enumerate(synthetic.STYLES):
        images_NHW3 = np.stack([image(label=k, style=style, size_px=64, index=k) for k in range(NUM_CLASSES)])
        brightness[name] = images_NHW3.mean((1, 2, 3))
        flatness[name] = (images_NHW3[:, :, 1:] == images_NHW3[:, :, :-1]).all(-1).mean((1, 2))
    assert len(synthetic.STYLES) >= 4
    assert brightness["neon"].max() < brightness["sketch"].min()
    assert np.median(brightness["neon"]) < 0.8 * np.median(brightness["photo"])
    assert np.median(brightness["photo"]) < 0.8 * np.median(brightness["sketch"])
    assert max(flatness["photo"].max(), flatness["neon"].max()) < flatness["poster"].min()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_classes": 31}, r"num_classes is 31; choose one of \[20, 30, 60, 100\]"),
        ({"label": 30}, r"label is 30; .* use 0\.\.29"),
        ({"label": -1}, r"label is -1"),
        ({"style": 4}, r"style is 4; use 0\.\.3"),
        ({"size_px": 31}, r"size_px is 31; use 32\.\.256"),
        ({"size_px": 257}, r"size_px is 257"),
        ({"seed": -1}, r"seed is -1 .* use 0 or more"),
        ({"index": -1}, r"index is -1"),
    ],
)
def test_refusals_name_the_value_and_the_remedy(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        image(**change)


def test_refuses_one_bad_side() -> None:
    with pytest.raises(ValueError, match=r"size_px is \(64, 512\)"):
        image(size_px=(64, 512))


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.skip = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return functional.relu(self.main(x_NCHW) + self.skip(x_NCHW))


def small_resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, 2, 1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        Block(24, 24, 1),
        Block(24, 48, 2),
        Block(48, 96, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, NUM_CLASSES),
    )


def linear_softmax() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, NUM_CLASSES))


def drawn_set(images_per_class: int, first_index: int) -> tuple[Tensor, Tensor]:
    labels = [label for label in range(NUM_CLASSES) for _ in range(images_per_class)]
    images_NHW3 = np.stack(
        [
            image(label=label, style=k % len(synthetic.STYLES), index=first_index + k)
            for label in range(NUM_CLASSES)
            for k in range(images_per_class)
        ]
    )
    x_N3HW = torch.from_numpy(images_NHW3).permute(0, 3, 1, 2).float() / 255
    return ((x_N3HW - 0.45) / 0.27).contiguous(memory_format=torch.channels_last), torch.tensor(labels)


def train(model: nn.Module, x_N3HW: Tensor, y_N: Tensor, *, rate: float, decay: float, turn: bool) -> None:
    batch, batches = 64, len(y_N) // 64
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=decay, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=EPOCHS * batches, pct_start=0.25)
    model.train()
    for _ in range(EPOCHS):
        for chosen_B in torch.randperm(len(y_N))[: batches * batch].view(batches, batch):
            x_B3HW = x_N3HW[chosen_B]
            if turn:
                # Rotation is a nuisance of the data set, so quarter turns and mirror images keep the class.
                quarters, mirror = torch.randint(4, (2,)).tolist()
                x_B3HW = torch.rot90(x_B3HW.flip(3) if mirror % 2 else x_B3HW, quarters, (2, 3))
            loss = functional.cross_entropy(model(x_B3HW), y_N[chosen_B])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, x_N3HW: Tensor, y_N: Tensor) -> float:
    model.eval()
    return float((model(x_N3HW).argmax(1) == y_N).float().mean())


@pytest.mark.usefixtures("one_thread")
def test_a_small_resnet_learns_what_raw_pixels_do_not_give_away() -> None:
    x_N3HW, y_N = drawn_set(IMAGES_PER_CLASS, first_index=0)
    test_x_N3HW, test_y_N = drawn_set(TEST_IMAGES_PER_CLASS, first_index=1_000_000)

    linear_accuracy = 0.0
    for turn in (False, True):
        torch.manual_seed(0)
        linear = linear_softmax()
        train(linear, x_N3HW, y_N, rate=0.01, decay=1e-3, turn=turn)
        linear_accuracy = max(linear_accuracy, accuracy(linear, test_x_N3HW, test_y_N))

    torch.manual_seed(0)
    resnet = small_resnet().to(memory_format=torch.channels_last)
    train(resnet, x_N3HW, y_N, rate=0.1, decay=5e-4, turn=True)
    resnet_accuracy = accuracy(resnet, test_x_N3HW, test_y_N)

    assert linear_accuracy < 0.5 * resnet_accuracy, (linear_accuracy, resnet_accuracy)
    assert resnet_accuracy > 0.6, (linear_accuracy, resnet_accuracy)
