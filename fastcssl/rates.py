"""How fast a run trains, and how much of the time it waits for data."""

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Rates:
    """Throughput, and the share of the time that the host stood waiting for data. Make one a task."""

    def __init__(self, window: int = 50) -> None:
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=window)
        self.num_images = 0
        self.wait_seconds = self.seconds = 0.0

    def step(self, num_images: int, wait_s: float, step_s: float) -> None:
        """`step_s`: from batch to batch, the wait included. `num_images`: over all ranks."""
        self._recent.append((num_images, wait_s, step_s))
        self.num_images += num_images
        self.wait_seconds += wait_s
        self.seconds += step_s

    @property
    def images_per_s(self) -> float:
        """Over the last steps."""
        return _ratio(sum(images for images, _, _ in self._recent), sum(step_s for _, _, step_s in self._recent))

    @property
    def wait_share(self) -> float:
        """Over the last steps."""
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
    """The share of the time that a GPU's stream had nothing to do between two steps, by events. None on a CPU.

    Nothing here waits for the device: an event is read once it has passed. `begin` belongs after the batch was handed
    over, so that the stream's wait for the copy counts; what happens inside a step does not.
    """

    def __init__(self, device: "torch.device", window: int = 50) -> None:
        self._device = device
        self._recent: deque[tuple[float, float]] = deque(maxlen=window)
        self._pending: deque[tuple[Any, Any, Any]] = deque()  # end of the step before or None, begin, end
        self._begin: Any = None
        self._end: Any = None
        self.seconds = 0.0  # idle so far

    def begin(self) -> None:
        self._begin = self._recorded()

    def end(self) -> None:
        before, self._end = self._end, self._recorded()
        if self._end is not None:
            self._pending.append((before, self._begin, self._end))
            self._collect()

    def pause(self) -> None:
        """What comes before the next step (a probe, a checkpoint) is no waiting for data."""
        self._end = None

    def _recorded(self) -> Any:
        if self._device.type != "cuda":
            return None
        import torch  # here, since reading a run's status needs none of it

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _collect(self) -> None:
        while self._pending and self._pending[0][2].query():
            before, begin, end = self._pending.popleft()
            idle_ms = before.elapsed_time(begin) if before is not None else 0.0
            self._recent.append((idle_ms, idle_ms + begin.elapsed_time(end)))
            self.seconds += idle_ms / 1000

    @property
    def share(self) -> float | None:
        """Over the last steps that the device has finished."""
        if not self._recent:
            return None
        return _ratio(sum(idle for idle, _ in self._recent), sum(whole for _, whole in self._recent))
