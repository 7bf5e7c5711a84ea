"""Makes every random choice of every view, one batch at a time: crop boxes and the columns of the photometric op.

Random numbers are counter-based: each is a hash of (seed, epoch, sample id, visit, view, draw), so a sample's views do
not depend on its batch, its rank, its thread or the loader. Every machine draws the same views to the last bit, because
only integer arithmetic, exactly rounded float operations (+ - * / sqrt rint floor) and our own exponential are used.

N samples, V views, R of them cropped at random, M = R x N such crops, T tries of a crop, D draws, C columns.
"""

from dataclasses import dataclass
from decimal import Context, Decimal
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fastcssl.data.views import Policy, ViewSpec

Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Uint64 = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.integer]


class Column(IntEnum):
    """The columns of the photometric op, numbered as in csrc/views/photometric.h."""

    FLIP = 0
    BRIGHTNESS = 1
    CONTRAST = 2
    SATURATION = 3
    HUE = 4
    ORDER = 5  # 0..23: the permutation of the four above, in lexicographic order
    GRAY = 6
    SIGMA = 7
    SOLARIZE = 8


NUM_ORDERS = 24
NO_SOLARIZE = 256.0
MAX_SIDE_PX = 1 << 24  # float32 holds every integer coordinate up to here


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """The random choices for all views of a batch."""

    box_VN4: Float32  # left, top, right, bottom in pixels of the source; integers unless the crop is "center"
    columns_VNC: Float32  # see Column


# ---- Random numbers --------------------------------------------------------------------------------------------------


class Draw(IntEnum):
    """The numbers of a view's random draws. Renumbering changes every run. New draws come after 32, the last try's."""

    FLIP = 0  # five decisions
    JITTER = 1
    GRAY = 2
    BLUR = 3
    SOLARIZE = 4
    BRIGHTNESS = 5  # six amounts
    CONTRAST = 6
    SATURATION = 7
    HUE = 8
    SIGMA = 9
    ORDER = 10
    TOP = 11
    LEFT = 12
    AREA = 13  # of the first try; those of try t are AREA + 2 t and RATIO + 2 t
    RATIO = 14


class Reserved(IntEnum):
    """Epoch numbers that no training epoch uses, and view numbers that no policy uses.

    A pass over the data outside training draws its own views: its epoch is one of these plus the number of the task.
    A random choice of samples uses one of these view numbers. Renumbering changes every run.
    """

    PREFILL_EPOCH = 1 << 20  # banks are filled at the start of a task
    REPLAY_EPOCH = 1 << 21  # earlier samples are seen again
    STORE_EPOCH = 1 << 22  # embeddings are stored at the end of a task
    FISHER_EPOCH = 1 << 23  # weights are judged at the end of a task
    ORDER_VIEW = 1 << 32  # the order of the samples
    REPLACEMENT_VIEW = (1 << 32) + 1  # the replacement for a sample that cannot be decoded
    SUBSET_VIEW = (1 << 32) + 2  # the samples of a probe that uses a share of the data
    CHOICE_VIEW = (1 << 32) + 3  # the samples that are replayed


NUM_TRIES = 10  # as in torchvision
DRAWS_PER_VIEW = 64

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio spreads the steps of a counter far apart
_ROUNDS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)


def _mix(x: Uint64) -> Uint64:
    """Applies splitmix64's finaliser in place: a bijection in which every input bit affects every output bit."""
    spare = np.empty_like(x)
    for shift, factor in _ROUNDS:
        x ^= np.right_shift(x, shift, out=spare)
        x *= factor
    x ^= np.right_shift(x, _LAST_SHIFT, out=spare)
    return x


def _absorb(state: Uint64, word: Uint64) -> Uint64:
    return _mix((state ^ word) + np.uint64(_GOLDEN))


