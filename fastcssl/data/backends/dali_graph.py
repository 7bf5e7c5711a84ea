"""Builds the DALI graph of a policy: decode once, then crop and resize each view, with the photometry if requested.

The same function builds the graph for both devices. All random choices are inputs (`inputs_of`): boxes and photometric
columns. DALI draws nothing itself. The photometry is that of csrc/views/photometric.h, written with DALI's arithmetic,
because DALI's colour operators work in another colour space, in a fixed order and without clamping in between, and
because DALI has no solarize. Where an `if` tests a value of a sample, DALI splits the batch and merges it afterwards.

N samples, C columns.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import nvidia.dali
import torch

from fastcssl.data.augment import GREY, MAX_RADIUS, ORDERS, Column
from fastcssl.data.views import Policy, ViewSpec

Device = Literal["cpu", "gpu"]
GraphInputs = tuple[Any, ...]
Node = Any

dali: Any = nvidia.dali  # its stubs are incomplete, and absent where DALI is not installed
fn, math, types = dali.fn, dali.math, dali.types

_FILTERS = {"bicubic": types.INTERP_CUBIC, "bilinear": types.INTERP_LINEAR}
# A sample's photometric numbers are its columns, followed by these.
_BLENDS = 3  # brightness, contrast and saturation in the sample's order; three numbers each
_BLEND = len(Column)
_HUE_TURN = _BLEND + 3 * _BLENDS  # the number of blends before hue
_WINDOW = _HUE_TURN + 1  # of the blur, in pixels
_NO_HUE = -1


def make_pipeline(
    policy: Policy,
    *,
    device: Device,
    device_id: int | None,
    batch_size: int,
    num_threads: int,
    depth: int,
    source: Callable[[], GraphInputs],
    photometry: torch.dtype | None = None,
) -> nvidia.dali.pipeline.Pipeline:
    """Returns a pipeline with one output [N, size, size, 3] per view.

    The output is the uint8 crop, or the finished view where `photometry` names its type. The pipeline calls `source`
    for the inputs of a batch, `depth` batches ahead. DALI does not copy the inputs: they must stay alive until the
    pipeline has returned the batch. A pipeline on "gpu" can be defined and serialised without a driver, but not built.
    """
    make = dali.pipeline_def(_graph, enable_conditionals=True)
    pipeline: nvidia.dali.pipeline.Pipeline = make(
        policy,
        device,
        photometry,
        source,
        batch_size=batch_size,
        num_threads=num_threads,
        device_id=device_id,
        prefetch_queue_depth=depth,
        exec_dynamic=True,  # outputs stay as they are until dropped; other executors overwrite them with the next batch
    )
    return pipeline


def inputs_of(
    policy: Policy,
    encoded_N: list[npt.NDArray[np.uint8]],
    box_VN4: npt.NDArray[np.float32],
    columns_VNC: npt.NDArray[np.float32] | None,
) -> GraphInputs:
    """Returns the inputs that a pipeline's source must supply for one batch. Only photometry needs columns."""
    inputs: list[Any] = [encoded_N]
    for view, spec in enumerate(policy):
        begin_N2, end_N2 = box_VN4[view][:, 1::-1], box_VN4[view][:, :1:-1]  # DALI counts rows first
        if spec.crop == "center":
            inputs += [begin_N2, end_N2]
        else:
            inputs += [begin_N2.astype(np.int32), (end_N2 - begin_N2).astype(np.int32)]
        if columns_VNC is not None:
            inputs.append(_numbers(columns_VNC[view]))
    return inputs[0], *map(np.ascontiguousarray, inputs[1:])


