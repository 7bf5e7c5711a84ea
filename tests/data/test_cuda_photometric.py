"""The CUDA half of the photometric operator, run by the emulator against a definition in float64, and compiled by nvcc.

No GPU is involved: what the emulator cannot show is named in tests/emulator/README.md.
"""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from emulator import emulate

from fastcssl.data.augment import photometric_torch

KERNEL = emulate.CSRC / "views" / "photometric_cuda.cu"
DRIVER = emulate.EMULATOR / "photometric_main.cpp"
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
SHARED_BYTES = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Relative to values of at most 2.7: float32 arithmetic through up to seven steps, then half an ulp of the output type.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-8 * 1.5, torch.float16: 2**-11 * 1.5}
FLIP, BRIGHTNESS, CONTRAST, SATURATION, HUE, ORDER, GRAY, SIGMA, SOLARIZE = range(9)
NEUTRAL = np.array([0, 1, 1, 1, 0, 0, 0, 0, 256], np.float32)

Floats = npt.NDArray[np.float64]
Crops = npt.NDArray[np.uint8]
Columns = npt.NDArray[np.float32]


# ---- the definition, as photometric.h words it -----------------------------------------------------------------------


def lexicographic_orders() -> list[tuple[int, ...]]:
    orders: list[tuple[int, ...]] = [()]
    for _ in range(4):
        orders = [(*order, k) for order in orders for k in range(4) if k not in order]
    return orders


def luma(image: Floats) -> Floats:
    return np.asarray(image @ np.array([0.2989, 0.587, 0.114]))


def hue_turned(image: Floats, turns: float) -> Floats:
    """By way of HSV, case by case as in the textbook."""
    out = np.empty_like(image)
    for index in np.ndindex(image.shape[:2]):
        r, g, b = image[index]
        high, low = max(r, g, b), min(r, g, b)
        if high == low:
            out[index] = image[index]
            continue
        if high == r:
            sector = (g - b) / (high - low)
        elif high == g:
            sector = 2 + (b - r) / (high - low)
        else:
            sector = 4 + (r - g) / (high - low)
        sector = (sector + 6 * turns) % 6
        rising = low + (high - low) * (sector % 1)
        falling = high - (high - low) * (sector % 1)
        first_half = ((high, rising, low), (falling, high, low), (low, high, rising))
        second_half = ((low, falling, high), (rising, low, high), (high, low, falling))
        out[index] = (*first_half, *second_half)[int(sector) % 6]
    return out


def mirrored(at: int, size: int) -> int:
    at = abs(at) % max(2 * (size - 1), 1)
    return min(at, 2 * (size - 1) - at)


def blurred(image: Floats, sigma: float) -> Floats:
    radius = min(int(np.ceil(5.5 * sigma)), 11)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    weights /= weights.sum()
    for axis in (0, 1):
        size = image.shape[axis]
        taps = [
            np.take(image, [mirrored(i + d - radius, size) for i in range(size)], axis) for d in range(2 * radius + 1)
        ]
        image = sum(w * tap for w, tap in zip(weights, taps, strict=True))
    return image


def expected(crop: Crops, column: Columns) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """The image, and where solarize decides it by less than rounding."""
    image = crop.astype(np.float64)
    for operation in lexicographic_orders()[int(column[ORDER])]:
        if operation == 0:
            image = image * float(column[BRIGHTNESS])
        elif operation == 1:
            factor = float(column[CONTRAST])
            image = factor * image + (1 - factor) * luma(image).mean()
        elif operation == 2:
            factor = float(column[SATURATION])
            image = factor * image + (1 - factor) * luma(image)[..., None]
        else:
            image = hue_turned(image, float(column[HUE])) if column[HUE] != 0 else image
        image = np.clip(image, 0, 255)
    if column[GRAY]:
        image = np.repeat(luma(image)[..., None], 3, axis=-1)
    if column[SIGMA] > 0:
        image = blurred(image, float(column[SIGMA]))
    touched = bool((column[[BRIGHTNESS, CONTRAST, SATURATION]] != 1).any() or column[HUE] or column[GRAY])
    undecided = (np.abs(image - column[SOLARIZE]) < 1e-2) & (touched or column[SIGMA] > 0)
    image = np.where(image >= column[SOLARIZE], 255 - image, image)
    if column[FLIP]:
        image, undecided = image[:, ::-1], undecided[:, ::-1]
    return (image / 255 - MEAN.astype(np.float64)) / STD.astype(np.float64), undecided


# ---- running the kernel ----------------------------------------------------------------------------------------------


