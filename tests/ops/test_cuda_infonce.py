"""The CUDA half of InfoNCE, run by the emulator against a definition in float64.

No GPU is involved: what the emulator cannot show is named in tests/emulator/README.md. What nvcc makes of the same
source is run in test_cuda_infonce_ptx.py and weighed in test_cuda_infonce_static.py.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from emulator import emulate
from infonce_problems import EXACT, SINGLE, TYPES, Answer, Problem, bytes_of, draw, solve, worst
from torch import Tensor

from fastcssl.learn.memory import Bank

KERNEL = emulate.CSRC / "infonce" / "infonce_cuda.cu"
DRIVER = emulate.EMULATOR / "infonce_main.cpp"


def emulated(problem: Problem, variant: str = "plain", **options: int) -> Answer:
    done = emulate.run(emulate.build(KERNEL, DRIVER, variant=variant), problem.stdin(), "sweep", **options)
    assert done.returncode == 0, done.stderr.decode()
    return problem.answer_of(done.stdout)


def check(problem: Problem, variant: str = "plain", **options: int) -> None:
    assert worst(problem, emulated(problem, variant, **options)) < 1


# ---- right -----------------------------------------------------------------------------------------------------------

KINDS = [(dtype, precision) for dtype in TYPES for precision in (SINGLE, EXACT)]
SHAPES = [
    (1, 8, (40,)),
    (7, 64, (100, 33)),
    (70, 40, (300,)),
    (33, 128, (130, 70)),
    (130, 96, (200,)),
    (20, 256, (90, 50)),
]


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel(shape: tuple[int, int, tuple[int, ...]], dtype: torch.dtype, precision: str) -> None:
    """Ragged rows, keys and columns: each width, each type, few rows and several blocks of them."""
    num_rows, dim, sizes = shape
    check(draw(1, num_rows, dim, sizes, dtype, precision=precision))


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=str)
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_temperatures(temperature: float, dtype: torch.dtype, precision: str) -> None:
    check(draw(2, 30, 64, (150, 90), dtype, temperature, precision))


def test_many_splits_and_a_block_that_straddles_banks() -> None:
    """Rows of the paper's size: 252 of them, 40 multiprocessors, splits that begin and end inside of banks."""
    check(draw(3, 252, 128, (1111, 530), torch.float16, precision=SINGLE), multiprocessors=40)
    check(draw(4, 30, 64, (700, 1, 333), torch.float32), multiprocessors=40)


@pytest.mark.parametrize(
    ("dtype", "precision", "dim", "size"),
    [(torch.float16, SINGLE, 64, 16384), (torch.float32, EXACT, 64, 16384), (torch.float32, EXACT, 256, 8192)],
    ids=str,
)
def test_the_longest_chain_of_sums(dtype: torch.dtype, precision: str, dim: int, size: int) -> None:
    """As many keys as one split takes, all the same: every truncated sum is cut off in the same direction."""
    problem = draw(5, 16, dim, (size,), dtype, precision=precision)
    problem.banks[0][:] = problem.banks[0][3].clone()
    check(problem, multiprocessors=1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_positive_outside_of_the_denominator(dtype: torch.dtype) -> None:
    check(draw(5, 20, 64, (77,), dtype, positive_in_denominator=False))


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=str)
def test_awkward_numbers(dtype: torch.dtype, precision: str) -> None:
    """Zero queries, zero keys, duplicate keys, one key a hundred times the others; a row whose logits all are equal."""
    problem = draw(6, 24, 64, (90, 60), dtype, precision=precision)
    problem.scaled_MD[3] = 0
    problem.banks[0][10:20] = 0
    problem.banks[0][30:60] = problem.banks[1][5]
    problem.banks[1][7] *= 100
    check(problem)


@pytest.mark.parametrize("size", [1e-6, 1e5])
def test_queries_of_any_size(size: float) -> None:
    """1e5 is no float16, and of 1e-6 little would be left in it; only the product with the key counts."""
    problem = draw(7, 17, 64, (120,), torch.float32, temperature=1.0)
    problem.banks = [(bank * min(5 / size, 1e4)).half() for bank in problem.banks]
    problem.scaled_MD *= size
    problem.positive_MD /= size
    for precision in (SINGLE, EXACT):
        problem.precision = precision
        found, truth = emulated(problem), solve(problem)
        for values, wanted in zip(found, truth, strict=True):
            error = (values - wanted).norm() / wanted.norm()
            assert error < (1e-3 if precision == SINGLE else 3e-6), (precision, float(error))


