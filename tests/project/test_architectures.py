"""Which architectures setup.py compiles for, whatever TORCH_CUDA_ARCH_LIST says, and where it finds a toolkit."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import setuptools
from conftest import backend

ROOT = Path(__file__).parents[2]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """setup.py as a module, which builds nothing."""
    backend("pybind11")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("FASTCSSL_CUDA", "0")  # while it is read
    monkeypatch.syspath_prepend(str(ROOT))
    sys.modules.pop("setup", None)
    import setup

    monkeypatch.delenv("FASTCSSL_CUDA")
    yield setup
    sys.modules.pop("setup", None)


@pytest.mark.parametrize(
    ("wish", "named", "remarks"),
    [
        ("8.0;8.6", "sm_80;sm_86;compute_86", []),
        ("8.0+PTX 9.0", "sm_80;sm_90;compute_80;compute_90", []),
        ("9.0a", "sm_90;compute_90", ["9.0a is compiled as 9.0"]),
        ("Hopper", "sm_90;compute_90", []),
        ("Ampere;Hopper", "sm_80;sm_86;sm_90;compute_90", []),
        ("ada,Blackwell", "sm_89;sm_100;sm_120;compute_120", []),
        ("Turing;Ampere", "sm_80;sm_86;compute_86", ["7.5 (Turing) is left out: the kernels need 8.0"]),
        # As NVIDIA's images have it.
        ("7.0 7.5 8.0 9.0 12.0+PTX", "sm_80;sm_90;sm_120;compute_120", ["7.0 is left", "7.5 is left"]),
    ],
)
def test_lists(built: ModuleType, wish: str, named: str, remarks: list[str]) -> None:
    chosen = built.architectures(wish)
    assert chosen.named() == named
    assert len(chosen.remarks) == len(remarks)
    assert all(said.startswith(words) for said, words in zip(chosen.remarks, remarks, strict=True)), chosen.remarks
    assert len(chosen.flags()) == len(named.split(";"))


def test_what_nvcc_does_not_know(built: ModuleType) -> None:
    chosen = built.architectures(built.ARCHITECTURES, frozenset({75, 80, 86, 89, 90}))
    assert chosen.named() == "sm_80;sm_86;sm_89;sm_90;compute_90"
    assert [said.partition(" ")[0] for said in chosen.remarks] == ["10.0", "12.0"]


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ("7.5", "of which nothing can be compiled: 7.5 is left out"),
        ("Volta Turing", "FASTCSSL_CUDA=0"),
        ("Hoper", "has 'Hoper'; use numbers such as 8.6"),
        ("86", "has '86'"),
        ("8.0+SASS", "has '8.0+SASS'"),
    ],
)
def test_lists_that_cannot_be_used(built: ModuleType, wish: str, says: str) -> None:
    with pytest.raises(SystemExit, match="TORCH_CUDA_ARCH_LIST") as caught:
        built.architectures(wish)
    assert says in str(caught.value)


def test_a_list_with_an_older_card_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real nvcc: a kernel of ours, by the code that builds the extension; 7.5 is left out and said."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on PATH")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5 8.0+PTX")
    program = f"""
import setuptools
setuptools.setup = lambda **_: None
import setup
from setuptools.dist import Distribution
command = setup.BuildExt(Distribution())
command.build_temp = {str(tmp_path)!r}
print(command.compile_kernel("csrc/device/device_cuda.cu"))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fastcssl: 7.5 is left out: the kernels need 8.0" in done.stderr
    tool = Path(os.path.realpath(nvcc)).with_name("cuobjdump")
    if tool.exists():
        path = done.stdout.split()[-1]
        held = subprocess.run([str(tool), "--list-elf", "--list-ptx", path], capture_output=True, text=True).stdout
        assert "sm_80.cubin" in held and "sm_75" not in held and held.count("PTX") == 1, held


@pytest.mark.parametrize("headers", ["include", "targets/x86_64-linux/include"])
def test_toolkits(built: ModuleType, headers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's own layout, and conda's."""
    for path in (tmp_path / "bin" / "nvcc", tmp_path / headers / "cuda_runtime.h"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    library = tmp_path / headers.replace("include", "lib") / "libcudart_static.a"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.touch()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert built.find_cuda() == tmp_path
    assert f"-L{library.parent}" in built.link_cuda()


FAILING = """
#include <cstdio>
#include "views/photometric.h"

int main() {
  const fastcssl::views::Normalisation scale{{0, 0, 0}, {1, 1, 1}};
  const auto failure = fastcssl::views::photometric_cuda(nullptr, 1, 8, 8, nullptr, scale,
                                                         fastcssl::views::OutType::float32, nullptr, nullptr, nullptr);
  std::puts(explain("photometric", failure).c_str());
  std::puts(explain("enqueue", fastcssl::device::Failure{209, "write_keys"}).c_str());
}
"""


def test_a_launch_that_fails_says_why(tmp_path: Path) -> None:
    """CUDA's own run-time, where no card is visible: the launch fails, and the sentence has its words."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    (tmp_path / "main.cu").write_text(FAILING)
    kernels = [str(ROOT / "csrc" / path) for path in ("views/photometric_cuda.cu", "device/failure_cuda.cu")]
    flags = ["-std=c++17", "-arch=sm_80", f"-I{ROOT}/csrc", '-DFASTCSSL_CUDA_ARCHITECTURES="sm_80"']
    subprocess.run(["nvcc", *flags, str(tmp_path / "main.cu"), *kernels, "-o", str(tmp_path / "main")], check=True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([str(tmp_path / "main")], env=environment, capture_output=True, text=True, check=True)
    launch, image = done.stdout.splitlines()
    assert launch.startswith("photometric: CUDA refused sum_grey: ") and "(cudaError" in launch
    assert "Check the driver with nvidia-smi" in launch
    assert "write_keys: no kernel image is available" in image and "(cudaErrorNoKernelImageForDevice, 209)" in image
    assert "This library holds sm_80. Reinstall fastcssl with TORCH_CUDA_ARCH_LIST" in image
