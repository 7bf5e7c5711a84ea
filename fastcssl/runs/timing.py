"""Measures how fast a run trains and where its time goes. It never waits for a device.

`main`: seconds of the training thread by stage, which add up to the task's total time. `loader`: seconds of the
loader's threads by stage, summed over the threads, which work in parallel with training. `device`: seconds in which a
GPU was idle between steps ("idle"), took a step at the pace of the host ("launch") or copied a batch ("transfer"),
measured with its events.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAIN = ("model", "wait", "augment", "probe", "checkpoint", "strategy")
LOADER = ("read", "decode", "crop", "photometric")
_HOST_PACED = 1.1  # a step that takes at most this multiple of its launching waited for the host


class Rates:
    """The throughput of a task, and the share of the time that the host waited for data. Use one object per task."""

    def __init__(self, window: int = 50) -> None:
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=window)
        self.num_images = 0
        self.wait_seconds = self.seconds = 0.0

    def step(self, num_images: int, wait_s: float, step_s: float) -> None:
        """Adds a step. `step_s`: seconds from batch to batch, including the wait. `num_images`: over all ranks."""
        self._recent.append((num_images, wait_s, step_s))
        self.num_images += num_images
        self.wait_seconds += wait_s
        self.seconds += step_s

    @property
    def images_per_s(self) -> float:
        """Returns the throughput over the last steps."""
        return _ratio(sum(images for images, _, _ in self._recent), sum(step_s for _, _, step_s in self._recent))

    @property
    def wait_share(self) -> float:
        """Returns the share of the time spent waiting for data over the last steps."""
        return _ratio(sum(wait_s for _, wait_s, _ in self._recent), sum(step_s for _, _, step_s in self._recent))

    @property
    def mean_images_per_s(self) -> float:
        return _ratio(self.num_images, self.seconds)

    @property
    def mean_wait_share(self) -> float:
        return _ratio(self.wait_seconds, self.seconds)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


class DeviceIdle:
    """The share of the time that a GPU's stream was idle between two steps, measured with events. None on a CPU.

    Nothing here waits for the device: an event is read only after it has passed. Call `begin` after the batch was
    handed over, so that the stream's wait for the copy counts as idle.

    Gaps inside a step cannot be seen with two events. But if the GPU had nothing queued when the host began to launch a
    step, and had finished it about when the host had launched the last of it, then the host set the pace: such steps
    count as `launch_seconds`.
    """

    def __init__(self, device: "torch.device", window: int = 50) -> None:
        self._device = device
        self._recent: deque[tuple[float, float]] = deque(maxlen=window)
        # End of the step before or None, begin, end, and the host's time if the queue was empty, else 0.
        self._pending: deque[tuple[Any, Any, Any, float]] = deque()
        self._begin: Any = None
        self._end: Any = None
        self._queue_was_empty = False
        self._began_s = 0.0
        self.seconds = 0.0  # idle so far
        self.launch_seconds = 0.0  # of steps whose pace the host set

    def begin(self) -> None:
        self._queue_was_empty = self._end is None or self._end.query()
        self._began_s = time.perf_counter()
        self._begin = self._recorded()

    def end(self) -> None:
        before, self._end = self._end, self._recorded()
        if self._end is not None:
            launch_s = time.perf_counter() - self._began_s if self._queue_was_empty else 0.0
            self._pending.append((before, self._begin, self._end, launch_s))
            self._collect()

    def pause(self) -> None:
        """Ignores the time until the next step, such as a probe or a checkpoint, which is not waiting for data."""
        self._end = None

    def _recorded(self) -> Any:
        if self._device.type != "cuda":
            return None
        import torch  # imported here because reading a run's status does not need it

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _collect(self) -> None:
        while self._pending and self._pending[0][2].query():
            before, begin, end, launch_s = self._pending.popleft()
            idle_ms = before.elapsed_time(begin) if before is not None else 0.0
            step_ms = begin.elapsed_time(end)
            self._recent.append((idle_ms, idle_ms + step_ms))
            self.seconds += idle_ms / 1000
            if step_ms / 1000 <= _HOST_PACED * launch_s:
                self.launch_seconds += step_ms / 1000

    @property
    def share(self) -> float | None:
        """Returns the idle share over the last steps that the device has finished, or None if there are none."""
        if not self._recent:
            return None
        return _ratio(sum(idle for idle, _ in self._recent), sum(whole for _, whole in self._recent))


@dataclass(slots=True, kw_only=True)
class StageTimes:
    """Seconds by stage of the training thread, the loader's threads and the device."""

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
        """Adds the parts of a step. The rest of the step's time counts as the model's."""
        for stage, seconds in parts.items():
            self.add(stage, seconds)
        self.add("model", max(step_s - sum(parts.values()), 0.0))

    def follow(self, where: str, counters: Mapping[str, float]) -> None:
        """Adds what growing counters have gained since the last call. The first call only notes their values.

        `where`: "loader" or "device". A resumed run has new counters, which add to its old sums.
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
    """Returns the sums over the states of several tasks."""
    sums: dict[str, dict[str, float]] = {"main": {}, "loader": {}, "device": {}}
    for state in times:
        for where, into in sums.items():
            for name, seconds in state.get(where, {}).items():
                into[name] = into.get(name, 0.0) + float(seconds)
    return sums
