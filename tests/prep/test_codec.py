"""The native codec against Pillow: pixels, resizing, damage, orientation, colour spaces."""

import io

import numpy as np
import pytest
from conftest import Pixels, decoded, jpeg_of, picture
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataprep import _codec
from dataprep.encode import Encoded, Encoding, Resize, encode_all
from dataprep.samples import Sample


def native_pixels(jpeg: bytes, reduction: int = 1) -> Pixels:
    rgb, height, width = _codec.decode(jpeg, reduction)
    return np.frombuffer(rgb, np.uint8).reshape(height, width, 3)


def encode_one(content: bytes | Pixels, resize: str = "none", *, pixels: bool = False, **settings: object) -> Encoded:
    encoding = Encoding(resize=Resize.parse(resize), **settings)  # type: ignore[arg-type]
    sample = Sample(0, "it", 0, -1, False)
    found = list(encode_all([sample], lambda _: content, encoding, want_jpeg=True, want_pixels=pixels, num_threads=1))
    assert len(found) == 1
    return found[0]


def native_resize(source: Pixels, box: tuple[float, float, float, float], size: tuple[int, int], **kw: bool) -> Pixels:
    left, top, right, bottom = box
    raw = _codec.resize(source, left=left, top=top, right=right, bottom=bottom, height=size[0], width=size[1], **kw)
    return np.frombuffer(raw, np.uint8).reshape(*size, 3)


@pytest.mark.parametrize(
    "options", [{}, {"subsampling": 0}, {"progressive": True}, {"quality": 35}, {"optimize": True}]
)
@pytest.mark.parametrize("size", [(48, 64), (1, 1), (17, 31), (8, 200)])
def test_decode_is_pillows_to_the_bit(options: dict[str, object], size: tuple[int, int]) -> None:
    jpeg = jpeg_of(picture(3, *size), **options)
    assert (native_pixels(jpeg) == decoded(jpeg)).all()


def test_grey_and_cmyk_decode_as_a_person_sees_them() -> None:
    grey = io.BytesIO()
    Image.fromarray(picture(1)).convert("L").save(grey, "JPEG")
    assert (native_pixels(grey.getvalue()) == decoded(grey.getvalue())).all()
    cmyk = io.BytesIO()
    Image.fromarray(picture(2)).convert("CMYK").save(cmyk, "JPEG", quality=95)
    ours = native_pixels(cmyk.getvalue()).astype(int)
    assert np.abs(ours - decoded(cmyk.getvalue())).max() <= 1
    assert np.abs(ours - picture(2)).mean() < 6


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 120), st.integers(1, 120), st.integers(0, 99), st.data())
def test_resize_is_pillows_bicubic(h: int, w: int, out_h: int, out_w: int, seed: int, data: st.DataObject) -> None:
    source = np.random.default_rng(seed).integers(60, 196, (h, w, 3), dtype=np.uint8)
    left = data.draw(st.floats(0, w - 0.5))
    top = data.draw(st.floats(0, h - 0.5))
    right = data.draw(st.floats(left + 0.5, w))
    bottom = data.draw(st.floats(top + 0.5, h))
    box = (left, top, right, bottom)
    ours = native_resize(source, box, (out_h, out_w))
    # Bit-equal whichever instructions the processor has.
    assert (ours == native_resize(source, box, (out_h, out_w), portable=True)).all()
    theirs = np.asarray(Image.fromarray(source).resize((out_w, out_h), Image.Resampling.BICUBIC, box=box))
    # Both passes round to bytes; Pillow may take them in the other order.
    assert np.abs(ours.astype(int) - theirs).max() <= 2


def test_resize_keeps_flat_areas_flat() -> None:
    for value in (0, 1, 127, 254, 255):
        flat = np.full((100, 130, 3), value, np.uint8)
        assert (native_resize(flat, (0.3, 1.7, 129.1, 98.2), (37, 41)) == value).all()


def test_passes_through_what_needs_no_resize() -> None:
    for options in ({}, {"progressive": True}, {"subsampling": 0}):
        jpeg = jpeg_of(picture(5), **options)
        for check in ("full", "header"):
            out = encode_one(jpeg, "short:48", check=check)
            assert out.jpeg == jpeg and out.passed_through and (out.width, out.height) == (64, 48)


@pytest.mark.parametrize(
    ("resize", "size"),
    [
        ("short:24", (32, 24)),
        ("max:32", (32, 24)),
        ("square:20", (20, 20)),
        ("square:96", (96, 96)),
        ("none", (64, 48)),
    ],
)
def test_sizes(resize: str, size: tuple[int, int]) -> None:
    out = encode_one(jpeg_of(picture(6)), resize, pixels=True)
    assert (out.width, out.height) == size
    assert out.pixels is not None and out.pixels.shape == (size[1], size[0], 3)
    stored = decoded(out.jpeg)
    assert stored.shape == out.pixels.shape
    assert np.abs(stored.astype(int) - out.pixels).mean() < 8