@lru_cache(maxsize=16)
def _epoch_state(seed: int, epoch: int) -> Uint64:
    state = np.zeros(1, np.uint64)
    for name, word in (("seed", seed), ("epoch", epoch)):
        if not 0 <= word <= _MASK:
            raise ValueError(f"{name} = {word}: give an integer from 0 to 2^64 - 1.")
        state = _absorb(state, np.array([word], np.uint64))
    return state


def _streams(seed: int, epoch: int, id_N: Integers, visit_N: Integers) -> Uint64:
    """Returns one state per sample. Within an epoch, two ids on their first visit never share a state."""
    return _absorb(_absorb(_epoch_state(seed, epoch), id_N.astype(np.uint64)), visit_N.astype(np.uint64))


def _steps(*numbers: int) -> Uint64:
    return np.array([number * _GOLDEN & _MASK for number in numbers], np.uint64)


def _unit(states: Uint64) -> Float64:
    """Returns numbers in [0, 1) with 53 random bits. Overwrites `states`."""
    bits = _mix(states)
    bits >>= np.uint64(11)
    return np.multiply(bits, 2.0**-53, dtype=np.float64)


def uniform(seed: int, epoch: int, id_N: Integers, visit_N: Integers, view: int, draw: int) -> Float64:
    """Returns the random numbers of one draw, in [0, 1). `epoch` is counted over the whole run."""
    return _unit(_streams(seed, epoch, id_N, visit_N) + _steps(view * DRAWS_PER_VIEW + draw))


def _exp(x: Float64) -> Float64:
    """Returns e^x to 1e-14 for logarithms of usual aspect ratios. The library's exp differs in the last bit by CPU."""
    eighth = x * 0.125
    result = eighth * (1 / 40320) + 1 / 5040
    for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        result *= eighth
        result += coefficient
    for _ in range(3):
        result *= result
    return result


# ---- Views -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PolicyArrays:
    """A policy as arrays, so that all its views are drawn together. A range is (low, span)."""

    step_DV1: Uint64  # the offset from a sample's stream to its draws
    p_5V1: Float64  # probabilities of the decisions
    low_6V1: Float64  # lower bounds of the amounts
    span_6V1: Float64
    threshold_V1: Float64
    random_R: list[int]  # the views that are cropped at random
    step_R: Uint64
    low_2R: Float64  # area, logarithm of the ratio
    span_2R: Float64
    ratio_2R: Float64


@lru_cache(maxsize=64)
def _plan(policy: Policy) -> _PolicyArrays:
    if not policy:
        raise ValueError("A policy needs at least one view.")
    V = len(policy)
    p_5V = [(s.flip_p, s.jitter_p, s.gray_p, s.blur_p, s.solarize_p) for s in policy]
    low_6V, high_6V = [], []
    for s in policy:
        factors = (s.brightness, s.contrast, s.saturation)
        low_6V.append((*(max(0.0, 1 - x) for x in factors), -s.hue, s.blur_sigma[0], 0.0))
        high_6V.append((*(1 + x for x in factors), s.hue, s.blur_sigma[1], float(NUM_ORDERS)))
    random_R = [v for v, s in enumerate(policy) if s.crop == "random"]
    exact = Context(prec=30)  # Decimal's logarithm is the same on every machine, math.log may differ
    range_22R = np.empty((2, 2, len(random_R)))  # (area, log ratio), (min, max)
    for r, v in enumerate(random_R):
        range_22R[:, :, r] = policy[v].scale, [float(Decimal(x).ln(exact)) for x in policy[v].ratio]
    low_6V1, high_6V1 = (np.array(x).T[:, :, None] for x in (low_6V, high_6V))
    return _PolicyArrays(
        step_DV1=_steps(*(v * DRAWS_PER_VIEW + d for d in Draw for v in range(V))).reshape(len(Draw), V, 1),
        p_5V1=np.array(p_5V).T[:, :, None],
        low_6V1=low_6V1,
        span_6V1=high_6V1 - low_6V1,
        threshold_V1=np.array([[s.solarize_threshold] for s in policy]),
        random_R=random_R,
        step_R=_steps(*(v * DRAWS_PER_VIEW for v in random_R)),
        low_2R=range_22R[:, 0],
        span_2R=range_22R[:, 1] - range_22R[:, 0],
        ratio_2R=np.array([policy[v].ratio for v in random_R], np.float64).reshape(-1, 2).T,
    )


