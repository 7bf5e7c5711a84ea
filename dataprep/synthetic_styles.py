"""Renders the scenes of the embedded data set: signed distances, textures and the four styles.

The unit of length is half the short side of the image, which therefore spans [-1, 1]. A style draws the same random
numbers at every resolution, so it shows the same scene.
"""

from __future__ import annotations

import colorsys
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# All arrays are float32, but numpy's stubs type a float32 array times a Python float as float64.
Array = npt.NDArray[np.floating]
Colour = tuple[float, float, float]

SHAPES: tuple[str, ...] = ("cross", "ring", "square", "star", "triangle")
TEXTURES: tuple[str, ...] = ("striped", "solid", "dotted", "checkered", "ringed")
HUES: dict[str, float] = {"red": 0.99, "blue": 0.61, "green": 0.36, "yellow": 0.15}
GRAIN_CELLS = 64
PAPER: Colour = (0.98, 0.97, 0.94)
CREAM: Colour = (0.98, 0.94, 0.84)
INK: Colour = (0.1, 0.09, 0.16)


@dataclass(frozen=True)
class Canvas:
    """The pixel centres of an image and the side of a pixel."""

    x_HW: Array
    y_HW: Array
    pixel: float

    @property
    def shape(self) -> tuple[int, int]:
        height, width = self.x_HW.shape
        return height, width

    def coverage(self, sdf_HW: Array, blur: float = 0.0) -> Array:
        """Returns the share of each pixel that is inside the zero level of a signed distance."""
        covered_HW: Array = np.clip(0.5 - sdf_HW * (1 / (self.pixel + blur)), 0.0, 1.0)
        return covered_HW

    def field(self, lattice_KK: Array) -> Array:
        """Returns a lattice, or a stack of them, interpolated over the whole image."""
        # Gathers instead of matrix products: BLAS threads cost more than they save here, and their rounding varies.
        low_H, part_H = _between(self.shape[0], lattice_KK.shape[-2])
        low_W, part_W = _between(self.shape[1], lattice_KK.shape[-1])
        upper_HK, lower_HK = lattice_KK.take(low_H, -2), lattice_KK.take(low_H + 1, -2)
        rows_HK = upper_HK + part_H[:, None] * (lower_HK - upper_HK)
        left_HW, right_HW = rows_HK.take(low_W, -1), rows_HK.take(low_W + 1, -1)
        right_HW -= left_HW
        right_HW *= part_W
        right_HW += left_HW
        return right_HW


@functools.lru_cache(maxsize=16)
def canvas_of(height: int, width: int) -> Canvas:
    """Returns the canvas of an image size."""
    short = min(height, width)
    y_H = (2 * np.arange(height, dtype=np.float32) + 1 - height) / short
    x_W = (2 * np.arange(width, dtype=np.float32) + 1 - width) / short
    y_HW, x_HW = np.meshgrid(y_H, x_W, indexing="ij")
    y_HW.flags.writeable = x_HW.flags.writeable = False
    return Canvas(x_HW, y_HW, 2.0 / short)


@functools.lru_cache(maxsize=64)
def _between(length: int, cells: int) -> tuple[npt.NDArray[np.intp], Array]:
    """Returns, for every pixel along a side, the lattice point before it and its relative distance to the next one."""
    at_L = np.clip((np.arange(length) + 0.5) / length * cells - 0.5, 0, cells - 1)
    low_L = np.minimum(at_L.astype(np.intp), cells - 2)
    part_L = (at_L - low_L).astype(np.float32)
    if cells < GRAIN_CELLS:
        # Coarse lattices are smoothed so that no creases show.
        part_L = part_L * part_L * (3 - 2 * part_L)
    low_L.flags.writeable = part_L.flags.writeable = False
    return low_L, part_L


def _rotate(x_HW: Array, y_HW: Array, angle: float) -> tuple[Array, Array]:
    cos, sin = math.cos(angle), math.sin(angle)
    return x_HW * cos + y_HW * sin, y_HW * cos - x_HW * sin