def test_small_images_are_not_enlarged() -> None:
    assert encode_one(jpeg_of(picture(7)), "short:256").passed_through
    assert encode_one(jpeg_of(picture(7)), "max:500").passed_through


def test_large_images_are_reduced_while_decoding_without_a_visible_difference() -> None:
    big = picture(8, 1200, 1600)
    out = encode_one(jpeg_of(big), "short:100", quality=100)
    plain = np.asarray(Image.fromarray(big).resize((133, 100), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(decoded(out.jpeg) - plain).mean() < 2


def _with_orientation(pixels: Pixels, value: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = value
    return jpeg_of(pixels, exif=exif.tobytes(), quality=98, subsampling=0)


@pytest.mark.parametrize("value", range(1, 9))
def test_exif_orientation_is_applied(value: int) -> None:
    from PIL import ImageOps

    jpeg = _with_orientation(picture(9), value)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg))).convert("RGB"))
    out = encode_one(jpeg, "none", quality=98, pixels=True)
    assert out.passed_through == (value == 1)
    assert out.pixels is not None and (out.pixels == upright).all()
    stored = Image.open(io.BytesIO(out.jpeg))
    assert stored.getexif().get(0x0112, 1) == 1
    assert np.abs(np.asarray(stored.convert("RGB")).astype(int) - upright).mean() < 3


def test_cmyk_is_never_passed_through() -> None:
    cmyk = io.BytesIO()
    Image.fromarray(picture(2)).convert("CMYK").save(cmyk, "JPEG", quality=95)
    out = encode_one(cmyk.getvalue(), "none")
    assert not out.passed_through
    assert Image.open(io.BytesIO(out.jpeg)).mode == "RGB"


def _saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM"])
def test_other_formats_go_through_pillow(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    out = encode_one(_saved(Image.fromarray(picture(4)), kind, **options), "none", pixels=True)
    assert not out.fault and out.pixels is not None
    difference = np.abs(out.pixels.astype(int) - picture(4))
    assert difference.mean() < 8 if kind == "GIF" else not difference.any()  # GIF has a palette of 256 colours


def test_sixteen_bit_grey_is_scaled_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 64 * 48).reshape(48, 64).astype(np.uint16)
    for kind in ("PNG", "TIFF"):
        out = encode_one(_saved(Image.fromarray(ramp), kind), "none", pixels=True)
        assert out.pixels is not None
        assert np.abs(out.pixels[:, :, 0].astype(int) - np.rint(ramp / 257.0)).max() <= 1


def test_transparency_is_laid_over_white() -> None:
    ink = np.zeros((48, 64, 4), np.uint8)
    ink[10:20, 10:50, 3] = 255  # black strokes on nothing
    out = encode_one(_saved(Image.fromarray(ink), "PNG"), "none", pixels=True)
    assert out.pixels is not None
    assert (out.pixels[0, 0] == 255).all() and (out.pixels[15, 30] == 0).all()
    palette = Image.fromarray(picture(4)).quantize(16)
    palette.info["transparency"] = 0
    assert not encode_one(_saved(palette, "PNG", transparency=0), "none").fault


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"\xff\xd8\xff", ""),
        (b"not an image at all", "not an image"),
        (b"\x89PNG\r\n\x1a\n rubbish", ""),
        (b"<html>404</html>", "not an image"),
    ],
)
def test_rubbish_is_a_fault_with_a_reason(content: bytes, reason: str) -> None:
    out = encode_one(content)
    assert out.fault and reason in out.fault


