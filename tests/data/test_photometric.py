"""The photometric operator: its definition against torchvision, and every compiled path against its definition."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from fastcssl import ops
from fastcssl.data import augment
from fastcssl.data.augment import NEUTRAL, ORDERS, Column, photometric

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
SIZES = [(1, 1), (3, 5), (7, 224), (32, 32), (224, 224), (96, 40), (1, 50), (61, 2), (33, 67)]
TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Grey levels out of 255 by which the compiled operator may miss its definition, on any image we try; dropped taps, and
# the blur's 1/128 steps and 16-bit weights, could add up to 0.06 on one drawn for the purpose.
BOUND = 0.02


def isas() -> list[str]:
    best = ["avx512", "avx2", "portable"].index(ops.photometric_isa("auto"))
    return ["avx512", "avx2", "portable"][best:]


@pytest.fixture(params=["avx512", "avx2", "portable"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in isas():
        pytest.skip(f"this processor has no {request.param}")
    ops.photometric_isa(request.param)
    yield request.param
    ops.photometric_isa("auto")


def crops(num: int, height: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num, height, width, 3), generator=generator, dtype=torch.uint8)


def columns(num: int, **values: float) -> Tensor:
    out = torch.tensor(NEUTRAL).repeat(num, 1)
    for name, value in values.items():
        out[:, Column[name.upper()]] = value
    return out


def random_columns(num: int, seed: int = 0) -> Tensor:
    """Every order in turn; each operation is left out now and then."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(num, generator=generator)

    wide = {Column.BRIGHTNESS: (0.0, 2.0), Column.CONTRAST: (0.0, 2.0), Column.SATURATION: (0.0, 2.0)}
    ranges = {**wide, Column.HUE: (-0.5, 0.5), Column.SIGMA: (0.1, 2.0), Column.SOLARIZE: (0.0, 255.0)}
    out = columns(num)
    for column, (low, high) in ranges.items():
        out[:, column] = torch.where(uniform(0, 1) < 0.8, uniform(low, high), NEUTRAL[column])
    out[:, Column.FLIP] = (uniform(0, 1) < 0.5).float()
    out[:, Column.GRAY] = (uniform(0, 1) < 0.3).float()
    out[:, Column.ORDER] = torch.arange(num) % 24
    return out


def levels(normalised: Tensor, std: tuple[float, ...] = STD, mean: tuple[float, ...] = MEAN) -> Tensor:
    return (normalised.double() * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)) * 255


def assert_close(fused: Tensor, defined: Tensor, threshold_N: Tensor) -> None:
    """Within BOUND, or on the other side of a solarize threshold that the value is that close to."""
    assert fused.shape == defined.shape and fused.stride() == defined.stride()
    a, b, threshold = levels(fused), levels(defined), threshold_N.view(-1, 1, 1, 1)
    near = torch.minimum((b - threshold).abs(), (255 - b - threshold).abs()) <= BOUND
    wrong = ((a - b).abs() > BOUND) & ~(near & ((a - (255 - b)).abs() <= BOUND))
    assert not wrong.any(), f"{int(wrong.sum())} values are off by up to {(a - b).abs()[wrong].max():.4f} levels"


# The definition against torchvision. Its uint8 operations cut fractions off after each step and, for contrast and
# saturation, off the grey too; on floats they do not.

