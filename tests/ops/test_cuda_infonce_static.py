"""What nvcc has made of the InfoNCE kernels for each architecture: registers, spills, shared memory, instructions."""

import importlib.metadata
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from emulator import emulate

import fastcssl

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


def tool(name: str) -> str:
    """cuobjdump or nvdisasm: of the toolkit, or of its package, for which no GPU or driver is needed."""
    if found := shutil.which(name):
        return found
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
        return str(next(file for file in files if file.name == name).locate())
    except importlib.metadata.PackageNotFoundError:
        if os.environ.get("FASTCSSL_REQUIRE_BACKENDS") == "1":
            pytest.fail(f"nvidia-cuda-{name} is required here but is not installed")
        pytest.skip(f"{name} is neither on PATH nor installed (nvidia-cuda-{name})")


def output_of(command: list[str], folder: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[:5000]
    return done.stdout


def built(folder: Path) -> dict[int, Path]:
    """The code in the library that was built, of each architecture; nothing, if that is older than the sources."""
    sources = [KERNEL, *emulate.headers_of(KERNEL.read_text(), KERNEL.parent, [])]
    newest = max(source.stat().st_mtime for source in sources)
    for library in Path(fastcssl.__file__).parent.glob("ops/_ops*.so"):
        if library.stat().st_mtime > newest:
            subprocess.run([tool("cuobjdump"), "-xelf", "all", str(library)], cwd=folder, capture_output=True)
    cubins = [path for path in folder.glob("*.cubin") if b"sweep_banks" in path.read_bytes()]
    return {int(path.name.split(".sm_")[1].split(".")[0]): path for path in cubins}


def compiled(architecture: int, folder: Path) -> Path:
    target = folder / f"{architecture}.cubin"
    output_of(["nvcc", "-cubin", "-std=c++17", "-O3", f"-arch=sm_{architecture}", str(KERNEL), "-o", str(target)])
    return target


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The code for each architecture: what was built for use, where it is up to date; else compiled here."""
    folder = tmp_path_factory.mktemp("cubins")
    found = built(folder)
    missing = [architecture for architecture in ARCHITECTURES if architecture not in found]
    if missing:
        emulate.need_nvcc()
        with ThreadPoolExecutor(2) as pool:
            made = pool.map(lambda architecture: compiled(architecture, folder), missing)
            found.update(zip(missing, made, strict=True))
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_resources(architecture: int, cubins: dict[int, Path]) -> None:
    """No stack, and so no spill; registers within the header's budget, which lets the wanted number of blocks reside;
    shared memory within what a block may have."""
    usage = output_of([tool("cuobjdump"), "-res-usage", str(cubins[architecture])])
    pattern = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    kernels = {match[1]: [int(n) for n in match.groups()[1:]] for match in re.finditer(pattern, usage)}
    assert sum(sweep_of(symbol) is not None for symbol in kernels) == NUM_SWEEPS
    assert len(kernels) == NUM_SWEEPS + len(SMALL)
    for symbol, (registers, stack, shared, local) in kernels.items():
        where = f"sm_{architecture} {symbol}: {registers} registers"
        assert stack == local == 0 and shared <= 48 << 10, where
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
def test_instructions(architecture: int, cubins: dict[int, Path]) -> None:
    """Tensor cores, matrix loads and asynchronous copies, and as many products as the shape of a tile asks for: the
    compiler has neither replaced nor repeated any. No access to local memory."""
    text = output_of([tool("nvdisasm"), "-c", str(cubins[architecture])])
    functions = re.split(r"\n\s*\.section\s+\.text\.", text)[1:]
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
