"""Reads a run's folder: its settings, its log and its evaluations. Nothing here imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from fastcssl.config.recipes import RECIPES
from fastcssl.config.recipes.own_data import name_of
from fastcssl.errors import UserError
from fastcssl.runs.bottleneck import Machine, Verdict, verdict
from fastcssl.runs.json_file import fits, read_object, record_of
from fastcssl.runs.layout import RunFolder
from fastcssl.runs.log import EpochReport, ProbeReport, StepReport, TaskReport, read_reports
from fastcssl.runs.ownership import reading
from fastcssl.runs.results import Evaluation, Probe, evaluations
from fastcssl.runs.status import Status, read_status

_KEYS = {
    "config": dict[str, Any],
    "sources": dict[str, str],
    "words": list[str],
    "data": str,
    "task_names": list[str],
    "machine": dict[str, Any],
}

_ON = " on "  # between the names of a recipe and its data

_METHODS = {
    "moco": "MoCo",
    "simclr": "SimCLR",
    "barlow": "Barlow Twins",
    "byol": "BYOL",
    "vicreg": "VICReg",
    "supcon": "SupCon",
}
_STRATEGIES = {
    "joint": "joint",
    "finetune": "fine-tune",
    "ewc": "EWC",
    "der": "DER",
    "lump": "LUMP",
    "lessforget": "Less-Forget",
    "cassle": "CaSSLe",
    "pnr": "PNR",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The content of a run's folder, as `read_run` returns it."""

    folder: Path
    recipe: str  # its name; for a recipe that follows the data also the data's: "own on birds"
    method: str
    strategy: str
    values: dict[str, Any]  # settings by dotted key
    sources: dict[str, str]  # the source of each setting
    data: str
    task_names: tuple[str, ...]
    machine: Machine
    status: Status
    steps: list[StepReport]
    epochs: list[EpochReport]
    tasks: list[TaskReport]  # finished tasks
    probes: list[ProbeReport]
    evaluations: list[Evaluation]

    @property
    def recipe_name(self) -> str:
        return self.recipe.partition(_ON)[0]

    @property
    def title(self) -> str:
        what = title(self.method, self.strategy)
        return what if self.only_task is None else f"{what}, task {self.only_task} alone"

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def seed(self) -> int:
        return int(self.values.get("seed", 0))

    @property
    def only_task(self) -> int | None:
        found = self.values.get("only_task")
        return None if found is None else int(found)

    @property
    def is_finished(self) -> bool:
        """Returns whether all tasks are done. A run that started from another one only has reports of its own tasks."""
        return self.status.state == "finished" or len(self.tasks) == len(self.task_names)

    @property
    def bound(self) -> Verdict | None:
        """Returns the bottleneck of the finished tasks and of what the current task has logged so far."""
        times = [task.stages for task in self.tasks]
        under_way = [epoch.stages for epoch in self.epochs if epoch.task >= len(self.tasks)]
        return verdict([*times, *under_way[-1:]], self.machine)


def title(method: str, strategy: str) -> str:
    """Returns the names of a method and a strategy as people write them."""
    return f"{_METHODS.get(method, method)} + {_STRATEGIES.get(strategy, strategy)}"


def found_runs(folders: Sequence[Path]) -> list[Path]:
    """Returns the folders of runs without duplicates. A folder of several seeds is replaced by its runs."""
    found: dict[Path, Path] = {}
    for folder in folders:
        own = RunFolder(folder)
        inside = [] if own.is_run() else sorted(path.parent for path in folder.glob(f"seed*/{own.config.name}"))
        for run in inside or [folder]:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_run(folder: Path | str) -> RunRecord:
    """Returns a run's settings, everything it logged, and its evaluations. The run may be unfinished."""
    folder = Path(folder)
    described = _described(folder)
    words = described["words"]
    status = read_status(folder)
    _check_lines(RunFolder(folder).metrics)
    tasks = read_reports(folder, TaskReport, strict=True)
    steps, epochs = read_reports(folder, StepReport, strict=True), read_reports(folder, EpochReport, strict=True)
    probes = read_reports(folder, ProbeReport, strict=True)
    if not tasks:
        raise UserError(
            f"{folder} has no finished task yet, so there is nothing to report. fastcssl-train status {folder} shows "
            "its progress."
        )
    return RunRecord(
        folder=folder,
        recipe=_recipe_title(words[0], described["data"]),
        method=words[1],
        strategy=words[2],
        values=dict(_flat(described["config"])),
        sources=described["sources"],
        data=described["data"],
        task_names=tuple(described["task_names"]),
        machine=described["machine"],
        status=status,
        steps=steps,
        epochs=epochs,
        tasks=tasks,
        probes=probes,
        evaluations=sorted((found for _, found in evaluations(folder)), key=_place),
    )


def _recipe_title(recipe: str, data: str) -> str:
    """Returns the recipe's name, with the data's if the recipe is for any data."""
    follows = recipe in RECIPES and RECIPES[recipe].follows_data
    return f"{recipe}{_ON}{name_of(Path(data))}" if follows else recipe


def _place(found: Evaluation) -> tuple[int, bool, str]:
    """Returns a key that sorts the paper's protocol first."""
    return get_args(Probe).index(found.probe), found.scope != "all", found.name


def order(method: str, strategy: str) -> tuple[int, int]:
    """Returns a key that sorts rows as the paper does, with unknown methods and strategies last."""
    methods, strategies = list(_METHODS), list(_STRATEGIES)
    return (
        methods.index(method) if method in methods else len(methods),
        strategies.index(strategy) if strategy in strategies else len(strategies),
    )


def _described(folder: Path) -> dict[str, Any]:
    path, remedy = RunFolder(folder).config, "Resuming the run writes it again."
    with reading(path):
        is_there, is_folder = path.exists(), folder.is_dir()
    if not is_there:
        seen = f"it holds no {path.name}" if is_folder else "there is no such folder"
        raise UserError(f"{folder} is not a run: {seen}. Give the folder that fastcssl-train wrote.")
    described = read_object(path, remedy)
    try:
        for key, kind in _KEYS.items():
            if not fits(kind, described.get(key)):
                raise ValueError(f"{key} is {'damaged' if key in described else 'missing'}")
        if len(described["words"]) != 3:
            raise ValueError("words are not three")
        for key in ("seed", "only_task"):
            if not fits(int | None, described["config"].get(key)):
                raise ValueError(f"{key} is {described['config'][key]!r:.60}")
        described["machine"] = record_of(Machine, described["machine"])
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}). {remedy}") from None
    return described


def _check_lines(path: Path) -> None:
    """Raises a UserError for a damaged line. The last line may be incomplete if the run was killed or is running."""
    if not path.exists():
        raise UserError(f"{path} does not exist, so there is nothing to report. Train the run again.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Check its permissions.") from None
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        if not (line.startswith(b"{") and line.endswith(b"}")) or b"\0" in line:
            raise UserError(
                f"Line {number} of {path} is damaged. Delete that line to report the rest, or resume the run, which "
                "drops it."
            )


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found