def _fold(x_HW: Array, y_HW: Array, sectors: int) -> tuple[Array, Array]:
    """Returns the polar radius, and the angle folded into half a sector."""
    turn = 2 * math.pi / sectors
    return np.hypot(x_HW, y_HW), np.abs((np.arctan2(y_HW, x_HW) + turn / 2) % turn - turn / 2)


def _shape_sdf(shape: str, x_HW: Array, y_HW: Array) -> Array:
    """Returns the signed distance to a shape of radius about 1. The areas are similar and do not reveal the shape."""
    if shape == "ring":
        return np.abs(np.hypot(x_HW, y_HW) - 0.72) - 0.31
    if shape == "square":
        return np.maximum(np.abs(x_HW), np.abs(y_HW)) - 0.8
    if shape == "cross":
        x_HW, y_HW = np.abs(x_HW), np.abs(y_HW)
        return np.maximum(np.maximum(x_HW, y_HW) - 1.08, np.minimum(x_HW, y_HW) - 0.36)
    if shape == "triangle":
        radius_HW, angle_HW = _fold(x_HW, y_HW, 3)
        return radius_HW * np.cos(angle_HW) - 0.64
    radius_HW, angle_HW = _fold(x_HW, y_HW, 5)
    # A star's edge runs from the tip at (1.25, 0) to the notch at radius 0.56, half a sector further.
    edge = 0.56 * complex(math.cos(math.pi / 5), math.sin(math.pi / 5)) - 1.25
    normal = edge * -1j / abs(edge)
    sdf_HW: Array = radius_HW * np.cos(angle_HW - math.atan2(normal.imag, normal.real)) - 1.25 * normal.real
    return sdf_HW


@dataclass(frozen=True)
class Fragment:
    """A distractor: a disc (slimness 1) or a bar, too small and too plain to be mistaken for the object."""

    x: float
    y: float
    radius: float
    slimness: float
    angle: float
    colour: Colour

    def sdf(self, canvas: Canvas) -> Array:
        x_HW, y_HW = canvas.x_HW - self.x, canvas.y_HW - self.y
        sdf_HW: Array
        if self.slimness == 1.0:
            sdf_HW = np.hypot(x_HW, y_HW) - self.radius
        else:
            x_HW, y_HW = _rotate(x_HW, y_HW, self.angle)
            sdf_HW = np.maximum(np.abs(x_HW) - self.radius, np.abs(y_HW) - self.radius * self.slimness)
        return sdf_HW


@dataclass(frozen=True)
class Scene:
    """The object, and all random properties of an image that the styles share."""

    shape: str
    texture: str
    hue: float
    x: float
    y: float
    radius: float
    angle: float
    texture_angle: float
    texture_period: float
    texture_phase: tuple[float, float]
    fragments: tuple[Fragment, ...]
    occluder: Fragment
    light_angle: float
    light_slope: float
    exposure: float
    backdrop_KK: Array
    wobble_2KK: Array
    grain_3KK: Array

    def colour(self, saturation: float, value: float) -> Colour:
        return colorsys.hsv_to_rgb(self.hue, saturation, value)

    def sdf(self, canvas: Canvas, dx: float | Array = 0.0, dy: float | Array = 0.0) -> Array:
        """Returns the signed distance to the object moved by (dx, dy)."""
        x_HW = (canvas.x_HW - self.x - dx) * (1 / self.radius)
        y_HW = (canvas.y_HW - self.y - dy) * (1 / self.radius)
        return _shape_sdf(self.shape, *_rotate(x_HW, y_HW, self.angle)) * self.radius

    def texture_share(self, canvas: Canvas) -> Array:
        """Returns 1 where the class colour shows and 0 where the second tone shows."""
        period, (phase_x, phase_y) = self.texture_period, self.texture_phase
        if self.texture == "solid":
            return np.ones(canvas.shape, np.float32)
        x_HW, y_HW = _rotate(canvas.x_HW - self.x, canvas.y_HW - self.y, self.texture_angle)
        if self.texture == "ringed":
            x_HW = np.hypot(x_HW + (phase_y - 0.5) * self.radius, y_HW)
        x_HW = np.abs((x_HW * (1 / period) + phase_x) % 1 - 0.5)
        if self.texture in ("striped", "ringed"):
            return canvas.coverage((x_HW - 0.25) * period)
        y_HW = np.abs((y_HW * (1 / period) + phase_y) % 1 - 0.5)
        if self.texture == "dotted":
            return 1 - canvas.coverage((np.hypot(x_HW, y_HW) - 0.31) * period)
        across_HW, along_HW = canvas.coverage((x_HW - 0.25) * period), canvas.coverage((y_HW - 0.25) * period)
        return across_HW + along_HW - 2 * across_HW * along_HW

    def light(self, canvas: Canvas) -> Array:
        """Returns the position along the light's direction, from about -1 to 1."""
        return _rotate(canvas.x_HW, canvas.y_HW, self.light_angle)[0]


