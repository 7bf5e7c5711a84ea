"""A program for a process with a fake card: counts one training step of each method under each strategy.

    python -m fake_cuda.count_steps --ranks 8 [--small] [--waits-allowed] [METHOD/STRATEGY ...]

It prints one JSON object per combination. `--small` takes a small encoder in place of the recipe's ResNet-18.
"""

import argparse
import json
import os
import sys
import traceback
from typing import Any

from lab import small_encoder

from fake_cuda.counting import counted
from fake_cuda.fake_step import FakeStep, fake_card
from fastcssl.learn import methods, strategies


def count(name: str, ranks: int, *, small: bool, waits_allowed: bool) -> dict[str, Any]:
    """Returns the counts of the second of two steps: the first builds momentum buffers and twins."""
    method, strategy = name.split("/")
    with fake_card(ranks, waits_allowed=waits_allowed) as world:
        step = FakeStep(method, strategy, world, encoder=small_encoder() if small else None)
        step.run()
        with counted() as counts:
            terms = step.run()
        assert all(term.dim() == 0 and term.device.type == "cuda" for term in terms.values())
    return {
        "name": name,
        "ranks": ranks,
        "ops": counts.ops.total(),
        "host_syncs": len(counts.waits),
        "collectives": counts.collectives.total(),
        "causes": counts.waits[:5],
        "convolutions_in": sorted(counts.convolutions_in),
        "by_operator": dict(counts.ops.most_common()),
    }


def counted_or_failed(name: str, ranks: int, *, small: bool = False, waits_allowed: bool = False) -> dict[str, Any]:
    """Returns the counts, or a row with the error, so that one failure does not hide the others."""
    try:
        return count(name, ranks, small=small, waits_allowed=waits_allowed)
    except Exception as error:
        ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "fastcssl" in frame.filename]
        where = [f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in ours]
        return {"name": name, "ranks": ranks, "error": f"{type(error).__name__}: {error}", "where": where}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--waits-allowed", action="store_true")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    every = [f"{method}/{strategy}" for method in methods.names() for strategy in strategies.names()]
    for name in given.names or every:
        row = counted_or_failed(name, given.ranks, small=given.small, waits_allowed=given.waits_allowed)
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
