"""What the tests share: small images of every awkward kind, trees of them, and the command in a process of its own."""

import importlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

if TYPE_CHECKING:
    from fastcssl.data.prepared import Prepared

Pixels = npt.NDArray[np.uint8]

# A test run in the background ignores Ctrl-C, and so would the processes it starts, also those to be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)


def backend(name: str) -> ModuleType:
    """An optional package: skipped where it is missing, unless FASTCSSL_REQUIRE_BACKENDS=1 makes that a failure."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("FASTCSSL_REQUIRE_BACKENDS") == "1":
            pytest.fail(f"{name} is required here but cannot be imported: {error}")
        pytest.skip(f"{name} is not installed", allow_module_level=True)


def picture(seed: int, height: int = 48, width: int = 64) -> Pixels:
    """Smooth enough for JPEG to keep, different for every seed."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def jpeg_of(pixels: Pixels, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", **{"quality": 90, **options})
    return buffer.getvalue()


def decoded(jpeg: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))


# The longest files first, so that no process of two is left alone with one at the end.
_LONG = ("test_synthetic", "test_documentation", "test_loaders", "test_build", "test_ranks", "test_benchmark_kernel")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(_LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(_LONG)))


@pytest.fixture(scope="module", autouse=True)
def compiled_anew() -> Iterator[None]:
    """torch compiles eight modules of one class in a process and then gives up: a file does not inherit another's."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from more, and wait for them on a busy machine."""
    import torch  # here, as preparing needs none of it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], "Prepared"]:
    """From a loader's name to data that it reads."""
    from loading import formats

    return formats(tmp_path_factory)


@pytest.fixture(scope="session")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .beton file of images of one size, for tests that have FFCV."""
    from betons import write_even

    path = tmp_path_factory.mktemp("even") / "even.beton"
    write_even(path)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Callable[..., Path]:
    """Makes {split}/{class}/image.jpg; returns the root."""

    def make(
        *,
        splits: tuple[str, ...] = ("train", "val"),
        classes: int = 4,
        images: int = 5,
        size: tuple[int, int] = (48, 64),
    ) -> Path:
        root = tmp_path / "source"
        for s, split in enumerate(splits):
            for c in range(classes):
                folder = root / split / f"class{c:02d}"
                folder.mkdir(parents=True)
                for i in range(images):
                    (folder / f"{i:03d}.jpg").write_bytes(jpeg_of(picture(1000 * s + 50 * c + i, *size)))
        return root

    return make


def prep(*args: object, env: dict[str, str] | None = None, **options: object) -> "subprocess.CompletedProcess[str]":
    """fastcssl-prep in its own process."""
    return subprocess.run(
        [sys.executable, "-m", "dataprep.cli", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **(env or {})},
        **options,  # type: ignore[call-overload]
    )


def prep_ok(*args: object) -> str:
    done = prep(*args)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def prep_refused(*args: object, says: tuple[str, ...]) -> str:
    """Status 2, one sentence with these words, no traceback."""
    done = prep(*args)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for words in says:
        assert words in done.stderr, f"{words!r} not in {done.stderr!r}"
    return done.stderr


def folder_bytes(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
