"""Writes manifests over finished shards: the first one, and further splits of the same samples."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dataprep.errors import PrepError
from dataprep.id_ranges import format_ids
from dataprep.journal import Journal, SealedFile
from dataprep.manifest import (
    DEFAULT_NAME,
    SCHEMA_VERSION,
    SPLITS,
    EncodingEntry,
    FileEntry,
    Manifest,
    ManifestError,
    QuarantineEntry,
    ScenarioEntry,
    ShardEntry,
    SourceEntry,
    SplitName,
    TaskEntry,
    TaskSplit,
    entry_of,
    load_manifest,
    manifest_path,
    write_atomically,
)
from dataprep.samples import Samples
from dataprep.scenario import Assignment, Scenario, split
from dataprep.table import Table, empty_table, load_table, samples_of, save_table

if TYPE_CHECKING:
    from dataprep.build import BuildJob

_MAX_LISTED = 60  # characters; a longer order is named by its digest, and the tasks list its classes
_RESERVED = {DEFAULT_NAME, "samples", "keys"}


def order_name(scenario: Scenario) -> str:
    """Returns the name of the order as the manifest stores it."""
    name = "reference" if scenario.seed is None else f"seed {scenario.seed}"
    if scenario.order:
        listed = ", ".join(scenario.order)
        digest = hashlib.sha256("\n".join(scenario.order).encode("utf-8", "surrogateescape")).hexdigest()
        name = f"given ({listed if len(listed) <= _MAX_LISTED else digest[:12]})"
    return f"{name}, sizes {','.join(map(str, scenario.sizes))}" if scenario.sizes else name


def assemble(job: "BuildJob", plan: Assignment, journal: Journal) -> Manifest:
    """Writes the sample table, the keys and the first manifest of a data set whose parts are all sealed.

    Returns the manifest.
    """
    out, source = job.out, job.source
    stored = list(job.formats)
    table, shards = _placed(empty_table(source.samples, stored), stored, journal)
    save_table(table, out / "samples.npy")
    keys = "".join(f"{_one_line(source.samples.key(row))}\n" for row in range(len(source.samples)))
    write_atomically(out / "keys.txt", keys.encode("utf-8", "surrogateescape"))
    num_val = int(source.samples.is_val_S.sum())
    manifest = Manifest(
        schema=SCHEMA_VERSION,
        name=DEFAULT_NAME,
        source=SourceEntry(
            kind=source.kind,
            fingerprint=source.samples.fingerprint(),
            num_train=len(source.samples) - num_val,
            num_val=num_val,
        ),
        scenario=_scenario_entry(job.scenario),
        encoding=EncodingEntry(
            resize=str(job.encoding.resize),
            quality=job.encoding.quality,
            check=job.encoding.check,
            shard_mb=job.shard_mb,
            limit_per_class=job.limit_per_class,
            num_passed_through=sum(part.num_passed_through for part in journal.parts),
            num_warnings=sum(part.num_warnings for part in journal.parts),
        ),
        classes=list(source.classes),
        domains=list(source.domains),
        formats=stored,
        samples=entry_of(out / "samples.npy", out),
        keys=entry_of(out / "keys.txt", out),
        shards=shards,
        tasks=_task_entries(plan, table, source.samples, stored),
        quarantine=[QuarantineEntry(**entry) for part in journal.parts for entry in part.quarantine],
    )
    manifest.save(out)
    return manifest


def _placed(table: Table, stored: list[str], journal: Journal) -> tuple[Table, list[ShardEntry]]:
    """Fills in where every sample is stored. Returns the table and the shards that its numbers refer to."""
    shards: list[ShardEntry] = []
    for part in sorted(journal.parts, key=lambda part: part.order):
        for file in part.files:
            if file.format not in stored:
                continue  # a spooled tar
            rows = journal.rows(part)
            at = np.searchsorted(table["id"], rows["id"])
            for column in ("is_stored", "width", "height"):
                table[column][at] = rows[column]
            table[f"{file.format}_shard"][at] = len(shards)
            place = np.arange(len(rows)) if part.is_derived else rows[f"{file.format}_place"]
            table[f"{file.format}_place"][at] = place
            table[f"{file.format}_bytes"][at] = rows["tar_bytes" if part.is_derived else f"{file.format}_bytes"]
            shards.append(_shard_entry(file, part.split))
    return table, shards


def _shard_entry(file: SealedFile, split: SplitName) -> ShardEntry:
    return ShardEntry(
        path=file.path,
        bytes=file.bytes,
        sha256=file.sha256,
        format=file.format,
        split=split,
        count=file.count,
        index=FileEntry(**file.index) if file.index else None,
    )


def resplit(where: Path, scenario: Scenario, name: str) -> Manifest:
    """Writes and returns another manifest over the shards of `where`. It reads and writes no shard."""
    if name in _RESERVED or not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or name[0] == ".":
        raise PrepError(
            f"--name {name!r} cannot be used. Use letters, digits, '-', '_' and '.', and not {DEFAULT_NAME}."
        )
    path = manifest_path(where)
    base = load_manifest(path)
    table = load_table(base, path.parent)
    target = path.parent / f"{name}.json"
    samples = samples_of(table)
    plan = split(samples, tuple(base.classes), tuple(base.domains), scenario)
    manifest = Manifest(
        schema=SCHEMA_VERSION,
        name=name,
        source=base.source,
        scenario=_scenario_entry(scenario),
        encoding=base.encoding,
        classes=base.classes,
        domains=base.domains,
        formats=base.formats,
        samples=base.samples,
        keys=base.keys,
        shards=base.shards,
        tasks=_task_entries(plan, table, samples, base.formats),
        quarantine=base.quarantine,
    )
    if target.exists():
        try:
            same = load_manifest(target, check_sizes=False) == manifest
        except ManifestError:
            same = False
        if not same:
            raise PrepError(f"{target} exists and holds another split. Choose another --name, or remove it.")
        return manifest
    manifest.save(path.parent)
    return manifest


def _one_line(key: str) -> str:
    return key.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def _scenario_entry(scenario: Scenario) -> ScenarioEntry:
    return ScenarioEntry(kind=scenario.kind, num_tasks=scenario.num_tasks, order=order_name(scenario))


def _task_entries(plan: Assignment, table: Table, samples: Samples, stored: list[str]) -> list[TaskEntry]:
    entries: list[TaskEntry] = []
    for number, task in enumerate(plan.tasks):
        parts: dict[str, TaskSplit] = {}
        for name in SPLITS:
            rows = np.flatnonzero((plan.task_S == number) & (samples.is_val_S == (name == "val")) & table["is_stored"])
            parts[name] = TaskSplit(
                count=len(rows),
                ids=format_ids(table["id"][rows].tolist()),
                shards={f: np.unique(table[f"{f}_shard"][rows]).tolist() for f in stored},
            )
        entries.append(TaskEntry(name=task.name, classes=list(task.classes), domains=list(task.domains), **parts))
    return entries
