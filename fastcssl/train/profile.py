"""Traces a few steps with torch's profiler, for --profile.

Every rank writes a file such as RUN/profile/rank0.json, which Perfetto and Chrome can open.
"""

from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from fastcssl.runs.ownership import UNLOCKED
from fastcssl.train.build import Run

_SKIPPED_STEPS = 5  # the first steps compile, tune and fill queues
_CATEGORIES = {"cpu": [ProfilerActivity.CPU], "cuda": [ProfilerActivity.CPU, ProfilerActivity.CUDA]}


class Profile:
    """Records `num_steps` steps after the first few. With 0 it records nothing and costs nothing."""

    def __init__(self, num_steps: int, run: Run, folder: Path) -> None:
        self._path = folder / f"rank{run.world.rank}.json"
        self._profiler: Any = None
        if num_steps:
            self._profiler = torch.profiler.profile(
                activities=_CATEGORIES[run.device.type],
                schedule=torch.profiler.schedule(wait=_SKIPPED_STEPS, warmup=1, active=num_steps, repeat=1),
                on_trace_ready=self._write,
                record_shapes=True,
            )

    def __enter__(self) -> "Profile":
        if self._profiler is not None:
            self._profiler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is not None:
            self._profiler.__exit__(kind, error, trace)

    def step(self) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def _write(self, profiler: Any) -> None:
        with UNLOCKED.writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._path))
