"""The cost model against numbers worked out by hand, and its reading of headers and machine code."""

import os
import shutil
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# As the program prints them: bytes, exact, width, few; width, warps, row tiles, keys, blocks, shared, split, few rows.
PRINTED = """
2 0 128 0  128 4 2 32 2 50688 16384 64
2 0 128 1  128 4 1 32 2 50000 16384 64
2 1 128 0  128 8 1 32 1 90000 16384 64
2 1 128 1  128 8 1 32 1 90000 16384 64
4 1 128 0  128 8 1 32 1 99000 16384 64
4 1 128 1  128 8 1 32 1 99000 16384 64
4 0 128 0  128 8 1 32 1 99000 16384 64
4 0 128 1  128 8 1 32 1 99000 16384 64
""".strip()


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_tiles_are_chosen_as_the_launch_does() -> None:
    from kernel_tiles import Tile, Tiles

    tiles = Tiles(PRINTED)
    half = tiles.choose(256, 100, "float16", "high")
    assert half == Tile(128, 4, 2, 32, 2, 50688, 16384, 64) and half.rows == 128
    few = tiles.choose(64, 128, "bfloat16", "high")
    assert few.is_few and few.rows == 64
    assert not tiles.choose(64, 128, "float16", "highest").is_few
    assert half.blocks_per_sm(86) == 1  # two would need 103,424 bytes of 102,400
    assert half.blocks_per_sm(80) == 2
    # Two products, two row tiles, four key tiles, eight steps of 16 columns.
    assert half.tensor_instructions("float16", "high") == 128


def test_the_real_header_answers() -> None:
    from kernel_tiles import HEADER, tiles

    found = tiles()
    if isinstance(found, str):
        assert not HEADER.exists() or not shutil.which(os.environ.get("CXX", "c++")), found
        pytest.skip(found)
    for dim in (64, 128, 256):
        for storage in ("float16", "bfloat16", "float32"):
            for precision in ("high", "highest"):
                for rows in (1, 512):
                    tile = found.choose(rows, dim, storage, precision)  # type: ignore[arg-type]
                    assert tile.dim == dim and tile.rows % 16 == 0 and 0 < tile.shared_bytes <= 99 << 10


def test_a_header_that_changed_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kernel_tiles

    if not shutil.which(os.environ.get("CXX", "c++")):
        pytest.skip("needs a C++ compiler")
    monkeypatch.setattr(kernel_tiles, "HEADER", tmp_path / "infonce_tiles.h")
    assert kernel_tiles.tiles.__wrapped__() == "csrc/infonce has no CUDA sweep"
    kernel_tiles.HEADER.write_text("namespace fastcssl::infonce { struct Block {}; }")
    assert "does not answer kernel_tiles.py" in kernel_tiles.tiles.__wrapped__()


def test_splits_fill_the_card() -> None:
    from kernel_model import best_splits

    assert best_splits(row_blocks=2, slots=216, least=8, most=216) == 103  # 206 of 216, within 5 % of the best
    assert best_splits(row_blocks=1, slots=4, least=1, most=4) == 4
    assert best_splits(row_blocks=8, slots=4, least=1, most=4) == 1
    assert best_splits(row_blocks=3, slots=4, least=2, most=2) == 2


def test_work_by_hand() -> None:
    """256 x 128 against 131,072 half keys on an A100, the numbers of the kernel's notes."""
    from kernel_model import CARDS, Case, work
    from kernel_tiles import Tiles

    tiles, a100 = Tiles(PRINTED), next(card for card in CARDS if card.name == "A100")
    done = work(a100, tiles.choose(256, 128, "float16", "high"), Case(256, 128))
    assert done.flop == 4 * 256 * 131_072 * 128 == 17_179_869_184
    assert done.exps == 256 * 131_072
    assert done.num_splits == 103 and done.wave_share == pytest.approx(206 / 216)
    assert done.key_tiles == 2 * 4096
    bank, parts, own = 131_072 * 128 * 2, 2 * 103 * 256 * 130 * 4, 4 * 256 * 128 * 4
    assert done.bytes == bank + parts + own
    # Rows and keys are filled up to whole tiles.
    ragged = work(a100, tiles.choose(129, 128, "float16", "high"), Case(129, 128, bank_sizes=(33,)))
    assert ragged.exps == 256 * 64 and ragged.flop == 4 * 256 * 64 * 128
    exact = work(a100, tiles.choose(256, 128, "float16", "highest"), Case(256, 128, "float16", "highest"))
    assert exact.flop == 2 * done.flop
    float32 = work(a100, tiles.choose(256, 128, "float32", "highest"), Case(256, 128, "float32", "highest"))
    assert float32.flop == 3 * done.flop and float32.bytes > 2 * bank


