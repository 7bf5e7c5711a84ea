"""What nvcc makes of the InfoNCE kernels for each architecture: registers, spills, shared memory, instructions."""

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from emulator import emulate

KERNEL = emulate.CSRC / "infonce" / "infonce_cuda.cu"
TILES = emulate.CSRC / "infonce" / "infonce_tiles.h"
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# Of a multiprocessor, and of one block.
SHARED_BYTES = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}
BLOCK_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
RESERVED_BYTES = 1 << 10  # a block, for the system
NUM_SWEEPS = 22  # 3 types x 3 widths x 2 precisions, and 4 for few rows
SMALL = {"combine_splits": 64, "write_keys": 64, "move_pointers": 64}  # registers


def tiles() -> dict[str, dict[str, int]]:
    names = re.findall(r"^  int (\w+);", TILES.read_text(), re.MULTILINE)
    assert names == ["dim", "warps", "row_tiles", "keys", "stages", "blocks", "registers"]
    rows = re.findall(r"^constexpr Tile k(\w+)\{([\d, ]+)\};", TILES.read_text(), re.MULTILINE)
    return {name: dict(zip(names, map(int, row.split(",")), strict=True)) for name, row in rows}


def sweep_of(symbol: str) -> tuple[str, bool, int, bool] | None:
    match = re.search(r"sweep_banksI(\d*)(f|__half|__nv_bfloat16)Lb(\d)ELi(\d+)ELb(\d)E", symbol)
    return (match[2], match[3] == "1", int(match[4]), match[5] == "1") if match else None


def tile_of(kind: str, exact: bool, dim: int, few: bool) -> dict[str, int]:
    """As in the header."""
    table = tiles()
    name = "Float" if kind == "f" else "Half"
    name += "Exact" if exact and f"{name}Exact{dim}" in table else "Few" if few and dim < 256 else ""
    return table[f"{name}{dim}"]


def shared_bytes(tile: dict[str, int], kind: str, exact: bool) -> int:
    element = 4 if kind == "f" else 2
    rows = tile["warps"] * tile["row_tiles"] * 16
    return (
        tile["stages"] * tile["keys"] * tile["dim"] * element + rows * tile["dim"] * (4 if exact else element) + 8 * 24
    )


def compiled(architecture: int) -> tuple[Path, str]:
    """The cubin and what ptxas says of it; once for a given content of the sources."""
    source = KERNEL.read_text()
    command = ["nvcc", "-cubin", "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-Xptxas=-v", "-Werror=all-warnings"]
    digest = hashlib.sha256("\0".join([source, *command]).encode())
    for header in sorted(emulate.headers_of(source, KERNEL.parent, [])):
        digest.update(header.read_bytes())
    folder = emulate.CACHE / f"cubin-{architecture}-{digest.hexdigest()[:24]}"
    if not folder.exists():
        emulate.CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=emulate.CACHE) as scratch:
            target = Path(scratch) / "result"
            target.mkdir()
            done = subprocess.run([*command, str(KERNEL), "-o", str(target / "cubin")], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:5000]
            (target / "log").write_text(done.stderr)
            target.rename(folder)
    return folder / "cubin", (folder / "log").read_text()


@cache
def all_compiled() -> dict[int, tuple[Path, str]]:
    emulate.need_nvcc()
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(ARCHITECTURES, pool.map(compiled, ARCHITECTURES), strict=True))