def test_rows_that_see_less() -> None:
    """Unfilled rows hold NaN and are not looked at; a row does not see its own key, in any bank."""
    problem = draw(8, 40, 64, (130, 70, 33), own_M=torch.arange(40) * 3, filled=[97, 0, 1000])
    problem.banks[0][97:] = torch.nan
    problem.banks[1][:] = torch.nan
    for dtype in TYPES:
        problem.banks = [bank.to(dtype) for bank in problem.banks]
        check(problem)


@pytest.mark.parametrize("sizes", [(), (0,), (0, 50), (50, 0)], ids=str)
def test_empty_banks(sizes: tuple[int, ...]) -> None:
    check(draw(9, 5, 32, sizes))


def test_rows_that_see_nothing() -> None:
    """Loss 0, no gradient; and their neighbours none the worse for it."""
    problem = draw(10, 3, 16, (1,), own_M=torch.tensor([-1, 0, 5]))
    loss_M, by_scaled_MD, by_positive_MD = emulated(problem)
    assert loss_M[1] == 0 and not by_scaled_MD[1].any() and not by_positive_MD[1].any()
    assert (loss_M[[0, 2]] > 0).all()
    check(problem)
    check(draw(11, 4, 16, (60,), filled=[0]))


def test_banks_of_several_types_and_more_than_a_launch_takes() -> None:
    problem = draw(12, 10, 64, (40, 33, 50, 8, 1, 17, 20, 64, 31, 5, 70), torch.float32)
    problem.banks[1] = problem.banks[1].half()
    problem.banks[4] = problem.banks[4].bfloat16()
    check(problem)


def test_not_a_number_shows() -> None:
    """A broken key or query is never a quiet zero, whatever its bits."""
    for dtype in TYPES:
        for precision in (SINGLE, EXACT):
            problem = draw(13, 4, 64, (50,), dtype, precision=precision)
            problem.banks[0][20, 3] = torch.nan
            if dtype == torch.float32:
                problem.banks[0].view(torch.int32)[20, 3] = 0x7FFFFFFF
            assert emulated(problem)[0].isnan().all()
            problem = draw(13, 4, 64, (50,), dtype, precision=precision)
            problem.scaled_MD[2, 5] = torch.nan
            assert emulated(problem)[0].isnan().tolist() == [False, False, True, False]


def test_thread_order_changes_no_bit() -> None:
    problem = draw(14, 70, 64, (300, 41), torch.float16, precision=SINGLE)
    first, second = emulated(problem, seed=1, multiprocessors=8), emulated(problem, seed=2, multiprocessors=8)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_that_nobody_wants() -> None:
    problem = draw(15, 6, 64, (50,))
    for scaled, positive in ((False, False), (True, False), (False, True)):
        check(replace(problem, wants_scaled=scaled, wants_positive=positive))


@pytest.mark.parametrize(("num_rows", "dim"), [(4, 12), (4, 264), (4, 4)])
def test_widths_that_no_kernel_takes(num_rows: int, dim: int) -> None:
    done = emulate.run(emulate.build(KERNEL, DRIVER), draw(16, num_rows, dim, (9,)).stdin(), "sweep")
    assert (done.returncode, done.stderr) == (3, b"infonce_cuda returned 1 at sweep_banks before its launch\n")


def test_a_bank_off_its_alignment_is_refused() -> None:
    done = emulate.run(emulate.build(KERNEL, DRIVER), draw(17, 4, 8, (9,)).stdin(), "sweep_misaligned")
    assert (done.returncode, done.stderr) == (3, b"infonce_cuda returned 716 at sweep_banks before its launch\n")


def test_no_rows() -> None:
    assert [len(part) for part in emulated(draw(18, 0, 64, (9,)))] == [0, 0, 0]


# ---- rings -----------------------------------------------------------------------------------------------------------


