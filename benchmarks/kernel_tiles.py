"""Reads the tiles of the CUDA sweep from its own header with a C++ compiler, so that the model always describes the
kernel in csrc."""

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

HEADER = Path(__file__).parent.parent / "csrc" / "infonce" / "infonce_tiles.h"
Storage = Literal["float16", "bfloat16", "float32"]
Precision = Literal["high", "highest"]  # torch's words: operands are rounded once, or exact sums of several

# Shared memory per multiprocessor, by compute capability. A block takes 1 kB more than it requests.
SHARED_BYTES = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}

PROGRAM = """
#include <cstdio>
#include <initializer_list>
#include HEADER
int main() {
  using namespace fastcssl::infonce;
  for (int bytes : {2, 4})
    for (int exact : {0, 1})
      for (int dim : {64, 128, 256})
        for (int few : {0, 1}) {
          const Tile t = tile_of(bytes, exact, dim, few);
          std::printf("%d %d %d %d  %d %d %d %d %d %d %d %d\\n", bytes, exact, dim, few, t.dim, t.warps, t.row_tiles,
                      t.keys, t.blocks, static_cast<int>(sweep_shared_bytes(t, bytes, exact)),
                      max_split_keys(exact, dim), kFewRows);
        }
}
"""


class Tile(NamedTuple):
    dim: int
    warps: int
    row_tiles: int  # per warp, of 16 rows each
    keys: int  # per iteration of the loop
    blocks: int  # per multiprocessor, as registers allow
    shared_bytes: int
    max_split_keys: int
    few_rows: int  # a sweep with at most this many rows has few rows
    is_few: bool = False

    @property
    def rows(self) -> int:
        return self.warps * self.row_tiles * 16

    def tensor_instructions(self, storage: Storage, precision: Precision) -> int:
        """Returns the instructions of one warp for one tile of keys.

        They cover both products. Each gives 16 x 8 results and is 16 halves or 8 TF32 numbers deep.
        """
        depth = 8 if storage == "float32" else 16
        return 2 * self.row_tiles * (self.keys // 8) * (self.dim // depth) * products(storage, precision)

    def blocks_per_sm(self, architecture: int) -> int:
        return max(1, min(self.blocks, SHARED_BYTES[architecture] // (self.shared_bytes + 1024)))


def products(storage: Storage, precision: Precision) -> int:
    """Returns the number of partial products per product: 3xTF32, or queries and weights as two or three halves."""
    return 1 if precision == "high" else 2 if storage == "float16" else 3


class Tiles:
    def __init__(self, printed: str) -> None:
        self._found: dict[tuple[int, ...], Tile] = {}
        for line in printed.splitlines():
            numbers = [int(word) for word in line.split()]
            self._found[tuple(numbers[:4])] = Tile(*numbers[4:])  # type: ignore[arg-type]

    def choose(self, num_rows: int, dim: int, storage: Storage, precision: Precision) -> Tile:
        """Returns the tile that the launch chooses.

        Only half-precision sweeps of one product, narrower than 256, have special tiles for few rows.
        """
        padded = 64 if dim <= 64 else 128 if dim <= 128 else 256
        key = (4 if storage == "float32" else 2, int(precision == "highest"), padded)
        many, few = self._found[*key, 0], self._found[*key, 1]
        return few._replace(is_few=True) if few != many and num_rows <= many.few_rows else many


@functools.cache
def tiles() -> Tiles | str:
    """Returns the tiles, or why they are not known."""
    if not HEADER.exists():
        return "csrc/infonce has no CUDA sweep"
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return "there is no C++ compiler on PATH to read the kernel's tiles"
    with tempfile.TemporaryDirectory(prefix="fastcssl-tiles-") as folder:
        program = Path(folder) / "tiles"
        command = [compiler, "-std=c++17", "-xc++", "-", f'-DHEADER="{HEADER}"', "-o", str(program)]
        built = subprocess.run(command, input=PROGRAM, capture_output=True, text=True, timeout=120)
        if built.returncode:
            said = next((line for line in built.stderr.splitlines() if "error" in line), "no reason given")
            return f"{HEADER.name} does not answer kernel_tiles.py any more: {said}"
        return Tiles(subprocess.run([str(program)], capture_output=True, text=True, timeout=20, check=True).stdout)
