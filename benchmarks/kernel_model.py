"""Predicts the time of the CUDA kernel on GPUs. This is a model: nobody has run the kernel on these cards.

    python benchmarks/kernel_model.py

Bytes, FLOP, exps and instructions are counted from the problem, from the tiles in csrc/infonce and, if cuobjdump and a
build with CUDA are available, from the machine code. A card's rates turn each count into a time. The sweep takes the
longest of these times, extended because the last wave of blocks is not full. The kernel launches are added. Rates are
the makers' dense ones at boost clock; a real kernel reaches 60 to 75 % of them.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from kernel_sass import LoopMix, Sweep, sweeps
from kernel_tiles import Precision, Storage, Tile, Tiles, products, tiles
from rich import box
from rich.console import Console
from rich.table import Table

LABEL = "predicted, never measured"
LAUNCH_SECONDS = 4e-6  # until a kernel starts that waits for the previous one
NUM_LAUNCHES = 2  # the sweep, and the pass that combines its parts


class Card(NamedTuple):
    name: str
    architecture: int
    num_sm: int
    clock_hz: float  # boost
    half_flop_per_s: float  # dense tensor cores, float32 sums
    tf32_flop_per_s: float
    bytes_per_s: float
    mma_share: float  # share of the tensor rate that mma.sync can reach; newer cards have other instructions
    exps_per_clock: int = 16  # per multiprocessor


# mma_share is an assumption. For the H100, it is what FlashAttention 2 and public micro-benchmarks suggest. For the
# B200, it assumes the A100's rate per multiprocessor and clock.
CARDS = (
    Card("A5000", 86, 64, 1.695e9, 111.1e12, 55.6e12, 768e9, 1.0),
    Card("A100", 80, 108, 1.41e9, 312e12, 156e12, 2039e9, 1.0),
    Card("RTX 4090", 89, 128, 2.52e9, 165.2e12, 82.6e12, 1008e9, 1.0),
    Card("H100", 90, 132, 1.83e9, 989.4e12, 494.7e12, 3350e9, 0.62),
    Card("B200", 100, 148, 1.85e9, 2250e12, 1125e12, 8000e9, 0.25),
    Card("RTX 5090", 120, 170, 2.407e9, 209.5e12, 104.8e12, 1792e9, 1.0),
)


class Work(NamedTuple):
    """The work of a sweep for one problem, with tiles padded to full size."""

    flop: int  # on the tensor cores
    exps: int
    bytes: int  # from and to the card's memory
    num_splits: int
    wave_share: float  # share of the card that the blocks fill, including the last wave
    key_tiles: int  # in all blocks


class Case(NamedTuple):
    num_rows: int
    dim: int
    storage: Storage = "float16"
    precision: Precision = "high"
    bank_sizes: tuple[int, ...] = (65_536, 65_536)


def best_splits(row_blocks: int, slots: int, least: int, most: int) -> int:
    """Returns the number of splits that the launch chooses: the fewest that fill the card about as well as any."""

    def filling(splits: int) -> float:
        blocks = row_blocks * splits
        return blocks / (math.ceil(blocks / slots) * slots)

    enough = 0.95 * max(filling(splits) for splits in range(least, most + 1))
    return next((splits for splits in range(least, most) if filling(splits) >= enough), most)


def work(card: Card, tile: Tile, case: Case) -> Work:
    row_blocks = math.ceil(case.num_rows / tile.rows)
    key_tiles = sum(math.ceil(size / tile.keys) for size in case.bank_sizes)
    slots = card.num_sm * tile.blocks_per_sm(card.architecture)
    least = math.ceil(sum(case.bank_sizes) / tile.max_split_keys)
    num_splits = best_splits(row_blocks, slots, least, max(least, min(math.ceil(key_tiles / 4), slots)))
    blocks = row_blocks * num_splits
    pairs = row_blocks * tile.rows * key_tiles * tile.keys
    # Row blocks that run together share their keys in L2. Those of a later wave read them again.
    bank_bytes = sum(case.bank_sizes) * case.dim * (4 if case.storage == "float32" else 2)
    parts = (
        2 * num_splits * case.num_rows * (case.dim + 2) * 4
    )  # written by the sweep, read by the pass that combines them
    own = 4 * case.num_rows * case.dim * 4  # queries, positives, two gradients
    return Work(
        flop=4 * pairs * tile.dim * products(case.storage, case.precision),
        exps=pairs,
        bytes=bank_bytes * math.ceil(row_blocks / slots) + parts + own,
        num_splits=num_splits,
        wave_share=blocks / (math.ceil(blocks / slots) * slots),
        key_tiles=row_blocks * key_tiles,
    )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    card: str
    storage: Storage
    precision: Precision
    num_rows: int
    dim: int
    bank_sizes: tuple[int, ...]
    flop: int
    exps: int
    bytes: int
    num_splits: int
    wave_share: float
    tensor_us: float
    memory_us: float
    exp_us: float
    issue_us: float | None  # None without machine code to count
    instructions: dict[str, int] | None  # per iteration of the loop, in one warp
    launch_us: float
    total_us: float
    bound: str
    eager_us: float
    label: str = LABEL


def predict(card: Card, tiles: Tiles, case: Case, mixes: Mapping[Sweep, LoopMix] | None = None) -> Prediction:
    tile = tiles.choose(case.num_rows, case.dim, case.storage, case.precision)
    done = work(card, tile, case)
    rate = (card.tf32_flop_per_s if case.storage == "float32" else card.half_flop_per_s) * card.mma_share
    seconds = {
        "tensor": done.flop / rate,
        "memory": done.bytes / card.bytes_per_s,
        "exp": done.exps / (card.exps_per_clock * card.num_sm * card.clock_hz),
    }
    instance = Sweep(card.architecture, case.storage, case.precision == "highest", tile.dim, tile.is_few)
    mix = (mixes or {}).get(instance)
    if mix is not None:
        # The compiler may unroll the loop. Its tensor instructions tell how many tiles an iteration processes.
        turn_tiles = mix.counts["tensor"] / tile.tensor_instructions(case.storage, case.precision)
        issued = mix.total / turn_tiles * tile.warps * done.key_tiles
        seconds["issue"] = issued / (4 * card.num_sm * card.clock_hz)  # a multiprocessor issues four per clock
    launch = NUM_LAUNCHES * LAUNCH_SECONDS
    # A card that is not full computes less, but part of it can still saturate the memory.
    sweep = {name: each if name == "memory" else each / done.wave_share for name, each in seconds.items()}
    bound = max(sweep, key=sweep.__getitem__)
    return Prediction(
        card=card.name,
        **case._asdict(),
        flop=done.flop,
        exps=done.exps,
        bytes=done.bytes,
        num_splits=done.num_splits,
        wave_share=done.wave_share,
        tensor_us=seconds["tensor"] * 1e6,
        memory_us=seconds["memory"] * 1e6,
        exp_us=seconds["exp"] * 1e6,
        issue_us=seconds["issue"] * 1e6 if mix else None,
        instructions=mix.counts if mix else None,
        launch_us=launch * 1e6,
        total_us=(sweep[bound] + launch) * 1e6,
        bound="launch" if launch > sweep[bound] else bound,
        eager_us=_eager_seconds(card, case) * 1e6,
    )


def _eager_seconds(card: Card, case: Case) -> float:
    """Returns the time of eager torch under autocast: about 17 passes over float32 logits, and products in half."""
    pairs = case.num_rows * sum(case.bank_sizes)
    return 17 * 4 * pairs / card.bytes_per_s + 4 * pairs * case.dim / card.half_flop_per_s


SHAPES = ((256, 128), (512, 128), (1024, 128), (512, 256))
MODES: dict[tuple[Storage, Precision], str] = {
    ("float16", "high"): "half",
    ("float16", "highest"): "half, exact",
    ("float32", "high"): "TF32",
    ("float32", "highest"): "3xTF32",
}


def predictions(shapes: tuple[tuple[int, int], ...] = SHAPES) -> list[dict[str, Any]]:
    """Returns predictions for every card, (rows, width) and storage, or none if the tiles are not known."""
    found = tiles()
    if isinstance(found, str):
        return []
    return [
        asdict(predict(card, found, Case(rows, dim, storage, precision), sweeps()))
        for rows, dim in shapes
        for storage, precision in MODES
        for card in CARDS
    ]


def as_table(lines: list[dict[str, Any]]) -> Table:
    title = f"\nCUDA, two banks of 65,536 keys, µs with {NUM_LAUNCHES} launches: {LABEL}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("rows x width", no_wrap=True)
    table.add_column("card", no_wrap=True)
    for head in ("tensor", "memory", "exp", "issue", "total", "bound", "eager"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, style="dim")
    before = ""
    for line in lines:
        about = f"{line['num_rows']} x {line['dim']}, {MODES[line['storage'], line['precision']]}"
        if before and about != before:
            table.add_section()
        times = [line[f"{key}_us"] for key in ("tensor", "memory", "exp", "issue", "total")]
        cells = ["-" if time is None else f"{time:.0f}" for time in times]
        cells += [line["bound"], f"{line['eager_us']:.0f}", line["label"]]
        table.add_row("" if about == before else about, line["card"], *cells)
        before = about
    return table


def main() -> int:
    console = Console(width=None if sys.stdout.isatty() else 110)
    found = tiles()
    if isinstance(found, str):
        raise SystemExit(f"Nothing can be predicted: {found}.")
    console.print(as_table(predictions()))
    console.print(f"All of these numbers are {LABEL}.", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
