"""Opens a prepared data set for reading: its manifest, its sample table and the paths of its shards."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from dataprep.manifest import Manifest, SplitName, check_size, load_manifest, manifest_path
from dataprep.table import Table, load_table, rows_of_ids

Order = Literal["shuffled", "sequential", "endless"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A prepared data set. Open one with `Prepared.open(folder)`."""

    manifest: Manifest
    folder: Path
    table: Table  # one row per sample, sorted by id

    @classmethod
    def open(cls, where: Path | str) -> "Prepared":
        """Opens a prepared data set. `where` is its folder, or one of its manifests."""
        path = manifest_path(Path(where))
        manifest = load_manifest(path)
        return cls(manifest=manifest, folder=path.parent, table=load_table(manifest, path.parent))

    def shard_path(self, number: int) -> Path:
        """Returns the path of a shard of the manifest."""
        return self.manifest.shards[number].path_in(self.folder)

    def check_shards(self, numbers: Iterable[int]) -> None:
        """Raises ManifestError if one of these shards is missing or does not have its size any more."""
        for number in numbers:
            check_size(self.manifest.shards[number], self.folder)

    def rows(self, selection: "Selection") -> npt.NDArray[np.int64]:
        """Returns the table's rows of a selection, sorted by id."""
        num_tasks = len(self.manifest.tasks)
        for task in selection.tasks:
            if not 0 <= task < num_tasks:
                raise ValueError(f"task {task} does not exist; the manifest has {num_tasks}, counted from 0")
        parts = [self.manifest.tasks[task].part(selection.split) for task in selection.tasks]
        ids = np.concatenate([np.fromiter(part.iter_ids(), np.int64, part.count) for part in parts])
        ids.sort()
        if selection.ids is not None:
            wanted = np.unique(np.asarray(selection.ids, np.int64))
            missing = np.setdiff1d(wanted, ids)
            if len(missing):
                raise ValueError(f"sample {missing[0]} is not in {selection.split} of tasks {selection.tasks}")
            ids = wanted
        return rows_of_ids(self.table, ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """A choice of samples and their order. It may span tasks and shards (joint, replay, Fisher passes, 1 % probes)."""

    tasks: tuple[int, ...]
    split: SplitName = "train"
    ids: npt.NDArray[np.int64] | None = None  # None: all samples of the tasks
    order: Order = "shuffled"

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("a selection needs at least one task")
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"a selection names a task twice: {self.tasks}")