def any_colour(rng: np.random.Generator) -> Colour:
    """Returns a random colour. Half of them are class hues, so that a colour alone does not identify the object."""
    if rng.random() < 0.5:
        hue = tuple(HUES.values())[rng.integers(len(HUES))] + rng.normal(0, 0.03)
    else:
        hue = rng.random()
    return colorsys.hsv_to_rgb(hue % 1.0, rng.uniform(0.45, 0.95), rng.uniform(0.4, 0.95))


def _rgb(colour: Colour) -> Array:
    return np.array(colour, np.float32)[:, None, None]


def _mix(first: Colour, second: Colour, share_HW: Array) -> Array:
    return _rgb(first) + share_HW * (_rgb(second) - _rgb(first))


def _lay(image_3HW: Array, colour: Colour | Array, alpha_HW: Array) -> None:
    """Lays a colour over the image, in place."""
    top_3HW = colour if isinstance(colour, np.ndarray) else _rgb(colour)
    image_3HW += alpha_HW * (top_3HW - image_3HW)


def _stain(image_3HW: Array, colour: Colour, alpha_HW: Array) -> None:
    """Stains the image like a pencil or a wash, in place: the colours below shine through."""
    image_3HW *= 1 - alpha_HW * (1 - _rgb(colour))


def _photo(scene: Scene, canvas: Canvas, rng: np.random.Generator) -> Array:
    """Draws a shaded toy with a soft shadow in front of a blurred background, with sensor grain."""
    tone = rng.uniform(0.75, 0.95) if rng.random() < 0.6 else rng.uniform(0.08, 0.2)
    colour = scene.colour(rng.uniform(0.75, 0.92), rng.uniform(0.7, 0.95))
    image_3HW = _mix(any_colour(rng), any_colour(rng), canvas.field(scene.backdrop_KK))
    image_3HW *= rng.uniform(0.6, 1.0)
    for fragment in scene.fragments:
        _lay(image_3HW, fragment.colour, canvas.coverage(fragment.sdf(canvas), rng.uniform(0.05, 0.25)) * 0.8)
    light_x, light_y = math.cos(scene.light_angle), math.sin(scene.light_angle)
    shadow_HW = scene.sdf(canvas, -0.12 * light_x, -0.12 * light_y)
    _lay(image_3HW, (0.02, 0.02, 0.04), canvas.coverage(shadow_HW, 0.18) * 0.6)
    sdf_HW = scene.sdf(canvas)
    lit_x, lit_y = scene.x + 0.5 * scene.radius * light_x, scene.y + 0.5 * scene.radius * light_y
    gleam_HW = np.exp(((canvas.x_HW - lit_x) ** 2 + (canvas.y_HW - lit_y) ** 2) * -9.0)
    # A dark rim rounds the object off.
    rim_HW = np.clip(1 + sdf_HW * 10.0, 0, 1) ** 2
    object_3HW = _mix((tone, tone, tone), colour, scene.texture_share(canvas))
    object_3HW *= 0.9 - 0.4 * rim_HW + 0.3 * gleam_HW
    object_3HW += 0.22 * gleam_HW
    _lay(image_3HW, object_3HW, canvas.coverage(sdf_HW, 0.01))
    _lay(image_3HW, scene.occluder.colour, canvas.coverage(scene.occluder.sdf(canvas), 0.08))
    image_3HW *= 1.2 * scene.exposure * (1 + 1.3 * scene.light_slope * scene.light(canvas))
    image_3HW += 0.03 * canvas.field(scene.grain_3KK)
    return image_3HW


