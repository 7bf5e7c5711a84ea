"""Where the time of a task went, by stage. Clocks that run anyway are read; nothing here waits for a device.

`main`: seconds of the thread that trains, which add up to the task's whole time. `loader`: seconds of the loader's
threads, added up over them, beside the training. "idle" and "transfer" are a GPU's own, by its events.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MAIN = ("model", "wait", "augment", "probe", "checkpoint", "strategy")
LOADER = ("read", "decode", "crop", "photometric")


@dataclass(slots=True, kw_only=True)
class StageTimes:
    main: dict[str, float] = field(default_factory=dict)
    loader: dict[str, float] = field(default_factory=dict)
    device: dict[str, float] = field(default_factory=dict)
    _seen: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, stage: str, seconds: float) -> None:
        self.main[stage] = self.main.get(stage, 0.0) + seconds

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - began)

    def step(self, step_s: float, parts: Mapping[str, float]) -> None:
        """What of a step was not spent on one of the parts was the model's."""
        for stage, seconds in parts.items():
            self.add(stage, seconds)
        self.add("model", max(step_s - sum(parts.values()), 0.0))

    def follow(self, where: str, counters: Mapping[str, float]) -> None:
        """Adds what counters that only grow have gained since they were last seen. The first time only looks.

        `where`: "loader" or "device". A run that was resumed has new counters and its old sums.
        """
        sums: dict[str, float] = getattr(self, where)
        for name, value in counters.items():
            before = self._seen.get((where, name), value)
            self._seen[where, name] = value
            sums[name] = sums.get(name, 0.0) + max(value - before, 0.0)

    def state(self) -> dict[str, dict[str, float]]:
        return {"main": dict(self.main), "loader": dict(self.loader), "device": dict(self.device)}

    def load(self, state: Mapping[str, Mapping[str, float]]) -> None:
        for where in ("main", "loader", "device"):
            getattr(self, where).update(state.get(where, {}))


def total(times: list[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Of several tasks' states."""
    sums: dict[str, dict[str, float]] = {"main": {}, "loader": {}, "device": {}}
    for state in times:
        for where, into in sums.items():
            for name, seconds in state.get(where, {}).items():
                into[name] = into.get(name, 0.0) + float(seconds)
    return sums