def test_truncation_is_found_wherever_it_falls() -> None:
    jpeg = jpeg_of(picture(11, 120, 160))
    for end in range(4, len(jpeg) - 1, 97):
        assert encode_one(jpeg[:end]).fault, end
    assert encode_one(jpeg[:-2]).fault  # only the end marker is missing
    assert not encode_one(jpeg + b"trailing rubbish").fault
    header_only = encode_one(jpeg[: len(jpeg) * 3 // 4], check="header")
    assert not header_only.fault and header_only.passed_through


def test_the_cheap_check_finds_what_a_full_decode_finds() -> None:
    """Reduction 8 skips pixel work, never entropy-coded bits."""
    rng = np.random.default_rng(0)
    found = 0
    for kind in ({}, {"progressive": True}, {"restart_marker_blocks": 4}):
        whole = jpeg_of(picture(12, 90, 130), **kind)
        for _ in range(120):
            damaged = bytearray(whole)
            for at in rng.integers(len(whole) // 3, len(whole) - 2, 3):
                damaged[at] = int(rng.integers(0, 256))
            verdicts = []
            for reduction in (1, 8):
                try:
                    _codec.decode(bytes(damaged), reduction)
                    verdicts.append(True)
                except ValueError:
                    verdicts.append(False)
            assert verdicts[0] == verdicts[1]
            found += not verdicts[0]
    assert found > 50


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_damaged_files_never_crash(seed: int) -> None:
    rng = np.random.default_rng(seed)
    damaged = bytearray(_with_orientation(picture(13), 6))
    for _ in range(int(rng.integers(1, 12))):
        damaged[int(rng.integers(2, len(damaged)))] = int(rng.integers(0, 256))
    out = encode_one(bytes(damaged[: int(rng.integers(3, len(damaged) + 1))]), "short:16", pixels=True)
    assert out.fault or (out.jpeg and out.pixels is not None)


def test_a_claim_of_too_many_pixels_is_refused() -> None:
    jpeg = bytearray(jpeg_of(picture(1)))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = b"\xff\xdc\xff\xdc"  # 65,500 x 65,500
    assert "pixels" in encode_one(bytes(jpeg)).fault


def test_results_come_in_order_from_many_threads() -> None:
    contents: list[bytes | Pixels] = []
    for i in range(60):
        if i % 3 == 0:
            contents.append(jpeg_of(picture(i)))
        elif i % 3 == 1:
            contents.append(_saved(Image.fromarray(picture(i)), "PNG"))
        else:
            contents.append(picture(i))
    samples = [Sample(i, str(i), i, -1, False) for i in range(60)]

    def run(threads: int) -> list[tuple[int, bytes]]:
        out = encode_all(
            samples,
            lambda s: contents[s.id],
            Encoding(resize=Resize.parse("short:24")),
            want_jpeg=True,
            want_pixels=False,
            num_threads=threads,
        )
        return [(e.sample.id, e.jpeg) for e in out]

    one = run(1)
    assert [i for i, _ in one] == list(range(60))
    assert one == run(4)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="quality"):
        _codec.Transcoder(
            fit="none", size=0, quality=0, check_in_full=True, want_jpeg=True, want_pixels=False, num_threads=1
        )
    with pytest.raises(ValueError, match="uint8"):
        _codec.encode(np.zeros((4, 4), np.uint8), 90)
    with pytest.raises(ValueError, match="contiguous"):
        _codec.encode(np.zeros((8, 8, 3), np.uint8)[::2], 90)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 70), st.integers(2, 70), st.integers(1, 90), st.booleans(), st.booleans(), st.data())
def test_a_filter_that_stops_at_its_box_is_a_crop_then_a_resize(
    h: int, w: int, out: int, bicubic: bool, antialias: bool, data: st.DataObject
) -> None:
    import torch

    source = np.random.default_rng(h * 100 + w).integers(60, 196, (h, w, 3), dtype=np.uint8)
    left, top = data.draw(st.integers(0, w - 1)), data.draw(st.integers(0, h - 1))
    right, bottom = data.draw(st.integers(left + 1, w)), data.draw(st.integers(top + 1, h))
    raw = _codec.resize(
        source, left=left, top=top, right=right, bottom=bottom, height=out, width=out,
        bicubic=bicubic, antialias=antialias, stop_at_box=True,
    )  # fmt: skip
    ours = np.frombuffer(raw, np.uint8).reshape(out, out, 3).astype(int)
    cut = np.ascontiguousarray(source[top:bottom, left:right])
    theirs = torch.nn.functional.interpolate(
        torch.from_numpy(cut).permute(2, 0, 1)[None].double(),
        size=(out, out),
        mode="bicubic" if bicubic else "bilinear",
        antialias=antialias,
        align_corners=False,
    )
    truth = theirs[0].permute(1, 2, 0).clamp(0, 255).numpy()
    assert np.abs(ours - truth).max() <= 2.5  # bytes between the passes, and overshoot clipped there


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"subsampling": 1}, {"progressive": True}])
def test_a_region_holds_the_pixels_of_a_full_decode(options: dict[str, object]) -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (123, 211, 3), dtype=np.uint8)
    jpeg = jpeg_of(noise, **options)
    whole = native_pixels(jpeg)
    for _ in range(60):
        left, top = int(rng.integers(0, 200)), int(rng.integers(0, 115))
        right, bottom = int(rng.integers(left + 1, 212)), int(rng.integers(top + 1, 124))
        raw, height, width, x, y = _codec.decode_region(jpeg, 211, 123, left, top, right, bottom)
        part = np.frombuffer(raw, np.uint8).reshape(height, width, 3)
        assert x <= left and y <= top and x + width >= right and y + height >= bottom
        assert (part[top - y : bottom - y, left - x : right - x] == whole[top:bottom, left:right]).all()
    with pytest.raises(ValueError, match="not as prepared"):
        _codec.decode_region(jpeg, 500, 123, 0, 0, 500, 10)