def _numbers(columns_NC: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Returns the photometric numbers of each sample: its columns, followed by the numbers of the graph's formulas.

    Brightness, contrast and saturation are all  image * f + grey * g + mean grey * m  with different numbers, so one
    formula computes each of them in any order. A neutral adjustment does not change a bit.
    """
    hue = Column.HUE - Column.BRIGHTNESS
    order_N4 = np.array(ORDERS, np.intp)[columns_NC[:, Column.ORDER].astype(np.intp)]
    column_N3 = Column.BRIGHTNESS + order_N4[order_N4 != hue].reshape(-1, _BLENDS)
    f_N3 = np.take_along_axis(columns_NC, column_N3, axis=1)
    g_N3, m_N3 = ((1 - f_N3) * (column_N3 == column) for column in (Column.SATURATION, Column.CONTRAST))
    turn_N = np.where(columns_NC[:, Column.HUE] == 0, _NO_HUE, np.argmax(order_N4 == hue, axis=1))
    window_N = 2 * np.minimum(np.ceil(np.float32(5.5) * columns_NC[:, Column.SIGMA]), MAX_RADIUS) + 1
    parts = (columns_NC, f_N3, g_N3, m_N3, turn_N[:, None], window_N[:, None])
    return np.concatenate(parts, axis=1, dtype=np.float32)


def _graph(policy: Policy, device: Device, photometry: torch.dtype | None, source: Any) -> tuple[Node, ...]:
    kinds: list[Any] = [types.UINT8]
    for spec in policy:
        kinds += [types.FLOAT if spec.crop == "center" else types.INT32] * 2
        if photometry is not None:
            kinds.append(types.FLOAT)
    num = len(kinds)
    inputs = fn.external_source(source=source, num_outputs=num, dtype=kinds, ndim=[1] * num, no_copy=True)
    # Decodes as libjpeg and Pillow do. The orientation was already applied when the data was prepared.
    image = fn.decoders.image(
        inputs[0],
        device="mixed" if device == "gpu" else "cpu",
        output_type=types.RGB,
        adjust_orientation=False,
        jpeg_fancy_upsampling=True,
    )
    views = []
    each = 2 if photometry is None else 3
    for view, spec in enumerate(policy):
        own = inputs[1 + view * each : 1 + (view + 1) * each]
        crop = _resized(image, spec, own[0], own[1])
        if photometry is None:
            views.append(crop)
        else:
            views.append(_finished(_augmented(crop, spec, device, own[2]), spec, own[2], photometry))
    return tuple(views)


def _resized(image: Node, spec: ViewSpec, begin: Node, extent: Node) -> Node:
    how = {"size": [spec.size_px] * 2, "interp_type": _FILTERS[spec.interpolation], "antialias": spec.antialias}
    if spec.crop == "center":  # `extent` is the end of the box; the filter may read past it
        return fn.resize(image, roi_start=begin, roi_end=extent, **how)
    return fn.resize(fn.slice(image, start=begin, shape=extent, axes=[0, 1]), **how)


# ---- Photometry, in float on the scale 0..255 ------------------------------------------------------------------------


def _augmented(crop: Node, spec: ViewSpec, device: Device, numbers: Node) -> Node:
    image = fn.cast(crop, dtype=types.FLOAT)
    amounts = numbers.gpu() if device == "gpu" else numbers  # arithmetic runs on one device, conditions on the host
    if spec.jitter_p > 0:
        for turn in range(_BLENDS + 1):
            if numbers[_HUE_TURN] == turn:
                image = _hue_shifted(image, amounts[int(Column.HUE)])
            if turn < _BLENDS:
                f, g, m = (amounts[_BLEND + kind * _BLENDS + turn] for kind in range(3))
                grey = _grey(image)
                image = _clamped(image * f + grey * g + fn.reductions.mean(grey) * m)
    if spec.gray_p > 0:
        gray = amounts[int(Column.GRAY)]
        image = image * (1.0 - gray) + _grey(image) * gray
    if spec.blur_p > 0:
        sigma = numbers[int(Column.SIGMA)]
        if sigma > 0:
            image = fn.gaussian_blur(image, sigma=sigma, window_size=fn.cast(numbers[_WINDOW], dtype=types.INT32))
    if spec.solarize_p > 0:
        image = image + (image >= amounts[int(Column.SOLARIZE)]) * (255.0 - 2.0 * image)
    return image


def _finished(image: Node, spec: ViewSpec, numbers: Node, dtype: torch.dtype) -> Node:
    """Flips and normalises the image. It stays [H, W, 3]. DALI has no bfloat16, so the caller casts to it."""
    return fn.crop_mirror_normalize(
        image,
        mirror=fn.cast(numbers[int(Column.FLIP)], dtype=types.INT32),
        mean=[255 * x for x in spec.mean],
        std=[255 * x for x in spec.std],
        dtype=types.FLOAT16 if dtype == torch.float16 else types.FLOAT,
        output_layout="HWC",
    )


def _clamped(image: Node) -> Node:
    return math.clamp(image, 0.0, 255.0)


def _grey(image: Node) -> Node:
    return fn.coord_transform(image, M=list(GREY))


def _hue_shifted(image: Node, turns: Node) -> Node:
    """Shifts the hue as data/augment.py does: each channel is below the largest by the range times a trapezoid."""
    red, green, blue = image[:, :, 0:1], image[:, :, 1:2], image[:, :, 2:3]
    top = math.max(math.max(red, green), blue)
    span = top - math.min(math.min(red, green), blue)
    is_red = top == red
    is_green = (top == green) & (top != red)
    is_blue = (top != green) & (top != red)
    sixth = is_red * (green - blue) + is_green * (blue - red) + is_blue * (red - green)
    hue = sixth / (span + (span == 0.0)) + is_green * 2.0 + is_blue * 4.0 + turns * 6.0
    hue = hue - math.floor(hue / 6.0) * 6.0
    sign, middle, offset = (types.Constant(np.array(x, np.float32)) for x in ((-1, 1, 1), (3, 2, 4), (2, -1, -1)))
    below = math.clamp(math.abs(hue - middle) * sign + offset, 0.0, 1.0)
    return _clamped(top - span * below)