SINGLE: dict[str, tuple[dict[str, float], Callable[[Tensor], Tensor]]] = {
    "brightness up": ({"brightness": 1.7}, lambda x: tv.adjust_brightness(x, 1.7)),
    "brightness down": ({"brightness": 0.35}, lambda x: tv.adjust_brightness(x, 0.35)),
    "contrast up": ({"contrast": 1.8}, lambda x: tv.adjust_contrast(x, 1.8)),
    "contrast down": ({"contrast": 0.2}, lambda x: tv.adjust_contrast(x, 0.2)),
    "saturation up": ({"saturation": 1.8}, lambda x: tv.adjust_saturation(x, 1.8)),
    "saturation down": ({"saturation": 0.2}, lambda x: tv.adjust_saturation(x, 0.2)),
    "hue up": ({"hue": 0.37}, lambda x: tv.adjust_hue(x, 0.37)),
    "hue down": ({"hue": -0.1}, lambda x: tv.adjust_hue(x, -0.1)),
    "hue half": ({"hue": 0.5}, lambda x: tv.adjust_hue(x, 0.5)),
    "gray": ({"gray": 1}, lambda x: tv.rgb_to_grayscale(x, 3)),
    "solarize": ({"solarize": 128}, lambda x: tv.solarize(x, 128 if x.dtype == torch.uint8 else 128 / 255)),
    "flip": ({"flip": 1}, tv.horizontal_flip),
    "blur narrow": ({"sigma": 0.1}, lambda x: tv.gaussian_blur(x, [23, 23], [0.1, 0.1])),
    "blur": ({"sigma": 0.9}, lambda x: tv.gaussian_blur(x, [23, 23], [0.9, 0.9])),
    "blur wide": ({"sigma": 2.0}, lambda x: tv.gaussian_blur(x, [23, 23], [2.0, 2.0])),
}


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("impl", ["torch", "fused"])
def test_each_operation_is_torchvisions(name: str, impl: augment.Photometry) -> None:
    values, reference = SINGLE[name]
    pixels = crops(2, 40, 37)
    pixels[1, :, :, 0] = torch.arange(37) * 6  # some order among the noise, and greys
    pixels[1, :9] = pixels[1, :9, :, :1]
    images = pixels.permute(0, 3, 1, 2)
    ours = photometric(pixels, columns(2, **values), impl=impl, **PLAIN) * 255
    exact = torch.stack([reference(image) for image in images.float() / 255]) * 255
    assert (ours - exact).abs().max() <= (BOUND if impl == "fused" else 0.001)
    stored = torch.stack([reference(image) for image in images])
    cut = (ours.round() if "blur" in name else (ours + 0.001).floor()).clamp(0, 255)
    assert (cut - stored).abs().max() <= 1


def test_normalisation_is_torchvisions() -> None:
    pixels = crops(3, 20, 24)
    expected = tv.normalize(pixels.permute(0, 3, 1, 2).float() / 255, list(MEAN), list(STD))
    for impl in ("torch", "fused"):
        out = photometric(pixels, columns(3), mean=MEAN, std=STD, impl=impl)
        assert out.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)


def test_a_sequence_of_operations_is_torchvisions() -> None:
    """In every order, on floats, where torchvision rounds nothing between."""
    pixels = crops(24, 12, 13)
    values = {"brightness": 1.3, "contrast": 0.6, "saturation": 1.5, "hue": 0.2}
    steps = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
    table = columns(24, **values)
    table[:, Column.ORDER] = torch.arange(24)
    ours = photometric(pixels, table, impl="torch", **PLAIN) * 255
    for number, order in enumerate(itertools.permutations(range(4))):
        assert order == ORDERS[number]
        image = pixels[number].permute(2, 0, 1) / 255
        for step in order:
            image = steps[step](image, list(values.values())[step])
        assert (ours[number] - image * 255).abs().max() <= 0.001


# The compiled operator against its definition.


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_fused_is_its_definition(size: tuple[int, int]) -> None:
    num = 12 if size == (224, 224) else 48
    pixels, table = crops(num, *size), random_columns(num, seed=size[0])
    fused = photometric(pixels, table, mean=MEAN, std=STD, impl="fused")
    assert_close(fused, photometric(pixels, table, mean=MEAN, std=STD, impl="torch"), table[:, Column.SOLARIZE])


