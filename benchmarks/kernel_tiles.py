"""The tiles of the CUDA sweep, read from its header, so that the model cannot speak of another kernel."""

import functools
import re
from pathlib import Path
from typing import Literal, NamedTuple

HEADER = Path(__file__).parent.parent / "csrc" / "infonce" / "infonce_tiles.h"
Storage = Literal["float16", "bfloat16", "float32"]
Precision = Literal["high", "highest"]  # torch's words: operands rounded once, or kept whole as sums of several

# Shared memory of a multiprocessor, by compute capability; a block takes one kB more than it asks for.
SHARED_BYTES = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}


class Tile(NamedTuple):
    dim: int
    warps: int
    row_tiles: int  # of 16 rows, of one warp
    keys: int  # of one turn of the loop
    stages: int
    blocks: int  # on a multiprocessor, as registers allow
    registers: int

    @property
    def rows(self) -> int:
        return self.warps * self.row_tiles * 16

    def shared_bytes(self, storage: Storage, precision: Precision) -> int:
        element = 4 if storage == "float32" else 2
        query = 4 if precision == "highest" else element
        return self.stages * self.keys * self.dim * element + self.rows * (self.dim * query + 8 + 4)

    def products(self, storage: Storage, precision: Precision) -> int:
        """Of parts of operands, for one of their own: 3xTF32; queries and weights as two float16 or three bfloat16."""
        return 1 if precision == "high" else 2 if storage == "float16" else 3

    def tensor_instructions(self, storage: Storage, precision: Precision) -> int:
        """Of one warp for one tile of keys: both products, 16 x 8 results each, 16 halves or 8 TF32 numbers deep."""
        depth = 8 if storage == "float32" else 16
        return 2 * self.row_tiles * (self.keys // 8) * (self.dim // depth) * self.products(storage, precision)

    def blocks_per_sm(self, storage: Storage, precision: Precision, architecture: int) -> int:
        fitting = SHARED_BYTES[architecture] // (self.shared_bytes(storage, precision) + 1024)
        return max(1, min(self.blocks, fitting))


class Tiles:
    """What the header says."""

    def __init__(self, text: str) -> None:
        found = re.findall(r"constexpr Tile k(\w+)\{([^}]*)\};", text)
        self.by_name = {name: Tile(*(int(value) for value in values.split(","))) for name, values in found}
        self.constants = {name: int(value) for name, value in re.findall(r"constexpr int k(\w+) = (\d+);", text)}
        if not self.by_name or "FewRows" not in self.constants:
            raise ValueError(f"{HEADER} holds no tiles as they were; kernel_tiles.py wants to be told.")

    def choose(self, num_rows: int, dim: int, storage: Storage, precision: Precision) -> Tile:
        """As tile_of does."""
        padded = 64 if dim <= 64 else 128 if dim <= 128 else 256
        kind = "Float" if storage == "float32" else "HalfExact" if precision == "highest" else "Half"
        if kind == "Half" and num_rows <= self.constants["FewRows"] and padded < 256:
            kind = "HalfFew"
        return self.by_name[f"{kind}{padded}"]


@functools.cache
def tiles() -> Tiles | None:
    """None where csrc has no CUDA sweep."""
    return Tiles(HEADER.read_text()) if HEADER.exists() else None