def stdin_of(crops_NHW3: Crops, columns_NC: Columns, dtype: torch.dtype) -> bytes:
    shape = np.array([*crops_NHW3.shape[:3], DTYPES.index(dtype)], np.int32)
    assert columns_NC.dtype == np.float32 and columns_NC.shape == (len(crops_NHW3), 9)
    return b"".join(a.tobytes() for a in (shape, MEAN, STD, columns_NC, crops_NHW3))


def emulated(
    crops_NHW3: Crops, columns_NC: Columns, dtype: torch.dtype = torch.float32, variant: str = "plain", seed: int = 0
) -> torch.Tensor:
    executable = emulate.build(KERNEL, DRIVER, variant=variant)
    done = emulate.run(executable, stdin_of(crops_NHW3, columns_NC, dtype), seed=seed)
    assert done.returncode == 0, done.stderr.decode()
    return torch.frombuffer(bytearray(done.stdout), dtype=dtype).reshape(crops_NHW3.shape)


def random_crops(seed: int, count: int, height: int, width: int) -> Crops:
    """Full range, with flat black, white and grey patches, where hue and saturation have no say."""
    crops = np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), np.uint8)
    crops[:, : height // 3, : width // 4] = 0
    crops[:, : height // 3, 3 * width // 4 :] = 255
    crops[:, height - height // 4 :, : width // 3] = 77
    return crops


def random_columns(seed: int, count: int, *, blur: float = 0.5) -> Columns:
    """Each operation neutral in some samples."""
    rng = np.random.default_rng(seed)
    columns = np.tile(NEUTRAL, (count, 1))

    def some(column: int, chance: float, values: npt.NDArray[np.float64]) -> None:
        columns[:, column] = np.where(rng.random(count) < chance, values, columns[:, column])

    some(FLIP, 0.5, np.ones(count))
    some(BRIGHTNESS, 0.8, rng.uniform(0.4, 1.6, count))
    some(CONTRAST, 0.8, rng.uniform(0.4, 1.6, count))
    some(SATURATION, 0.8, rng.uniform(0.0, 1.8, count))
    some(HUE, 0.8, rng.uniform(-0.5, 0.5, count))
    some(ORDER, 1.0, rng.integers(0, 24, count).astype(np.float64))
    some(GRAY, 0.2, np.ones(count))
    some(SIGMA, blur, rng.uniform(0.1, 2.0, count))
    some(SOLARIZE, 0.3, rng.uniform(0, 255, count))
    return columns


def worst(out_NHW3: torch.Tensor, crops_NHW3: Crops, columns_NC: Columns) -> float:
    """The largest error in units of the tolerance; infinite when anything is not a number."""
    error = 0.0
    for out, crop, column in zip(out_NHW3.double().numpy(), crops_NHW3, columns_NC, strict=True):
        wanted, undecided = expected(crop, column)
        assert undecided.mean() < 0.05 or undecided.size < 100
        allowed = TOLERANCE[out_NHW3.dtype] * (np.abs(wanted) + (1 if out_NHW3.dtype == torch.float32 else 0.02))
        difference = np.where(undecided, 0, np.abs(out - wanted)) / allowed
        error = max(error, float(np.where(np.isfinite(out), difference, np.inf).max()))
    return error


def check(crops_NHW3: Crops, columns_NC: Columns, dtype: torch.dtype = torch.float32, variant: str = "plain") -> None:
    assert worst(emulated(crops_NHW3, columns_NC, dtype, variant), crops_NHW3, columns_NC) < 1


# ---- right -----------------------------------------------------------------------------------------------------------


def test_every_order() -> None:
    columns = np.tile(NEUTRAL, (24, 1))
    columns[:, [BRIGHTNESS, CONTRAST, SATURATION, HUE]] = (1.4, 0.6, 1.7, 0.3)
    columns[:, ORDER] = np.arange(24)
    crops = np.repeat(random_crops(1, 1, 19, 23), 24, axis=0)
    out = emulated(crops, columns)
    assert worst(out, crops, columns) < 1
    assert len({image.numpy().tobytes() for image in out}) == 24


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1, 40), (33, 17), (32, 32), (64, 48), (41, 131)], ids=str)
def test_random_parameters(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Ragged sizes; in the small ones the blur is wider than the image."""
    count = 24 if shape[0] * shape[1] < 2000 else 6
    check(random_crops(2, count, *shape), random_columns(3, count), dtype)


def test_agrees_with_the_torch_definition() -> None:
    crops, columns = random_crops(40, 24, 26, 35), random_columns(41, 24)
    columns[:, SOLARIZE] = 256  # a threshold would multiply a difference in the last bit
    wanted = photometric_torch(
        torch.from_numpy(crops), torch.from_numpy(columns), MEAN.tolist(), STD.tolist(), torch.float32
    )
    torch.testing.assert_close(emulated(crops, columns), wanted.permute(0, 2, 3, 1), rtol=0, atol=5e-5)


def test_sigma_and_radius() -> None:
    """Every radius from 1 to 11, on an image narrower than it and on one wider. The last sigma is out of range and its
    radius therefore cut: there all 23 taps weigh enough to be seen."""
    columns = np.tile(NEUTRAL, (13, 1))
    columns[:, SIGMA] = [*(np.arange(1, 12) / 5.5 - 0.01), 2.0, 9.0]
    columns[::2, FLIP] = 1
    for shape in ((7, 9), (2, 70), (45, 30)):
        check(random_crops(4, 13, *shape), columns)


def test_training_size() -> None:
    columns = random_columns(5, 2, blur=0)
    columns[1, SIGMA] = 1.3
    crops = random_crops(6, 2, 224, 224)
    check(crops, columns, torch.bfloat16)


def test_neutral_is_plain_normalisation() -> None:
    crops = random_crops(7, 2, 20, 31)
    out = emulated(crops, np.tile(NEUTRAL, (2, 1))).numpy()
    np.testing.assert_allclose(out, (crops / np.float64(255) - MEAN) / STD, rtol=0, atol=1e-6)


def test_solarize_is_exact_at_levels() -> None:
    """No rounding moves a pixel over a threshold that is a level."""
    crops = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=-1).repeat(4, axis=0)
    columns = np.tile(NEUTRAL, (4, 1))
    columns[:, SOLARIZE] = (0, 128, 255, 256)
    levels = np.rint((emulated(crops, columns).numpy() * STD + MEAN) * 255)
    for i, threshold in enumerate((0, 128, 255, 256)):
        np.testing.assert_array_equal(levels[i], np.where(crops[i] >= threshold, 255 - crops[i].astype(int), crops[i]))


def test_neither_batch_nor_thread_order_changes_a_bit() -> None:
    """The cut into blocks depends on the batch, the order of threads on the seed; the result on neither."""
    crops, columns = random_crops(8, 3, 70, 75), random_columns(9, 3)
    columns[1, [CONTRAST, SIGMA]] = (0.7, 1.9)
    whole = emulated(crops, columns)
    assert torch.equal(whole, emulated(crops, columns, seed=1))
    alone = [emulated(crops[i : i + 1], columns[i : i + 1], seed=2) for i in range(3)]
    assert torch.equal(whole, torch.cat(alone))


def test_more_images_than_a_grid_has_rows() -> None:
    """The limit is 65,535 images a launch, and 3 here, because each takes the emulator a millisecond."""
    crops, columns = random_crops(10, 7, 11, 13), random_columns(11, 7)
    edits = {"kMaxGridY = 65535": "kMaxGridY = 3"}
    done = emulate.run(
        emulate.build(KERNEL, DRIVER, variant="quick", edits=edits), stdin_of(crops, columns, torch.half)
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == emulated(crops, columns, torch.half).numpy().tobytes()


@pytest.mark.parametrize("shape", [(0, 4, 4), (1, 0, 4), (1, 4, -1), (-1, 4, 4), (1, 2**16, 2**15)], ids=str)
def test_sizes_at_the_limits(shape: tuple[int, int, int]) -> None:
    """No image is nothing to do; no pixel, or more than 32 bits can address, is an error code and no access."""
    stdin = np.array([*shape, 0], np.int32).tobytes() + MEAN.tobytes() + STD.tobytes()
    done = emulate.run(emulate.build(KERNEL, DRIVER), stdin, "null")
    refused = (3, b"photometric_cuda returned 1 at sum_grey before its launch\n")
    assert (done.returncode, done.stderr) == ((0, b"") if shape[0] == 0 else refused)


@pytest.mark.parametrize(
    "launch", ["sum_grey, sum_grid, ", "color_image<T>, color_grid, ", "blur_image<T>, blur_grid, "]
)
def test_a_failed_launch_names_its_kernel(launch: str) -> None:
    kernel = launch.partition(",")[0].removesuffix("<T>")
    threads = "kBlurThreads" if kernel == "blur_image" else "kRunThreads"
    edits = {f"{launch}{threads}": f"{launch}{threads} * 8"}  # more than a block may have
    executable = emulate.build(KERNEL, DRIVER, variant="quick", edits=edits)
    done = emulate.run(executable, stdin_of(random_crops(13, 2, 9, 9), random_columns(14, 2), torch.half))
    assert done.returncode == 3 and f"photometric_cuda returned 9 at {kernel}\n" in done.stderr.decode()


# ---- and found out when it is not ------------------------------------------------------------------------------------


def test_clean_under_sanitizers() -> None:
    """Addresses and undefined behaviour; crops, columns, workspace, output and shared memory have their exact sizes."""
    for i, shape in enumerate([(1, 1), (3, 5), (33, 17), (9, 65), (41, 131)]):
        check(random_crops(20 + i, 6, *shape), random_columns(30 + i, 6), DTYPES[i % 3], "sanitized")


def faulty_batch() -> tuple[Crops, Columns]:
    """Uses every barrier: contrast, images without blur, and some with blur and several steps. Six of them, because in
    one block the warp that gathers the sums may by chance run last."""
    columns = np.tile(NEUTRAL, (6, 1))
    columns[:, [CONTRAST, HUE]] = (0.5, 0.2)
    columns[::2, SIGMA] = 9.0  # out of range: the outermost taps of a proper blur weigh too little to be missed
    return random_crops(12, 6, 36, 40), columns


@pytest.mark.parametrize("barrier", range(len(emulate.barrier_lines(KERNEL))))
def test_each_barrier_is_needed(barrier: int) -> None:
    crops, columns = faulty_batch()
    executable = emulate.build(KERNEL, DRIVER)
    line = emulate.barrier_lines(KERNEL)[barrier]
    for seed in range(5):
        done = emulate.run(executable, stdin_of(crops, columns, torch.float32), seed=seed, skip_barrier=line)
        if done.returncode == 0:
            out = torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).reshape(crops.shape)
            assert worst(out, crops, columns) > 1, f"the barrier in line {line} was not missed with seed {seed}"


FAULTS = {
    "halo one to the right": ("mirror(left - radius + at, crops.width)", "mirror(left - radius + at + 1, crops.width)"),
    "halo one lower": ("mirror(top - radius + first + step_row,", "mirror(top - radius + first + step_row + 1,"),
    "edge repeated": (": 2 * (size - 1) - at", ": 2 * size - 1 - at"),
    "span one short": ("const int span = num_columns + 2 * radius;", "const int span = num_columns + 2 * radius - 1;"),
    "ring one row short": ("kRingRows = kStepRows + 2 * kMaxRadius", "kRingRows = kStepRows + 2 * kMaxRadius - 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str) -> None:
    crops, columns = faulty_batch()
    executable = emulate.build(KERNEL, DRIVER, variant="quick", edits=dict([FAULTS[fault]]))
    done = emulate.run(executable, stdin_of(crops, columns, torch.float32))
    if done.returncode == 0:
        out = torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).reshape(crops.shape)
        assert worst(out, crops, columns) > 1


# ---- as nvcc sees it -------------------------------------------------------------------------------------------------


def resources(architecture: int, folder: Path) -> dict[str, dict[str, int]]:
    command = ["nvcc", "-cubin", "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-Xptxas=-v", "-Werror=all-warnings"]
    done = subprocess.run(
        [*command, str(KERNEL), "-o", str(folder / f"{architecture}.cubin")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    pattern = re.compile(
        r"Function properties for (\S+)\n\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r"\n.*?Used (\d+) registers.*?(\d+) bytes smem"
    )
    names = ("stack", "spill_stores", "spill_loads", "registers", "shared")
    return {
        match[1]: dict(zip(names, map(int, match.groups()[1:]), strict=True)) for match in pattern.finditer(done.stderr)
    }


def test_compiles_for_every_architecture(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        if os.environ.get("FASTCSSL_REQUIRE_BACKENDS") == "1":
            pytest.fail("nvcc is required here but is not on PATH")
        pytest.skip("nvcc is not on PATH")
    with ThreadPoolExecutor(2) as pool:
        tables = dict(zip(ARCHITECTURES, pool.map(lambda a: resources(a, tmp_path), ARCHITECTURES), strict=True))
    for architecture, kernels in tables.items():
        assert len(kernels) == 7, f"sm_{architecture}: sum_grey, and color_image and blur_image of three types"
        for name, used in kernels.items():
            where = f"sm_{architecture} {name}: {used}"
            assert used["stack"] == used["spill_stores"] == used["spill_loads"] == 0, where
            blocks = 3 if "blur_image" in name else 6
            threads = 192 if "blur_image" in name else 256
            assert blocks * (used["shared"] + 1024) <= SHARED_BYTES[architecture], where
            assert blocks * threads * used["registers"] <= 65536, where
