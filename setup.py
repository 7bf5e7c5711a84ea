"""Builds the C++ and CUDA code in csrc: the codec for dataprep, the rest for fastcssl. Metadata is in pyproject.toml.

FASTCSSL_CUDA        1: require the CUDA toolkit; 0: build without CUDA; unset: use CUDA if nvcc is found
TORCH_CUDA_ARCH_LIST the architectures to compile for, as PyTorch reads it
"""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import Extension, setup

ARCHITECTURES = "8.0;8.6;8.9;9.0;10.0;12.0"
TORCH_FLOOR = "0x020d000000000000"  # 2.13, whose stable ABI the operators are compiled against
FLAGS = ["-O3", "-std=c++17", "-Wall", "-Wextra", "-fvisibility=hidden"]
PHOTOMETRIC = [f"csrc/views/photometric_{name}.cpp" for name in ("cpu", "avx2", "avx512")]
INFONCE = [f"csrc/infonce/infonce_{name}.cpp" for name in ("op", "cpu", "avx2", "avx512", "portable")]
KERNELS = ["csrc/views/photometric_cuda.cu", "csrc/infonce/infonce_cuda.cu"]


def find_cuda() -> Path | None:
    """Returns the root of the CUDA toolkit, or None to build without CUDA."""
    wish = os.environ.get("FASTCSSL_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"FASTCSSL_CUDA is {wish!r}; use 1 (require CUDA), 0 (leave it out) or unset it.")
    if wish == "0":
        return None
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    on_path = shutil.which("nvcc")
    if on_path:
        homes.insert(0, str(Path(on_path).resolve().parent.parent))
    for home in filter(None, homes):
        if (Path(home) / "bin" / "nvcc").exists() and (Path(home) / "include" / "cuda_runtime.h").exists():
            return Path(home)
    if wish == "1":
        raise SystemExit(
            "FASTCSSL_CUDA=1 but no CUDA toolkit was found. Put nvcc on PATH or set CUDA_HOME, or unset FASTCSSL_CUDA."
        )
    return None


def architectures() -> list[str]:
    """Returns the GPU architectures to compile for, such as "80"."""
    wish = os.environ.get("TORCH_CUDA_ARCH_LIST", ARCHITECTURES)
    return [arch.removesuffix("+PTX").replace(".", "") for arch in wish.replace(" ", ";").split(";") if arch]


class BuildExt(build_ext):
    """Compiles .cu files with nvcc. They include no torch headers, so nvcc needs no other flags."""

    def build_extension(self, ext: Extension) -> None:
        kernels = [source for source in ext.sources if source.endswith(".cu")]
        ext.sources = [source for source in ext.sources if not source.endswith(".cu")]
        ext.extra_objects = [*ext.extra_objects, *map(self.compile_kernel, kernels)]
        super().build_extension(ext)

    def compile_kernel(self, source: str) -> str:
        """Compiles one .cu file and returns the object file."""
        home = find_cuda()
        assert home is not None
        target = Path(self.build_temp) / Path(source).with_suffix(".o")
        target.parent.mkdir(parents=True, exist_ok=True)
        archs = architectures()
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        newest = max(archs, key=lambda arch: int(arch.rstrip("af")))
        codes.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
        defines = [f'-DFASTCSSL_CUDA_ARCHITECTURES="{";".join(archs)}"']
        command = [str(home / "bin" / "nvcc"), "-c", source, "-o", str(target), "-std=c++17", "-O3", "--threads=2"]
        subprocess.run([*command, *codes, *defines, "-Xcompiler=-fPIC,-fvisibility=hidden"], check=True)
        return str(target)


def link_cuda() -> list[str]:
    """Returns the linker's flags for CUDA, or [] without CUDA."""
    home = find_cuda()
    return [f"-L{home}/lib64", "-lcudart_static", "-ldl", "-lrt", "-lpthread"] if home else []


def codec() -> Extension:
    """Returns dataprep's JPEG codec."""
    sources = [f"csrc/codec/{name}.cpp" for name in ("jpeg", "resize", "transcode", "module")]
    return Pybind11Extension("dataprep._codec", sources, libraries=["jpeg"], extra_compile_args=FLAGS)


def native() -> Extension:
    """Returns the engine of the native loader."""
    sources = ["csrc/register.cpp", "csrc/device/device_cuda.cu" if find_cuda() else "csrc/device/device_cpu.cpp"]
    sources += ["csrc/codec/jpeg.cpp", "csrc/codec/resize.cpp"]
    sources += ["csrc/views/cropper.cpp", "csrc/views/engine.cpp", *PHOTOMETRIC]
    return Pybind11Extension(
        "fastcssl.data._native",
        sources,
        include_dirs=["csrc"],
        libraries=["jpeg"],
        extra_compile_args=FLAGS,
        extra_link_args=link_cuda(),
    )


def ops() -> Extension:
    """Returns the torch operators, built on torch's stable ABI: a library that torch loads, not a Python module."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise SystemExit("Building fastcssl needs torch. Install it first, then build with --no-build-isolation.")
    root = Path(torch.origin).parent
    return Extension(
        "fastcssl.ops._ops",
        ["csrc/ops.cpp", *PHOTOMETRIC, *INFONCE, *(KERNELS if find_cuda() else [])],
        include_dirs=["csrc"],
        define_macros=[("TORCH_TARGET_VERSION", TORCH_FLOOR), *([("FASTCSSL_WITH_CUDA", "1")] if find_cuda() else [])],
        libraries=["torch_cpu"],
        library_dirs=[str(root / "lib")],
        extra_compile_args=[*FLAGS, "-isystem", str(root / "include")],
        extra_link_args=link_cuda(),
        language="c++",
    )


setup(ext_modules=[codec(), native(), ops()], cmdclass={"build_ext": BuildExt})
