"""What the sdist and the wheel hold and claim. `make wheel` builds and uses them; here is what needs no compiler."""

import fnmatch
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import backend
from setuptools import find_packages

import fastcssl
from dataprep.sources import open_source
from fastcssl.cli.train import parsed
from fastcssl.config.recipes import recipe

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
MADE = {"PKG-INFO", "setup.cfg"}  # by setuptools, beside the .egg-info


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def test_the_sdist_is_the_repository(tracked: list[str], tmp_path: Path) -> None:
    backend("pybind11")
    for name in tracked:
        target = tmp_path / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    # What lies around after work may not get in.
    for stray in ("build/x.py", "fastcssl/ops/_ops.abi3.so", "tests/__pycache__/x.pyc", "demo/data/manifest.json"):
        (tmp_path / "tree" / stray).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / stray).touch()
    code = f"import setuptools.build_meta as backend; backend.build_sdist({str(tmp_path)!r})"
    env = {**os.environ, "FASTCSSL_CUDA": "0"}  # the CUDA sources must be in it all the same
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "tree", env=env, capture_output=True, check=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {name for name in names if ".egg-info/" not in name} - MADE == set(tracked)


def test_packages_and_their_data_are_declared(tracked: list[str]) -> None:
    """Otherwise the wheel lacks them, and nobody who works in the tree would notice."""
    inside = [name for name in tracked if name.startswith(("fastcssl/", "dataprep/"))]
    declared = PYPROJECT["tool"]["setuptools"]
    found = find_packages(str(ROOT), include=declared["packages"]["find"]["include"])
    assert {name.rpartition("/")[0].replace("/", ".") for name in inside} == set(found)
    for name in inside:
        if not name.endswith(".py"):
            folder, _, file = name.rpartition("/")
            patterns = declared["package-data"].get(folder.replace("/", "."), [])
            assert any(fnmatch.fnmatch(file, pattern) for pattern in patterns), f"package-data lacks {name}"


def test_one_floor_for_torch_and_one_version() -> None:
    floors = dict(need.split(">=") for need in PYPROJECT["project"]["dependencies"])
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", floor) for floor in floors.values()), "make wheel installs exactly these"
    assert script("wheel").floors() == [f"{name}==={floor}" for name, floor in floors.items()]
    build_requires = PYPROJECT["build-system"]["requires"]
    assert f"torch>={floors['torch']}" in build_requires
    # The operators ask torch for no more than the ABI of the oldest: a byte for each of its numbers, then zeros.
    abi = re.search(r'TORCH_FLOOR = "0x([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})0{10}"', (ROOT / "setup.py").read_text())
    assert abi is not None and ".".join(str(int(byte, 16)) for byte in abi.groups()) == floors["torch"]
    # What is built without isolation is built with what isolation would bring.
    makefile = (ROOT / "Makefile").read_text()
    for need in build_requires:
        assert need.startswith("torch>=") or makefile.count(f'"{need}"') == 3
    assert PYPROJECT["project"]["version"] == fastcssl.__version__


def test_the_wheel_is_looked_into() -> None:
    wheel = script("wheel")
    sdist = [
        "setup.py",
        "csrc/ops.cpp",
        "fastcssl/ops.py",
        "fastcssl/py.typed",
        "dataprep/cli.py",
        "fastcssl.egg-info/x",
    ]
    compiled = [
        "fastcssl/ops/_ops.cp.so",
        "fastcssl/data/_native.cp.so",
        "dataprep/_codec.cp.so",
        "fastcssl.libs/libjpeg-1.so.62",
    ]
    metadata = ["METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE", "licenses/libjpeg-turbo", "WHEEL"]
    good = ["fastcssl/ops.py", "fastcssl/py.typed", "dataprep/cli.py", *compiled]
    good += [f"fastcssl-1.dist-info/{name}" for name in metadata]
    assert wheel.faults(sdist, good) == []
    for name in good[:-1]:
        wrong = wheel.faults(sdist, [each for each in good if each != name])
        assert len(wrong) == 1 and wrong[0].startswith("lacks"), name
    assert wheel.faults(sdist, [*good, "tests/test_ops.py"]) == ["should not have tests/test_ops.py"]
    assert wheel.faults(sdist, [*good, "fastcssl.libs/libc10-1.so"]) == ["should not have fastcssl.libs/libc10-1.so"]


def test_the_smoke_test_notices(tmp_path: Path) -> None:
    """A compiler in reach, or a libjpeg that is not the wheel's, would make it prove nothing."""
    (tmp_path / "cc").write_text("#!/bin/sh\n")
    (tmp_path / "cc").chmod(0o755)
    command = [sys.executable, str(ROOT / ".ci" / "smoke.py"), str(tmp_path)]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode != 0 and "a compiler is on PATH" in done.stderr
    if (Path(fastcssl.__file__).parent.parent / "fastcssl.libs").exists():
        pytest.skip("fastcssl is installed from a wheel here")
    (tmp_path / "cc").unlink()
    done = subprocess.run(command, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode != 0 and "the wheel's libjpeg is not the only one loaded" in done.stderr


def test_the_smoke_test_asks_for_what_exists() -> None:
    smoke = script("smoke")
    assert len(open_source(smoke.DATA).classes) == 30
    words = ("demo", "moco", "pnr")
    _, found = parsed(words, recipe(*words), ["--data", "data", *smoke.SMALL])
    assert found.config.epochs == 1
    target = subprocess.run(["make", "--dry-run", "wheel"], cwd=ROOT, capture_output=True, text=True)
    assert ".ci/wheel.py" in target.stdout, target.stderr
