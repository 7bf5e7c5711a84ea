"""Builds the C++ and CUDA code in csrc: the codec for dataprep, the rest for fastcssl. Metadata is in pyproject.toml.

FASTCSSL_CUDA        1: require the CUDA toolkit; 0: build without CUDA; unset: use CUDA if nvcc is found
TORCH_CUDA_ARCH_LIST the architectures to compile for, as PyTorch reads it ("8.0;9.0+PTX", "Ampere;Hopper"). The build
                     leaves out what the kernels or nvcc cannot do, and says so. PTX of the newest is always added.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import Extension, setup

ARCHITECTURES = "8.0;8.6;8.9;9.0;10.0;12.0"
LEAST = 80  # the kernels use asynchronous copies and tensor cores for bfloat16 and TF32; as in fastcssl/ops/cards.py
NAMED = {
    "Kepler": "3.5",
    "Maxwell": "5.0 5.2",
    "Pascal": "6.0 6.1",
    "Volta": "7.0",
    "Turing": "7.5",
    "Ampere": "8.0 8.6",
    "Ada": "8.9",
    "Hopper": "9.0",
    "Blackwell": "10.0 12.0",
}
TORCH_FLOOR = "0x020d000000000000"  # 2.13: the stable ABI that the operators are compiled against
FLAGS = ["-O3", "-std=c++17", "-Wall", "-Wextra", "-fvisibility=hidden"]
PHOTOMETRIC = [f"csrc/views/photometric_{name}.cpp" for name in ("cpu", "avx2", "avx512")]
INFONCE = [f"csrc/infonce/infonce_{name}.cpp" for name in ("op", "cpu", "avx2", "avx512", "portable")]
KERNELS = ["csrc/views/photometric_cuda.cu", "csrc/infonce/infonce_cuda.cu", "csrc/device/failure_cuda.cu"]
TARGET = "targets/x86_64-linux"  # where conda's toolkit keeps its headers and libraries


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
        headers = [Path(home) / folder / "cuda_runtime.h" for folder in ("include", f"{TARGET}/include")]
        if (Path(home) / "bin" / "nvcc").exists() and any(header.exists() for header in headers):
            return Path(home)
    if wish == "1":
        raise SystemExit(
            "FASTCSSL_CUDA=1 but no CUDA toolkit was found. Put nvcc on PATH or set CUDA_HOME, or unset FASTCSSL_CUDA."
        )
    return None


@dataclass(frozen=True)
class Architectures:
    """What the kernels are compiled for, as 86 for 8.6, and sentences about what was asked for but is not."""

    codes: tuple[int, ...]
    ptx: tuple[int, ...]
    remarks: tuple[str, ...]

    def flags(self) -> list[str]:
        codes = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in self.codes]
        return [*codes, *(f"-gencode=arch=compute_{each},code=compute_{each}" for each in self.ptx)]

    def named(self) -> str:
        """Returns the list that the library tells of itself: sm_ is machine code, compute_ is PTX."""
        return ";".join([*(f"sm_{each}" for each in self.codes), *(f"compute_{each}" for each in self.ptx)])


def architectures(wish: str, known: frozenset[int] = frozenset()) -> Architectures:
    """Reads a list as PyTorch does and leaves out what cannot be compiled; `known` to nvcc, empty if it did not say."""
    codes, ptx, remarks = set(), set(), []
    words = [word for word in re.split(r"[;,\s]+", wish) if word]
    for word in words:
        name, _, suffix = word.partition("+")
        numbers = NAMED.get(name.capitalize(), name).split()
        read = [re.fullmatch(r"(\d+)\.(\d)([af]?)", number) for number in numbers]
        if suffix not in ("", "PTX") or None in read:
            raise SystemExit(
                f"TORCH_CUDA_ARCH_LIST has {word!r}; use numbers such as 8.6 or 9.0+PTX, or {', '.join(NAMED)}."
            )
        for found in filter(None, read):
            code = int(found[1] + found[2])
            label = word if name == found[0] else f"{found[1]}.{found[2]} ({name})"
            if code < LEAST:
                remarks.append(f"{label} is left out: the kernels need 8.0; such cards run plain torch")
            elif known and code not in known:
                remarks.append(f"{label} is left out: this nvcc does not know it")
            else:
                if found[3]:
                    remarks.append(f"{label} is compiled as {found[1]}.{found[2]}, which more cards can run")
                codes.add(code)
                ptx |= {code} if suffix else set()
    if not codes:
        raise SystemExit(
            f"TORCH_CUDA_ARCH_LIST is {wish!r}, of which nothing can be compiled: {'; '.join(remarks)}. "
            "Name the capability of your card if it is 8.0 or later, or leave CUDA out with FASTCSSL_CUDA=0."
        )
    return Architectures(tuple(sorted(codes)), tuple(sorted(ptx | {max(codes)})), tuple(remarks))


@cache
def chosen_architectures(nvcc: Path) -> Architectures:
    """Returns those of the environment, and says once what was left out."""
    listed = subprocess.run([str(nvcc), "--list-gpu-arch"], capture_output=True, text=True)
    known = frozenset(int(number) for number in re.findall(r"compute_(\d+)$", listed.stdout, re.MULTILINE))
    chosen = architectures(os.environ.get("TORCH_CUDA_ARCH_LIST") or ARCHITECTURES, known)
    for remark in chosen.remarks:
        sys.stderr.write(f"fastcssl: {remark}.\n")
    return chosen


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
        nvcc = home / "bin" / "nvcc"
        chosen = chosen_architectures(nvcc)
        defines = [f'-DFASTCSSL_CUDA_ARCHITECTURES="{chosen.named()}"']
        command = [str(nvcc), "-c", source, "-o", str(target), "-std=c++17", "-O3", "--threads=2"]
        subprocess.run([*command, *chosen.flags(), *defines, "-Xcompiler=-fPIC,-fvisibility=hidden"], check=True)
        return str(target)


def link_cuda() -> list[str]:
    """Returns the linker's flags for CUDA, or [] without CUDA."""
    home = find_cuda()
    if home is None:
        return []
    folders = [home / folder for folder in ("lib64", f"{TARGET}/lib", "lib")]
    found = [f"-L{folder}" for folder in folders if (folder / "libcudart_static.a").exists()]
    return [*found, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


def codec() -> Extension:
    """Returns dataprep's JPEG codec."""
    sources = [f"csrc/codec/{name}.cpp" for name in ("jpeg", "resize", "transcode", "module")]
    return Pybind11Extension("dataprep._codec", sources, libraries=["jpeg"], extra_compile_args=FLAGS)


def native() -> Extension:
    """Returns the engine of the native loader."""
    sources = ["csrc/register.cpp", "csrc/device/device_cuda.cu" if find_cuda() else "csrc/device/device_cpu.cpp"]
    sources += ["csrc/codec/jpeg.cpp", "csrc/codec/resize.cpp"]
    sources += ["csrc/views/cropper.cpp", "csrc/views/engine.cpp", "csrc/views/mapped_file.cpp", *PHOTOMETRIC]
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