def enqueue_stdin(banks: list[Bank], keys: list[Tensor], normalise: bool) -> bytes:
    parts = [np.array([banks[0].rows_KD.shape[1], len(banks)], np.int64).tobytes()]
    for bank, keys_GD in zip(banks, keys, strict=True):
        size, kind = len(bank.rows_KD), TYPES.index(bank.rows_KD.dtype)
        numbers = [size, kind, normalise, int(bank.pointer), int(bank.filled), len(keys_GD)]
        parts += [np.array(numbers, np.int64).tobytes(), bytes_of(bank.rows_KD), bytes_of(keys_GD)]
    return b"".join(parts)


def enqueued(banks: list[Bank], keys: list[Tensor], variant: str = "plain", normalise: bool = True) -> list[bytes]:
    executable = emulate.build(KERNEL, DRIVER, variant=variant)
    done = emulate.run(executable, enqueue_stdin(banks, keys, normalise), "enqueue")
    assert done.returncode == 0, done.stderr.decode()
    sizes = [16 + bank.rows_KD.numel() * bank.rows_KD.element_size() for bank in banks]
    ends = np.cumsum([0, *sizes])
    assert len(done.stdout) == ends[-1]
    return [done.stdout[a:b] for a, b in itertools.pairwise(ends)]


def check_enqueue(sizes: list[int], counts: list[int], dim: int, variant: str = "plain") -> None:
    """Three pushes in a row against Bank.push: places, pointer and count exactly, numbers to the last bit or two."""
    rng = np.random.default_rng(20)
    banks = [Bank(size, dim, view=0, dtype=TYPES[i % 3]) for i, size in enumerate(sizes)]
    for _ in range(3):
        keys = [torch.from_numpy(rng.standard_normal((count, dim))).float() for count in counts]
        if counts[0]:
            keys[0][0] = 0
        outputs = enqueued(banks, keys, variant)
        for bank, keys_GD, output in zip(banks, keys, outputs, strict=True):
            bank.push(keys_GD)
            assert np.frombuffer(output[:16], np.int64).tolist() == [int(bank.pointer), int(bank.filled)]
            rows_KD = torch.frombuffer(bytearray(output[16:]), dtype=bank.rows_KD.dtype).view_as(bank.rows_KD)
            ulp = torch.finfo(bank.rows_KD.dtype).eps
            torch.testing.assert_close(rows_KD, bank.rows_KD, rtol=2 * ulp, atol=1e-9)


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [([50, 50, 50], [20, 20, 20]), ([7, 64, 30], [30, 1, 30]), ([1, 9, 100], [3, 9, 0])],
    ids=str,
)
def test_enqueue(sizes: list[int], counts: list[int]) -> None:
    """Wrap-around, more keys than rows, exactly as many, none; all types at once."""
    check_enqueue(sizes, counts, 40)


def test_more_rings_than_a_launch_takes() -> None:
    check_enqueue(list(range(3, 14)), [5] * 11, 8)


def test_enqueue_as_they_are() -> None:
    """Without normalisation; and from a pointer that lies outside of the ring."""
    bank, keys_GD = Bank(5, 16, view=0), torch.arange(32.0).view(2, 16)
    bank.pointer.fill_(9)
    output = enqueued([bank], [keys_GD], normalise=False)[0]
    rows_KD = torch.frombuffer(bytearray(output[16:]), dtype=torch.float32).view(5, 16)
    assert torch.equal(rows_KD[[4, 0]], keys_GD) and not rows_KD[1:4].any()
    assert np.frombuffer(output[:16], np.int64).tolist() == [1, 2]


# ---- and found out when it is not ------------------------------------------------------------------------------------


def test_clean_under_sanitizers() -> None:
    """Addresses and undefined behaviour; every buffer and shared memory have their exact sizes."""
    for i, (num_rows, dim, sizes) in enumerate(SHAPES):
        dtype, precision = KINDS[i]
        own = torch.arange(num_rows)
        check(draw(30 + i, num_rows, dim, sizes, dtype, precision=precision, own_M=own), "sanitized_quick")
    check_enqueue([7, 64, 30], [30, 1, 30], 40, "sanitized_quick")


