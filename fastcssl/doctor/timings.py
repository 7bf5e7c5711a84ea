"""Times the contrastive loss on this GPU against eager torch, torch.compile and flash attention.

Four copies of the problem take turns, so that no bank is still in the GPU's L2 cache from the previous call.
"""

import statistics
import time
from collections.abc import Iterator

import torch

from fastcssl.doctor import Finding, Section, note, ok, peers, run_checks
from fastcssl.doctor.peers import Contender, Problem

ROWS, DIM, BANKS = 512, 128, (65_536, 65_536)
COPIES, ROUNDS = 4, 20


def timings() -> Section:
    return run_checks("Speed on the GPU", [("contrastive loss", contrastive)])


def contrastive(rows: int = ROWS, banks: tuple[int, ...] = BANKS, device: str = "cuda") -> Iterator[Finding]:
    """Yields one finding per implementation, with its time and how much faster ours is."""
    given = [peers.problem(rows, DIM, banks, dtype=torch.float16, device=device, seed=seed) for seed in range(COPIES)]
    contenders: dict[str, Contender] = {
        "eager, as in MoCo": peers.eager_moco,
        "torch.compile": peers.compiled(),
        "flash attention, V = K": peers.flash,
        "ours": peers.ours(device),
    }
    times: dict[str, list[float]] = {}
    for name, contender in contenders.items():
        try:
            for each in given:
                contender(each)
            times[name] = []
        except Exception as error:  # one that cannot run is left out; ours was checked before
            reason = str(error).strip().partition("\n")[0][:160]
            yield note(name, f"left out: {type(error).__name__}: {reason}")
    for number in range(ROUNDS):
        for name in times:
            times[name].append(_milliseconds(contenders[name], given[number % COPIES]))
    if "ours" not in times:
        return
    mine = statistics.median(times["ours"])
    for name, measured in times.items():
        middle = statistics.median(measured)
        rate = given[0].flop / middle / 1e9
        text = f"{middle:.3f} ms, best {min(measured):.3f}, {rate:.1f} TFLOP/s"
        ratios = [theirs / ours for theirs, ours in zip(measured, times["ours"], strict=True)]
        yield ok(name, text if name == "ours" else f"{text}; ours is {statistics.median(ratios):.2f} times as fast")
    if mine > min(statistics.median(measured) for measured in times.values()):
        yield note(
            "ours", "it is not the fastest here", "Please report the GPU and the numbers: fastcssl-doctor --json."
        )


def _milliseconds(contender: Contender, given: Problem) -> float:
    if given.query_ND.device.type != "cuda":
        began = time.perf_counter()
        contender(given)
        return (time.perf_counter() - began) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    contender(given)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