def _sketch(scene: Scene, canvas: Canvas, rng: np.random.Generator) -> Array:
    """Draws with coloured pencil on tinted paper: shaky double outlines and hatching."""
    warmth, depth = rng.uniform(0.0, 0.08), rng.uniform(0.1, 0.45)
    period, slant = rng.uniform(0.055, 0.075), rng.uniform(0, math.pi)
    grain_3HW = canvas.field(scene.grain_3KK)
    shake_x_HW, shake_y_HW = 0.018 * canvas.field(scene.wobble_2KK)
    # Hatching is finer than the pixels of a small image. Damp it as averaging over a pixel would.
    contrast = 0.3 * float(np.sinc(canvas.pixel / period))

    def pencil(angle: float) -> Array:
        along_HW = _rotate(canvas.x_HW + shake_x_HW, canvas.y_HW + shake_y_HW, slant + angle)[0]
        strokes_HW: Array = 0.7 - contrast * np.cos(along_HW * (2 * math.pi / period)) + 0.1 * grain_3HW[0]
        return strokes_HW

    ground = (PAPER[0], PAPER[1] - warmth / 2, PAPER[2] - warmth)
    image_3HW: Array = _rgb(ground) * (1 + 0.025 * grain_3HW[1])
    near_HW, far_HW = pencil(0.0), pencil(1.2)
    _stain(image_3HW, any_colour(rng), depth * canvas.field(scene.backdrop_KK) * far_HW)
    for fragment in scene.fragments:
        shade_HW = canvas.coverage(fragment.sdf(canvas), 0.03) * far_HW
        _stain(image_3HW, fragment.colour, rng.uniform(0.4, 0.9) * shade_HW)
    sdf_HW = scene.sdf(canvas, shake_x_HW, shake_y_HW)
    inside_HW = canvas.coverage(sdf_HW, 0.01)
    # A layer of paper keeps the clutter behind the object from mixing with its colour.
    _lay(image_3HW, PAPER, inside_HW * 0.85)
    colour = scene.colour(rng.uniform(0.7, 0.95), rng.uniform(0.8, 0.98))
    _stain(image_3HW, colour, inside_HW * scene.texture_share(canvas) * near_HW * rng.uniform(0.85, 1.1))
    outline_HW = np.minimum(np.abs(sdf_HW), np.abs(sdf_HW + 2 * shake_x_HW + 0.015))
    _stain(image_3HW, scene.colour(0.6, 0.3), canvas.coverage(outline_HW - 0.022, 0.01) * 0.85)
    occluder_HW = canvas.coverage(scene.occluder.sdf(canvas), 0.02)
    _stain(image_3HW, scene.occluder.colour, occluder_HW * far_HW * 1.2)
    image_3HW *= (0.5 + 0.5 * min(scene.exposure, 1.05)) * (1 + 0.4 * scene.light_slope * scene.light(canvas))
    return image_3HW