@pytest.mark.usefixtures("isa")
def test_every_order_with_everything() -> None:
    pixels = crops(24, 18, 21)
    table = columns(24, flip=1, brightness=1.4, contrast=0.7, saturation=1.6, hue=-0.2, sigma=1.1, solarize=120)
    table[:, Column.ORDER] = torch.arange(24)
    fused = photometric(pixels, table, mean=MEAN, std=STD, impl="fused")
    assert_close(fused, photometric(pixels, table, mean=MEAN, std=STD, impl="torch"), table[:, Column.SOLARIZE])


@pytest.mark.usefixtures("isa")
def test_every_width_of_the_blur() -> None:
    pixels = crops(40, 26, 30)
    table = columns(40)
    table[:, Column.SIGMA] = torch.linspace(0.05, 2.0, 40)
    table[::2, Column.GRAY] = 1
    fused = photometric(pixels, table, mean=MEAN, std=STD, impl="fused")
    assert_close(fused, photometric(pixels, table, mean=MEAN, std=STD, impl="torch"), table[:, Column.SOLARIZE])


@pytest.mark.usefixtures("isa")
def test_extremes_stay_in_range() -> None:
    """Black and white only: sums of int16 must not wrap, and a flat image must stay as it is."""
    pixels = torch.where(crops(12, 30, 31) < 128, 0, 255).to(torch.uint8)
    pixels[0], pixels[1], pixels[2] = 0, 255, 128
    table = columns(12, sigma=2.0)
    table[6:, Column.SIGMA] = 0.4
    out = photometric(pixels, table, impl="fused", **PLAIN) * 255
    assert out.min() >= -1e-4 and out.max() <= 255 + 1e-4
    for i, value in enumerate((0, 255, 128)):
        assert (out[i] - value).abs().max() <= 1e-4
    assert (out - photometric(pixels, table, impl="torch", **PLAIN) * 255).abs().max() <= BOUND


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("std", [STD, (1000.0, 1000.0, 1000.0)], ids=["usual", "tiny values"])
@pytest.mark.parametrize("dtype", TYPES[1:])
def test_half_types_are_the_nearest(dtype: torch.dtype, std: tuple[float, ...]) -> None:
    """Bit for bit what torch's own cast of the float32 result gives; tiny values reach float16's subnormals."""
    pixels, table = crops(24, 19, 37), random_columns(24)
    options = {"mean": MEAN, "std": std, "impl": "fused"}
    exact = photometric(pixels, table, dtype=torch.float32, **options)
    out = photometric(pixels, table, dtype=dtype, **options)
    assert out.dtype == dtype and torch.equal(out, exact.to(dtype))


@pytest.mark.usefixtures("isa")
def test_neutral_columns_leave_the_pixels_alone() -> None:
    pixels = crops(2, 9, 50)
    for order in range(24):
        out = photometric(pixels, columns(2, order=order), impl="fused", **PLAIN) * 255
        assert torch.equal(out.round().to(torch.uint8), pixels.permute(0, 3, 1, 2))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", TYPES)
def test_flip_moves_values_and_changes_none(dtype: torch.dtype) -> None:
    for width in (1, 15, 16, 17, 40):
        pixels, table = crops(24, 6, width), random_columns(24)
        table[:, Column.CONTRAST] = 1  # its mean is summed in the order of the pixels
        table[:, Column.FLIP] = 0
        plain = photometric(pixels, table, mean=MEAN, std=STD, dtype=dtype, impl="fused")
        table[:, Column.FLIP] = 1
        flipped = photometric(pixels, table, mean=MEAN, std=STD, dtype=dtype, impl="fused")
        assert torch.equal(flipped, plain.flip(-1))


def test_threads_do_not_matter() -> None:
    pixels, table = crops(17, 40, 40), random_columns(17)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(photometric(pixels, table, mean=MEAN, std=STD, impl="fused"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])
    alone = [photometric(pixels[i : i + 1], table[i : i + 1], mean=MEAN, std=STD, impl="fused") for i in range(17)]
    assert torch.equal(results[0], torch.cat(alone))


