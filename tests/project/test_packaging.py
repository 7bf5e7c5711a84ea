"""The build switches, the import boundary, and what the repository may not contain."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import backend

ROOT = Path(__file__).parents[2]


def setup_py(*, cuda: str | None, path: str | None = None) -> "subprocess.CompletedProcess[str]":
    env = {k: v for k, v in os.environ.items() if k not in ("FASTCSSL_CUDA", "CUDA_HOME", "CUDA_PATH")}
    if cuda is not None:
        env["FASTCSSL_CUDA"] = cuda
    if path is not None:
        env["PATH"] = path
    code = "import setup, sys; print(*(s for e in [setup.native()] for s in e.sources))"
    stub = "import setuptools; setuptools.setup = lambda **_: None;"
    return subprocess.run(
        [sys.executable, "-c", stub + code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )


def test_cuda_switch(tmp_path: Path) -> None:
    backend("pybind11")
    without = setup_py(cuda="0")
    assert without.returncode == 0 and "device_cpu.cpp" in without.stdout and ".cu" not in without.stdout
    wrong = setup_py(cuda="yes")
    assert wrong.returncode != 0 and "FASTCSSL_CUDA is 'yes'" in wrong.stderr
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        required = setup_py(cuda="1", path=str(tmp_path))
        assert required.returncode != 0 and "no CUDA toolkit was found" in required.stderr
    if shutil.which("nvcc"):
        found = setup_py(cuda="1")
        assert found.returncode == 0 and "device_cuda.cu" in found.stdout
        assert setup_py(cuda=None).stdout == found.stdout


def test_a_required_toolkit_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without CUDA, whatever this one has."""
    backend("pybind11")
    code = (
        "import pathlib, shutil, setuptools; setuptools.setup = lambda **_: None; shutil.which = lambda *_: None;"
        "real = pathlib.Path.exists; pathlib.Path.exists = lambda p: False if 'nvcc' in p.name else real(p);"
        "import setup; print('built' if setup.find_cuda() else 'left out')"
    )
    for wish, says in (("1", "no CUDA toolkit was found"), ("", "left out")):
        monkeypatch.setenv("FASTCSSL_CUDA", wish)
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert says in done.stdout + done.stderr
        assert (done.returncode == 0) == (wish == "")


def test_the_extension_says_what_it_can_do_here() -> None:
    from fastcssl.data import _native

    status = _native.cuda_status()
    assert status["built"] == bool(status["architectures"])
    # Either a kernel ran, or there is a sentence that says why not.
    assert (status["num_devices"] > 0) or status["problem"]


def test_dataprep_needs_neither_torch_nor_fastcssl() -> None:
    code = (
        "import sys, dataprep.cli, dataprep.sources, dataprep.writers;"
        "dataprep.sources.families(); dataprep.writers.formats();"
        "print(sorted(m for m in ('torch', 'fastcssl', 'ffcv', 'nvidia.dali') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_manifest_is_standard_library_only() -> None:
    code = (
        "import sys; import dataprep.manifest; print(sorted(m for m in ('numpy', 'PIL', 'rich') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_stay_readable() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in tracked.stdout.split():
        path = ROOT / name
        if path.suffix in (".py", ".cpp", ".cu", ".h", ".cuh") and path.exists():
            assert len(path.read_text().splitlines()) <= 420, f"{name} wants splitting"