def test_predictions_by_hand() -> None:
    from kernel_model import CARDS, LABEL, Case, predict
    from kernel_sass import LoopMix, Sweep
    from kernel_tiles import Tiles

    tiles, a100 = Tiles(PRINTED), next(card for card in CARDS if card.name == "A100")
    line = predict(a100, tiles, Case(256, 128))
    assert line.tensor_us == pytest.approx(17_179.869184 / 312, rel=1e-6)  # MFLOP over TFLOP/s
    assert line.exp_us == pytest.approx(33.554432e6 / (16 * 108 * 1410), rel=1e-6)
    assert line.memory_us == pytest.approx(line.bytes / 2.039e6, rel=1e-6)
    assert line.bound == "tensor" and line.label == LABEL and line.issue_us is None
    assert line.total_us == pytest.approx(line.tensor_us * 216 / 206 + 8, rel=1e-6)
    # Few rows: the bank's bytes decide. Next to nothing: the launches do.
    assert predict(a100, tiles, Case(16, 128)).bound == "memory"
    assert predict(a100, tiles, Case(16, 128, bank_sizes=(64,))).bound == "launch"
    # 128 tensor instructions are one tile's; twice as many are two tiles in a turn, at half the cost of each.
    for unrolled in (1, 2):
        mix = LoopMix(4000 * unrolled, {"tensor": 128 * unrolled})
        line = predict(a100, tiles, Case(256, 128), {Sweep(80, "float16", False, 128, False): mix})
        assert line.issue_us == pytest.approx(4000 * 4 * 8192 / (4 * 108 * 1410), rel=1e-6)
        assert line.bound == "issue" and line.instructions == mix.counts


SASS = """
Fatbin elf code:
================
arch = sm_80
code version = [1,8]

	code for sm_80
		Function : _ZN5gpu11sweep_banksI6__halfLb0ELi128ELb1EEEvNS_5SweepE
	.headerflags	@"EF_CUDA_SM80"
        /*0000*/                   MOV R1, c[0x0][0x28] ;                   /* 0x00000a0000017a02 */
                                                                            /* 0x000fe40000000f00 */
        /*0010*/                   LDSM.16.M88.4 R4, [R2] ;                 /* 0x000000000204783b */
        /*0020*/                   HMMA.16816.F32 R8, R4, R6, R8 ;          /* 0x000000060408723c */
        /*0030*/                   MUFU.EX2 R9, R9 ;                        /* 0x0000000900097308 */
        /*0040*/              @!P0 FFMA R9, R9, R9, R9 ;                    /* 0x0000000909098223 */
        /*0050*/               @P0 BRA 0x10 ;                               /* 0xffffffb000000947 */
        /*0060*/                   HMMA.16816.F32 R8, R4, R6, R8 ;          /* 0x000000060408723c */
        /*0070*/                   EXIT ;                                   /* 0x000000000000794d */
        /*0080*/                   BRA 0x80;                                /* 0xfffffff000007947 */
		Function : _Z5otherv
        /*0000*/                   HMMA.16816.F32 R8, R4, R6, R8 ;          /* 0x000000060408723c */
        /*0010*/                   BRA 0x0 ;                                /* 0x0 */
"""


def test_the_loop_is_found_in_machine_code() -> None:
    from kernel_sass import Sweep, sweeps_in

    ((instance, mix),) = sweeps_in(SASS).items()
    assert instance == Sweep(architecture=80, storage="float16", is_exact=False, dim=128, is_few=True)
    assert mix.total == 5
    assert mix.counts == {"shared loads": 1, "tensor": 1, "special": 1, "float": 1, "other": 1}
    assert mix.share("tensor") == 0.2
    assert sweeps_in("no code at all") == {}


def test_nothing_is_predicted_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    import kernel_model

    monkeypatch.setattr(kernel_model, "tiles", lambda: "no compiler")
    assert kernel_model.predictions() == []