def _poster(scene: Scene, canvas: Canvas, rng: np.random.Generator) -> Array:
    """Draws a screen print: flat inks, a bold contour and a hard shadow on rays, a sun or two halves."""
    layout, count, angle = rng.integers(3), int(rng.integers(5, 10)), rng.uniform(0, math.pi)
    contour, tone = (CREAM, INK) if rng.random() < 0.5 else (INK, CREAM)
    x_HW, y_HW = canvas.x_HW - rng.uniform(-1, 1), canvas.y_HW - rng.uniform(-1, 1)
    if layout == 0:
        beam = math.pi / count
        ray_HW = np.abs((np.arctan2(y_HW, x_HW) + angle) % (2 * beam) - beam) - beam / 2
        edge_HW = ray_HW * np.hypot(x_HW, y_HW)
    elif layout == 1:
        edge_HW = np.hypot(x_HW, y_HW) - (0.2 * count - 0.6)
    else:
        edge_HW = _rotate(x_HW, y_HW, angle)[0]
    image_3HW = _mix(any_colour(rng), any_colour(rng), canvas.coverage(edge_HW))
    for fragment in scene.fragments:
        _lay(image_3HW, fragment.colour, canvas.coverage(fragment.sdf(canvas)))
    sdf_HW = scene.sdf(canvas)
    shadow_HW = scene.sdf(canvas, 0.1 * math.cos(scene.light_angle), 0.1 * math.sin(scene.light_angle))
    _lay(image_3HW, INK, canvas.coverage(shadow_HW - 0.05))
    _lay(image_3HW, contour, canvas.coverage(sdf_HW - 0.05))
    colour = scene.colour(rng.uniform(0.8, 0.95), rng.uniform(0.75, 0.95))
    _lay(image_3HW, _mix(tone, colour, scene.texture_share(canvas)), canvas.coverage(sdf_HW))
    _lay(image_3HW, scene.occluder.colour, canvas.coverage(scene.occluder.sdf(canvas)))
    # The light falls in flat steps, as in a print.
    light_HW = scene.light(canvas)
    steps_HW = canvas.coverage(-0.3 - light_HW) + canvas.coverage(0.3 - light_HW) - 1
    image_3HW *= (0.5 + 0.5 * scene.exposure) * (1 + 0.5 * scene.light_slope * steps_HW)
    return image_3HW


def _neon(scene: Scene, canvas: Canvas, rng: np.random.Generator) -> Array:
    """Draws glowing tubes and panels on a dark brick wall."""
    halo, tube, power = rng.uniform(0.1, 0.16), rng.uniform(0.03, 0.04), rng.uniform(0.8, 1.0)
    bricks = 1 / rng.uniform(0.2, 0.3)
    image_3HW = 0.04 + 0.3 * canvas.field(scene.backdrop_KK) ** 2 * _rgb(any_colour(rng))
    joint_HW = np.abs((canvas.y_HW * bricks + scene.texture_phase[0]) % 1 - 0.5)
    image_3HW *= 1 - 0.5 * canvas.coverage((0.44 - joint_HW) * (1 / bricks))

    def glow(colour: Colour, sdf_HW: Array, strength: float) -> None:
        edge_HW = np.abs(sdf_HW)
        image_3HW[:] += 0.6 * strength * np.exp(edge_HW * (-1 / halo)) * _rgb(colour)
        _lay(image_3HW, colour, canvas.coverage(edge_HW - tube, 0.02) * strength)

    for fragment in scene.fragments:
        glow(fragment.colour, fragment.sdf(canvas), 0.7)
    image_3HW += 0.15 * canvas.field(scene.backdrop_KK[::-1]) * _rgb(any_colour(rng))
    sdf_HW = scene.sdf(canvas)
    inside_HW = canvas.coverage(sdf_HW)
    image_3HW *= 1 - 0.85 * inside_HW
    bright = scene.colour(rng.uniform(0.8, 0.95), 1.0)
    _lay(image_3HW, bright, inside_HW * scene.texture_share(canvas) * (0.75 * power))
    glow(bright, sdf_HW, power)
    _lay(image_3HW, (1.0, 0.97, 0.95), canvas.coverage(np.abs(sdf_HW) - 0.4 * tube, 0.02) * 0.85)
    _lay(image_3HW, (0.04, 0.04, 0.06), canvas.coverage(scene.occluder.sdf(canvas), 0.03))
    image_3HW *= (0.4 + 0.6 * scene.exposure) * (1 + 0.6 * scene.light_slope * scene.light(canvas))
    image_3HW += 0.02 * canvas.field(scene.grain_3KK)
    return image_3HW


RENDERERS: dict[str, Callable[[Scene, Canvas, np.random.Generator], Array]] = {
    "photo": _photo,
    "sketch": _sketch,
    "poster": _poster,
    "neon": _neon,
}