def disassembler() -> str:
    """nvdisasm of the toolkit, or of the package nvidia-cuda-nvdisasm."""
    if found := shutil.which("nvdisasm"):
        return found
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
        return str(next(file for file in files if file.name == "nvdisasm").locate())
    except importlib.metadata.PackageNotFoundError:
        if os.environ.get("FASTCSSL_REQUIRE_BACKENDS") == "1":
            pytest.fail("nvidia-cuda-nvdisasm is required here but is not installed")
        pytest.skip("nvdisasm is neither on PATH nor installed (nvidia-cuda-nvdisasm)")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_resources(architecture: int) -> None:
    """No spill, no stack; registers within the header's budget, which lets the wanted number of blocks reside; shared
    memory within what a block may have."""
    log = all_compiled()[architecture][1]
    pattern = (
        r"Function properties for (\S+)\n\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r"\n.*?Used (\d+) registers"
    )
    kernels = {match[1]: [int(n) for n in match.groups()[1:]] for match in re.finditer(pattern, log)}
    assert sum(sweep_of(symbol) is not None for symbol in kernels) == NUM_SWEEPS
    assert len(kernels) == NUM_SWEEPS + len(SMALL)
    for symbol, (stack, stores, loads, registers) in kernels.items():
        where = f"sm_{architecture} {symbol}: {registers} registers"
        assert stack == stores == loads == 0, where
        sweep = sweep_of(symbol)
        if sweep is None:
            assert registers <= next(most for name, most in SMALL.items() if name in symbol), where
            continue
        kind, exact, dim, few = sweep
        tile = tile_of(kind, exact, dim, few)
        allocated = -(-registers // 8) * 8  # registers come in eights
        assert registers <= tile["registers"], where
        assert tile["blocks"] * tile["warps"] * 32 * allocated <= 65536, where
        assert shared_bytes(tile, kind, exact) <= BLOCK_BYTES[architecture], where


def test_blocks_that_shared_memory_allows() -> None:
    """The usual widths keep two blocks on the smallest multiprocessor, so that one multiplies while the other one takes
    exponentials."""
    for kind, exact, dim in (("__half", False, 64), ("__half", False, 128), ("f", False, 64)):
        tile = tile_of(kind, exact, dim, False)
        assert 2 * (shared_bytes(tile, kind, exact) + RESERVED_BYTES) <= SHARED_BYTES[86], (kind, dim)
    for kind in ("__half", "f"):
        tile = tile_of(kind, True, 64, False)
        assert 3 * (shared_bytes(tile, kind, True) + RESERVED_BYTES) <= SHARED_BYTES[86], kind


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_instructions(architecture: int) -> None:
    """Tensor cores, matrix loads and asynchronous copies, and as many products as the shape of a tile asks for: the
    compiler has neither replaced nor repeated any. No access to local memory."""
    command = [disassembler(), "-c", str(all_compiled()[architecture][0])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    functions = re.split(r"\n\s*\.section\s+\.text\.", done.stdout)[1:]
    sweeps = 0
    for function in functions:
        symbol = function.split(",")[0].strip('"')
        opcodes = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", function)
        assert not [opcode for opcode in opcodes if opcode.startswith(("STL", "LDL"))], symbol
        sweep = sweep_of(symbol)
        if sweep is None:
            continue
        sweeps += 1
        kind, exact, dim, few = sweep
        tile, where = tile_of(kind, exact, dim, few), f"sm_{architecture} {symbol}"
        depth, name = (8, "HMMA.1688.F32.TF32") if kind == "f" else (16, "HMMA.16816.F32")
        parts = {"f": 3, "__half": 2, "__nv_bfloat16": 3}[kind] if exact else 1
        products = [opcode for opcode in opcodes if opcode.startswith("HMMA")]
        assert all(opcode.startswith(name) for opcode in products), where
        assert all(opcode.endswith(".BF16") == (kind == "__nv_bfloat16") for opcode in products if kind != "f"), where
        # The loop over columns is not unrolled fully where numbers are split.
        steps = 2 if exact else dim // depth
        logits = steps * tile["keys"] // 8 * tile["row_tiles"] * parts
        means = tile["keys"] // depth * dim // 8 * tile["row_tiles"] * parts
        assert len(products) == logits + means, (where, len(products), logits, means)
        loads = [opcode for opcode in opcodes if opcode.startswith("LDSM")]
        transposed = [opcode for opcode in loads if "MT88" in opcode or ".T" in opcode]
        assert len(loads) - len(transposed) == steps * tile["keys"] // 16, where
        assert len(transposed) == (0 if kind == "f" else means // tile["row_tiles"] // parts // 2), where
        copies = sum(opcode.startswith("LDGSTS") for opcode in opcodes)
        assert copies >= tile["keys"] * tile["dim"] * (4 if kind == "f" else 2) // 16 // (tile["warps"] * 32), where
        assert "MUFU.EX2" in opcodes and any(opcode.startswith("LDGDEPBAR") for opcode in opcodes), where
    assert sweeps == NUM_SWEEPS