def test_paths_agree() -> None:
    pixels, table = crops(24, 30, 45), random_columns(24)
    results = []
    for name in isas():
        ops.photometric_isa(name)
        results.append(photometric(pixels, table, mean=MEAN, std=STD, impl="fused"))
    ops.photometric_isa("auto")
    for other in results[1:]:
        assert_close(other, results[0], table[:, Column.SOLARIZE])


def test_strided_and_empty_input() -> None:
    planar = crops(4, 10, 12).permute(0, 3, 1, 2).contiguous()
    table = random_columns(8)[::2]
    out = photometric(planar.permute(0, 2, 3, 1), table, mean=MEAN, std=STD, impl="fused")
    same = photometric(planar.permute(0, 2, 3, 1).contiguous(), table.contiguous(), mean=MEAN, std=STD, impl="fused")
    assert torch.equal(out, same)
    for shape in ((0, 5, 6, 3), (2, 0, 6, 3)):
        for impl in ("torch", "fused"):
            empty = photometric(torch.empty(shape, dtype=torch.uint8), columns(shape[0]), impl=impl, **PLAIN)
            assert empty.shape == (shape[0], 3, shape[1], shape[2])


@pytest.mark.usefixtures("isa")
def test_senseless_columns_do_no_harm() -> None:
    """No promise on the values; only that memory stays intact and the process alive."""
    for value in (float("nan"), float("inf"), -float("inf"), 1e30, -7.0):
        photometric(crops(2, 20, 33), torch.full((2, len(Column)), value), impl="fused", **PLAIN)


# As torch sees it.


def test_opcheck() -> None:
    for size, dtype in itertools.product(((1, 1), (6, 9)), TYPES):
        arguments = (crops(3, *size), random_columns(3), list(MEAN), list(STD), dtype)
        torch.library.opcheck(torch.ops.fastcssl.photometric.default, arguments)


def test_compiles_in_one_graph() -> None:
    def step(pixels: Tensor, table: Tensor) -> Tensor:
        return photometric(pixels, table, mean=MEAN, std=STD, dtype=torch.bfloat16).float() * 2

    pixels, table = crops(3, 8, 8), random_columns(3)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(pixels, table), step(pixels, table))


@pytest.mark.parametrize("impl", ["torch", "fused"])
def test_faults_are_named(impl: augment.Photometry) -> None:
    good, table = crops(2, 4, 5), columns(2)
    faults = [
        ((good[0], table), {}, r"crops must be .*\[4, 5, 3\]"),
        ((good.permute(0, 3, 1, 2), table), {}, r"crops must be .*\[2, 3, 4, 5\]"),
        ((good.float(), table), {}, "crops must be uint8"),
        ((good, table[:1]), {}, r"columns must be .*\[1, 9\]"),
        ((good, table[:, :8]), {}, r"columns must be .*\[2, 8\]"),
        ((good, table.double()), {}, "columns must be float32"),
        ((good, table), {"mean": (0.5, 0.5)}, "mean .*3 values"),
        ((good, table), {"std": (0.5, 0.5, 0.0)}, "std must be positive"),
        ((good, table), {"dtype": torch.float64}, "dtype must be float32, bfloat16 or float16"),
    ]
    for arguments, changed, words in faults:
        with pytest.raises(RuntimeError, match=words):
            photometric(*arguments, **{**PLAIN, **changed}, impl=impl)


def test_choice_of_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'auto', 'fused' or 'torch'"):
        photometric(crops(1, 2, 2), columns(1), impl="fast", **PLAIN)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no 'sse9'"):
        ops.photometric_isa("sse9")
    assert ops.missing("cpu") is None and "FASTCSSL_CUDA" in (ops.missing("xpu") or "")
    monkeypatch.setattr(ops, "_PATH", None)
    with pytest.raises(RuntimeError, match=r"not possible: .* compiler"):
        photometric(crops(1, 2, 2), columns(1), impl="fused", **PLAIN)
    assert photometric(crops(1, 2, 2), columns(1), **PLAIN).shape == (1, 3, 2, 2)
