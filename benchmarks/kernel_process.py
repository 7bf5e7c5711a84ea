"""Runs in the processes of kernel.py: contenders by name, and the measurement of time, peak memory and errors.

Memory is measured in a separate process that has built the problem and solved a tiny one. It is the largest resident
size (VmHWM) during the call, minus the resident size before. That process returns freed memory to the system
immediately, so that no leftover memory hides what a contender needs. A page is 4 kB, and code that is read for the
first time counts too.
"""

import ctypes
import gc
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from timing import Failed

from fastcssl.doctor import peers
from fastcssl.doctor.peers import CHUNKS, Contender, Errors, Problem, TwoGemms

GEMM_CHUNKS = (0, 512, 1024, 2048)
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Shape(NamedTuple):
    num_rows: int  # N
    dim: int  # D
    bank_size: int  # K, per bank, of two banks
    num_threads: int

    @property
    def flop(self) -> int:
        return 4 * self.num_rows * self.dim * 2 * self.bank_size


class Timed(NamedTuple):
    seconds: float
    about: str  # the variant, if a contender has several


def _contenders(name: str) -> dict[str, Contender]:
    """Returns the variants of a contender by keys per chunk. Only the fastest one is measured."""
    if name == "chunked":
        return {f"{chunk:,}": peers.chunked(chunk) for chunk in CHUNKS}
    if name == "gemms":
        return {f"{chunk:,}" if chunk else "whole": TwoGemms(chunk) for chunk in GEMM_CHUNKS}
    single: dict[str, Callable[[], Contender]] = {
        "moco": lambda: peers.eager_moco,
        "logsumexp": lambda: peers.eager_logsumexp,
        "compile": peers.compiled,
        "flash": lambda: peers.flash,
        "ours": lambda: peers.ours("auto"),
    }
    return {"": single[name]()}


def _problem(shape: Shape, seed: int) -> Problem:
    return peers.problem(shape.num_rows, shape.dim, (shape.bank_size, shape.bank_size), seed=seed)


class _Held:
    """The state of this process between two calls."""

    shape: Shape | None = None
    problem: Problem
    contenders: ClassVar[dict[str, tuple[str, Contender]]] = {}
    expected: ClassVar[tuple[Problem, peers.Answer] | None] = None


def begin(shape: Shape, names: tuple[str, ...], seed: int) -> dict[str, str]:
    """Builds the problem, warms up and chooses variants. Returns each contender's variant, or why it cannot run."""
    torch.set_num_threads(shape.num_threads)
    _Held.shape, _Held.problem, _Held.contenders = shape, _problem(shape, seed), {}
    about: dict[str, str] = {}
    for name in names:
        try:
            _Held.contenders[name] = _quickest(_contenders(name))
            about[name] = _Held.contenders[name][0]
        except Exception as error:  # whatever a peer raises, the others are still measured
            about[name] = "failed: " + str(error).strip().partition("\n")[0][:160]
    return about


def _quickest(variants: dict[str, Contender]) -> tuple[str, Contender]:
    seconds: dict[str, float] = {}
    next(iter(variants.values()))(_Held.problem)  # warm-up
    for about, contender in variants.items():
        seconds[about] = _clock(contender) if len(variants) > 1 else 0.0
    best = min(seconds, key=seconds.__getitem__)
    return best, variants[best]


def _clock(contender: Contender) -> float:
    began = time.perf_counter()
    contender(_Held.problem)
    return time.perf_counter() - began


def measure(name: str) -> Timed:
    about, contender = _Held.contenders[name]
    return Timed(_clock(contender), about)


def errors(name: str) -> Errors:
    """Returns the errors of one contender on the current problem, against float64."""
    return Errors.of(_Held.contenders[name][1](_Held.problem), _expected())


def _expected() -> peers.Answer:
    if _Held.expected is None or _Held.expected[0] is not _Held.problem:
        _Held.expected = (_Held.problem, peers.oracle(_Held.problem))
    return _Held.expected[1]


# ---- The error budget ------------------------------------------------------------------------------------------------


class ErrorCase(NamedTuple):
    num_rows: int
    dim: int
    bank_sizes: tuple[int, ...]
    dtype: str
    temperature: float
    num_clusters: int


def error_of(case: ErrorCase, seed: int) -> dict[str, Any]:
    """Returns the errors of ours and of plain torch, both against float64 on the numbers stored in the banks."""
    given = peers.problem(
        case.num_rows,
        case.dim,
        case.bank_sizes,
        dtype=TYPES[case.dtype],
        temperature=case.temperature,
        num_clusters=case.num_clusters,
        seed=seed,
    )
    expected = peers.oracle(given)
    mine, theirs = Errors.of(peers.ours("auto")(given), expected), Errors.of(peers.plain(given), expected)
    share = mine.over(theirs.budget())
    return {
        **case._asdict(),
        "loss_error": _finite(mine.loss),
        "gradient_error": _finite(mine.gradient),
        "torch_loss_error": theirs.loss,
        "torch_gradient_error": theirs.gradient,
        "of_budget": _finite(share),
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 1e30  # JSON has no infinity, and a broken kernel must not look unmeasured


# ---- Memory ----------------------------------------------------------------------------------------------------------


def peak_extra_mb(shape: Shape, name: str, about: str, seed: int) -> float:
    """Returns the additional memory, measured in a process forked from one that has torch but no threads."""
    return in_new_process(_peak_of, shape, name, about, seed)


def in_new_process(function: Callable[..., Any], *args: Any, limit_seconds: float = 240) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "fastcssl.doctor.peers"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, *args).result(timeout=limit_seconds)
        except BrokenProcessPool:
            raise Failed("its process ended; was there enough memory?") from None


def _peak_of(shape: Shape, name: str, about: str, seed: int) -> float:
    torch.set_num_threads(shape.num_threads)
    contender = _contenders(name)[about]
    # Loads code and starts threads. Contenders that compile or keep buffers do so for one shape, so they get that
    # shape.
    tiny = shape if name in ("compile", "gemms") else shape._replace(bank_size=min(256, shape.bank_size))
    contender(_problem(tiny, seed))
    given = _problem(shape, seed)
    return extra_mb(lambda: contender(given))


def extra_mb(call: Callable[[], Any], num_calls: int = 3) -> float:
    """Returns the additional memory of a call: the median of a few, because Python adds a little memory to some."""
    gc.collect()
    gc.disable()
    return statistics.median(_extra_mb(call) for _ in range(num_calls))


def _extra_mb(call: Callable[[], Any]) -> float:
    libc = ctypes.CDLL(None)
    # Blocks of 64 kB and more are taken from the system and returned to it (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD).
    libc.mallopt(-3, 64 << 10)
    libc.mallopt(-1, 64 << 10)
    libc.malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to the current size
    except OSError as error:
        raise Failed(f"memory cannot be measured here: {error}") from None
    before = _status_mb("VmRSS:")
    call()
    return max(0.0, _status_mb("VmHWM:") - before)


def _status_mb(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024 / 1e6
    raise Failed(f"/proc/self/status has no {key}")


def settle_in() -> None:
    """Does nothing: calling it imports this module."""


def sgemm_gflop_per_s(size: int, num_threads: int) -> float:
    """Returns the best rate of five large square products: the most that MKL reaches on this processor."""
    torch.set_num_threads(num_threads)
    a, b, out = (torch.ones(size, size) for _ in range(3))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds) / 1e9
