"""Finds where a run starts: at its beginning, at its own newest checkpoint, or after a task of another run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastcssl.config.upgrades import implied
from fastcssl.errors import UserError
from fastcssl.learn.random_state import restore_random_state
from fastcssl.runs.changed_settings import refuse_changed
from fastcssl.runs.checkpoint import Found, latest, load
from fastcssl.runs.layout import RunFolder, start_of
from fastcssl.runs.log import TaskReport
from fastcssl.runs.ownership import FileGuard, adopt_encoders, reading
from fastcssl.train.build import Run
from fastcssl.train.state import Position

_OWN_TO_A_STRATEGY = ("strategy", "online_probe", "probe_lr")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """The starting point of a run. `state` is None for a new run."""

    position: Position = field(default_factory=Position)
    state: dict[str, Any] | None = None
    tasks: tuple[TaskReport, ...] = ()  # already finished
    warnings: tuple[str, ...] = ()

    def inside(self, index: int) -> bool:
        """Returns whether the run resumes in the middle of this task."""
        return self.state is not None and index == self.position.task and not self.position.ended


def find_start(run: Run, folder: RunFolder, data: Path, start_from: str | None, guard: FileGuard) -> Start:
    """Returns the newest intact checkpoint of this run or, if it has none, the state of the run it starts from.

    guard: protects the encoders that are copied from that other run.
    """
    leads = run.world.rank == 0
    found: Found | None = latest(folder.checkpoints) if leads else None
    warnings = found.warnings if found else ()
    name = run.world.share(found.path.name if found else "")
    current, unsaid = run.config.identity(), implied(run.config)
    if name:
        path = folder.checkpoints / name
        state = found.state if found else load(path)
        refuse_changed(state["config"], current, path, unsaid)
    elif start_from is not None:
        with reading(Path(start_from)):
            path = start_of(start_from)
        state = load(path)
        refuse_changed(_shared(state["config"]), _shared(current), path, unsaid)
    else:
        return Start(warnings=warnings)
    if state["manifest"] != run.manifest_sha256:
        raise UserError(
            f"{data} is not the data that {path} was trained on: its manifest has changed. Give the same "
            "data, or start over with another --out."
        )
    if not name and leads:
        adopt_encoders(path, folder, guard)
    return Start(
        position=Position(**state["position"]),
        state=state,
        tasks=tuple(TaskReport(**report) for report in state["tasks"]),
        warnings=warnings,
    )


def _shared(identity: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that a run must share with the run it starts from; the strategy may differ."""
    return {key: value for key, value in identity.items() if key not in _OWN_TO_A_STRATEGY}


def restore(run: Run, start: Start) -> None:
    """Loads the checkpoint's values into the run."""
    if start.state is None:
        return
    # Shapes first, then values. The frozen copy created here is replaced by the checkpoint's.
    task = run.task(start.position.task)
    run.strategy.begin_task(task, run.method)
    run.load_method(start.state)
    saved = start.state["config"]["strategy"]
    same = saved == {key: value for key, value in run.config.identity()["strategy"].items() if key in saved}
    if same and start.state["strategy_name"] == run.strategy.name:
        run.load_strategy(start.state)
    else:
        # The state is from a run with another strategy: ours derives what it needs from the finished task.
        run.strategy.begin_task(task, run.method)
        run.strategy.end_task(task, run.method)
    restore_random_state(start.state, run.world, run.device)