def draw_views(
    policy: Policy,
    *,
    seed: int,
    epoch: int,
    id_N: Integers,
    visit_N: Integers | int = 0,
    width_N: Integers | int,
    height_N: Integers | int,
) -> Drawn:
    """Draws the boxes and columns of all views of a batch.

    `epoch` is counted over the whole run; `visit_N` is how often the sample was seen before in this epoch. Padded rows
    (id -1) are drawn like the others, so they need a size too.
    """
    plan = _plan(policy)
    width, height = (_sides(name, side, id_N) for name, side in (("width", width_N), ("height", height_N)))
    stream_N = _streams(seed, epoch, id_N, np.broadcast_to(np.asarray(visit_N), len(id_N)))
    u_DVN = _unit(stream_N + plan.step_DV1)
    box_VN4 = np.empty((len(policy), len(id_N), 4), np.float32)
    if plan.random_R:
        box_VN4[plan.random_R] = _random_boxes(plan, u_DVN, stream_N, width, height)
    for v, spec in enumerate(policy):
        if spec.crop == "whole":
            box_VN4[v] = np.stack((np.zeros_like(width), np.zeros_like(width), width, height), axis=-1)
        elif spec.crop == "center":
            box_VN4[v] = _center_boxes(spec, width, height)
    return Drawn(box_VN4=box_VN4, columns_VNC=_columns(plan, u_DVN))


def _sides(name: str, side_N: Integers | int, id_N: Integers) -> Float64:
    sides = np.broadcast_to(np.asarray(side_N, np.float64), len(id_N))
    if len(id_N) and not (sides.min() >= 1 and sides.max() <= MAX_SIDE_PX):
        row = int(np.argmax((sides < 1) | (sides > MAX_SIDE_PX)))
        raise ValueError(f"Sample {id_N[row]}: {name} {sides[row]:g} px. An image's side is 1 to {MAX_SIDE_PX} pixels.")
    return sides


_NEUTRAL_411 = np.array([1.0, 1.0, 1.0, 0.0])[:, None, None]  # brightness, contrast, saturation, hue


def _columns(plan: _PolicyArrays, u_DVN: Float64) -> Float32:
    flip, jitter, gray, blur, solarize = u_DVN[: Draw.SOLARIZE + 1] < plan.p_5V1
    amount_6VN = u_DVN[Draw.BRIGHTNESS : Draw.ORDER + 1] * plan.span_6V1 + plan.low_6V1
    factor_4VN, sigma, order = amount_6VN[:4], amount_6VN[4], amount_6VN[5]
    columns_CVN = np.empty((len(Column), *flip.shape), np.float32)
    columns_CVN[Column.FLIP] = flip
    columns_CVN[Column.BRIGHTNESS : Column.HUE + 1] = np.where(jitter, factor_4VN, _NEUTRAL_411)
    columns_CVN[Column.ORDER] = np.floor(order) * jitter
    columns_CVN[Column.GRAY] = gray
    columns_CVN[Column.SIGMA] = sigma * blur
    columns_CVN[Column.SOLARIZE] = np.where(solarize, plan.threshold_V1, NO_SOLARIZE)
    return np.ascontiguousarray(columns_CVN.transpose(1, 2, 0))


# ---- Boxes -----------------------------------------------------------------------------------------------------------

_AGAIN_STEP_2T1 = _steps(*range(Draw.AREA + 2, Draw.AREA + 2 * NUM_TRIES)).reshape(-1, 2).T[:, :, None].copy()