# Quicker to compile: of all sweeps only the one that is run.
ONE_KERNEL = {
    "  const bool exact = precision == Precision::tf32x3, few = rows.num_rows <= kFewRows;\n": (
        "  static_cast<void>(type), static_cast<void>(precision), static_cast<void>(rows);\n"
        "  return choose<__half, false, 64, false>(launch);\n#if 0\n"
    ),
    "}\n\n// Returns the fewest splits": "#endif\n}\n\n// Returns the fewest splits",
}


def is_found_out(edits: dict[str, str], seed: int = 0, skip_barrier: str = "") -> bool:
    """On problems that use every barrier and stage: two blocks of rows, three banks in one split, tiles that do not
    fill the ring evenly. At 1 each single key counts; at 0.02 the maximum of a row rises so that sums are scaled."""
    executable = emulate.build(KERNEL, DRIVER, edits={**edits, **ONE_KERNEL})
    for temperature in (1.0, 0.02):
        problem = draw(40, 140, 64, (40, 136, 71), torch.float16, temperature, SINGLE)
        done = emulate.run(
            executable, problem.stdin(), "sweep", seed=seed, skip_barrier=skip_barrier, multiprocessors=1
        )
        if done.returncode != 0 or worst(problem, problem.answer_of(done.stdout)) > 1:
            return True
    return False


def test_without_a_fault_nothing_is_found() -> None:
    assert not is_found_out({})


@pytest.mark.parametrize("barrier", emulate.barrier_lines(KERNEL))
def test_each_barrier_is_needed(barrier: str) -> None:
    for seed in range(4):
        assert is_found_out({}, seed, barrier), f"the barrier {barrier} was not missed with seed {seed}"


@pytest.mark.parametrize(
    ("function", "kernel", "threads"),
    [
        ("infonce_cuda", "sweep_banks", "launch.kernel, grid, threads"),
        ("infonce_cuda", "combine_splits", "static_cast<unsigned>(rows.num_rows), kCombineThreads"),
        ("enqueue_cuda", "write_keys", "write_keys, grid, kEnqueueThreads"),
        ("enqueue_cuda", "move_pointers", "move_pointers, 1, kWarp"),
    ],
)
def test_a_failed_launch_names_its_kernel(function: str, kernel: str, threads: str) -> None:
    """A block of more threads than any GPU takes."""
    executable = emulate.build(KERNEL, DRIVER, edits={threads: f"{threads} * 64", **ONE_KERNEL})
    if function == "infonce_cuda":
        done = emulate.run(executable, draw(41, 8, 64, (40,), torch.float16).stdin(), "sweep")
    else:
        stdin = enqueue_stdin([Bank(4, 8, view=0)], [torch.ones(2, 8)], normalise=True)
        done = emulate.run(executable, stdin, "enqueue")
    assert done.returncode == 3 and f"{function} returned 9 at {kernel}\n" in done.stderr.decode()


FAULTS = {
    "waits for one tile too few": ("wait_for_copies<Block::kStages - 2>();", "wait_for_copies<Block::kStages - 1>();"),
    "copies never waited for": ("      wait_for_copies<Block::kStages - 2>();\n", ""),
    "refills the stage in use": ("load(tile + Block::kStages - 1);", "load(tile + Block::kStages);"),
    "last tile one key short": ("rest < kKeys ? static_cast<int>(rest)", "rest < kKeys ? static_cast<int>(rest) - 1"),
    "split one tile short": (
        "num_tiles * (blockIdx.y + 1) / sweep.num_splits",
        "num_tiles * (blockIdx.y + 1) / sweep.num_splits - 1",
    ),
    "zero keys not hidden": ("if (key >= count || key == hidden", "if (key == hidden"),
    "transposed load one chunk off": ("place<kRowBytes>(lane % 16, lane / 16))", "place<kRowBytes>(lane % 16, 0))"),
    "sums not scaled with the reference": ("sum[r][half] *= scale;", ""),
    "one row tile for all": ("(r * Block::kSteps + step) * Block::kStepBytes", "step * Block::kStepBytes"),
    "tiles a chunk too near": ("segment.keys_KD += tile_bytes;", "segment.keys_KD += tile_bytes - 16;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str) -> None:
    assert is_found_out(dict([FAULTS[fault]]))