def _random_boxes(
    plan: _PolicyArrays, u_DVN: Float64, stream_N: Uint64, width_N: Float64, height_N: Float64
) -> Float32:
    """Returns boxes as RandomResizedCrop draws them: the first of ten tries that fits, else the image's middle."""
    R, N = len(plan.random_R), len(stream_N)
    top_M, left_M, area_M, ratio_M = u_DVN[Draw.TOP : Draw.RATIO + 1, plan.random_R].reshape(4, -1)
    W_M, H_M = np.tile(width_N, R), np.tile(height_N, R)
    low_2M, span_2M = np.repeat(plan.low_2R, N, axis=1), np.repeat(plan.span_2R, N, axis=1)
    w_M, h_M, fits_M = _sizes(area_M, ratio_M, low_2M, span_2M, W_M, H_M)
    middle = np.zeros(0, np.intp)
    again = np.flatnonzero(~fits_M)
    if again.size:  # counter-based draws allow the other tries for these samples alone
        stream = stream_N[again % N] + plan.step_R[again // N]
        area_T, ratio_T = _unit(stream + _AGAIN_STEP_2T1)
        w_T, h_T, fits_T = _sizes(area_T, ratio_T, low_2M[:, again], span_2M[:, again], W_M[again], H_M[again])
        first, each = fits_T.argmax(axis=0), np.arange(again.size)
        w_M[again], h_M[again] = w_T[first, each], h_T[first, each]
        middle = again[~fits_T[first, each]]
    if middle.size:
        w_M[middle], h_M[middle] = _middle(W_M[middle], H_M[middle], *plan.ratio_2R[:, middle // N])
    top_M *= H_M - h_M + 1
    left_M *= W_M - w_M + 1
    if middle.size:
        top_M[middle] = (H_M[middle] - h_M[middle]) / 2
        left_M[middle] = (W_M[middle] - w_M[middle]) / 2
    np.floor(top_M, out=top_M)
    np.floor(left_M, out=left_M)
    return np.stack((left_M, top_M, left_M + w_M, top_M + h_M), axis=-1, dtype=np.float32).reshape(R, N, 4)


def _sizes(
    area: Float64, ratio: Float64, low_2M: Float64, span_2M: Float64, W_M: Float64, H_M: Float64
) -> tuple[Float64, Float64, Bool]:
    """Returns a crop's width and height from the two numbers of a try, [M] or [T, M], and whether it fits the image."""
    area = (area * span_2M[0] + low_2M[0]) * (W_M * H_M)
    ratio = _exp(ratio * span_2M[1] + low_2M[1])
    w, h = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    return w, h, (w >= 1) & (w <= W_M) & (h >= 1) & (h <= H_M)


def _middle(W: Float64, H: Float64, min_ratio: Float64, max_ratio: Float64) -> tuple[Float64, Float64]:
    """Returns the largest crop of an allowed ratio. It has at least one pixel; torchvision's may be empty."""
    tall, wide = W / H < min_ratio, W / H > max_ratio
    w = np.where(wide, np.rint(H * max_ratio), W)
    h = np.where(tall, np.rint(W / min_ratio), H)
    return np.maximum(w, 1), np.maximum(h, 1)


def _center_boxes(spec: ViewSpec, W_N: Float64, H_N: Float64) -> Float64:
    """Returns the boxes of Resize followed by CenterCrop, mapped back to the source image."""
    resize_px = spec.resize_px or spec.size_px
    short = np.minimum(W_N, H_N)

    def span(side: Float64) -> tuple[Float64, Float64]:
        resized = np.floor(resize_px * side / short)
        start = np.rint((resized - spec.size_px) / 2)
        return start * side / resized, (start + spec.size_px) * side / resized

    (left, right), (top, bottom) = span(W_N), span(H_N)
    return np.stack((left, top, right, bottom), axis=-1)
