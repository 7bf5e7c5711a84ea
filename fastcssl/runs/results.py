"""The result files of evaluations: RUN/evaluations/<name>.json, one per probe, scope, data set and settings.

A file holds one table, with one row per checkpoint of the run and one column per evaluation task. It names the manifest
and the checkpoints by their hashes, so that the next evaluation can skip what is already known.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dataprep.manifest import ManifestError, typed, write_atomically
from fastcssl.errors import UserError
from fastcssl.runs.json_file import NotAnObjectError, parsed_object
from fastcssl.runs.layout import RunFolder
from fastcssl.runs.metrics import AVERAGE, METRICS, AccuracyTable, MetricInputs, Need, average, single_metrics
from fastcssl.runs.ownership import UNLOCKED, reading

FORMAT = 1
DOWNSTREAM = "downstream:"

Probe = Literal["linear", "linear-cached", "knn"]
ScopeName = Literal["all", "per-task", "domain-aware", "domain-agnostic", "semi-1", "semi-10"]  # or downstream:NAME


class ResultError(UserError):
    """A result file cannot be used. The message names the file, the reason and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedData:
    """The data set that was evaluated on."""

    path: str
    sha256: str  # of the manifest
    source: str
    scenario: str
    num_tasks: int
    task_names: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEncoder:
    """One checkpoint that was evaluated."""

    task: int  # the run's task, counted from 0; 0 for an encoder that is not from a run
    path: str
    sha256: str
    seen: list[int]  # the manifest's tasks that it has learnt; [] if unknown, or if it learnt other data


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """Accuracies (top-1) of other encoders under the same probe, one per column."""

    ft: list[float | None] | None = None  # FT_i: of a model trained only on task i
    random: list[float] | None = None  # of an encoder that was not trained
    chance: list[float] | None = None  # of guessing one of the classes; older files do not have it


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """A after each checkpoint, and one number for each other row of the table `fastcssl.runs.metrics.METRICS`.

    Each metric is an attribute, such as `metrics.S`. It is None if its inputs are missing, or if the file is older than
    the metric.
    """

    A: list[float]
    numbers: dict[str, float | None] = field(default_factory=dict)  # by name, without A
    missing: list[str] = field(default_factory=list)  # one sentence for each need that is not met

    def __getattr__(self, name: str) -> float | None:
        """Returns a metric by its name."""
        if name in METRICS:
            return self.numbers.get(name)
        raise AttributeError(f"Metrics has no {name!r}")

    def last(self, name: str) -> float | None:
        """Returns a metric by its name; for A, the value after the last checkpoint."""
        return self.A[-1] if name == AVERAGE.name else self.numbers.get(name)

    def as_json(self) -> dict[str, Any]:
        """Returns the entry of a result file: one key per metric, and `missing`."""
        numbers = {row.name: self.numbers.get(row.name) for row in single_metrics()}
        return {AVERAGE.name: self.A, **numbers, "missing": self.missing}


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBy:
    """The command and the version of fastcssl that made a result."""

    command: str
    version: str
    commit: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A table of accuracies (shares 0..1) with one row per checkpoint and one column per task, and its metrics."""

    format: int
    probe: Probe
    scope: str
    settings: dict[str, Any]
    manifest: EvaluatedData
    columns: list[str]  # names of the evaluation tasks: the manifest's tasks, or its domains
    checkpoints: list[EvaluatedEncoder]  # in the order in which they were trained
    top1: list[list[float]]  # [checkpoint][column], shares 0..1
    top5: list[list[float]]
    overall_top1: list[float]  # over all validation images together, so that each image counts the same
    overall_top5: list[float]
    num_val: list[int]
    reference: References
    metrics: Metrics
    seconds: float  # duration of the pass, which may have probed other encoders as well
    made_by: MadeBy

    @property
    def name(self) -> str:
        """Returns the name of the result file, without the suffix."""
        return result_name(self.probe, self.scope, self.settings, self.manifest.sha256)

    @property
    def metric_inputs(self) -> MetricInputs:
        """Returns the inputs of its metrics."""
        return metric_inputs(self.top1, [encoder.seen for encoder in self.checkpoints], self.reference)

    def as_json(self) -> dict[str, Any]:
        """Returns the content of the result file."""
        return asdict(self) | {"metrics": self.metrics.as_json()}

    def save(self, run: Path) -> Path:
        """Writes RUN/evaluations/<name>.json atomically and returns its path."""
        _check(self, "the result")
        folder = RunFolder(run).evaluations
        path = folder / f"{self.name}.json"
        with UNLOCKED.writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(self.as_json(), indent=1, allow_nan=False).encode())
        return path


def result_name(probe: Probe, scope: str, settings: Mapping[str, Any], manifest_sha256: str) -> str:
    """Returns a readable name that ends in six digits of a hash of everything that identifies the evaluation."""
    identity = json.dumps([probe, scope, dict(settings), manifest_sha256], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:6]
    return f"{probe}-{re.sub(r'[^A-Za-z0-9._-]+', '-', scope)}-{digest}"


def load_evaluation(path: Path) -> Evaluation:
    """Reads a result file and returns its evaluation. Raises ResultError if the file cannot be used."""
    with reading(path):
        text = path.read_bytes()
    try:
        content = parsed_object(text)
    except NotAnObjectError:
        content = {}
    except ValueError:
        raise ResultError(
            f"{path} is not valid JSON: it is half-written or damaged. Delete it and run fastcssl-eval again."
        ) from None
    version = content.get("format")
    if version != FORMAT:
        raise ResultError(
            f"{path} is not a result that this version of fastcssl-eval can read (format {version!r}, not {FORMAT}). "
            "Delete it and run fastcssl-eval again."
        )
    try:
        found: Evaluation = typed(Evaluation, content | _metric_fields(content) | _reference_fields(content), str(path))
    except ManifestError as error:
        raise ResultError(f"{error} Delete the file and run fastcssl-eval again.") from None
    _check(found, str(path))
    return found


def _metric_fields(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the entry `metrics` of a file as the fields of `Metrics`.

    A metric that an older file does not have becomes None. A metric that only a newer version knows is ignored.
    """
    stored = content.get("metrics")
    if not isinstance(stored, dict):
        return {}
    fields = {key: stored[key] for key in (AVERAGE.name, "missing") if key in stored}
    return {"metrics": fields | {"numbers": {row.name: stored.get(row.name) for row in single_metrics()}}}


def _reference_fields(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the entry `reference` of a file. Files before fastcssl recorded chance become None there."""
    stored = content.get("reference")
    return {"reference": {"chance": None} | stored} if isinstance(stored, dict) else {}


def evaluations(run: Path) -> Iterator[tuple[Path, Evaluation]]:
    """Yields the path and the content of each result file of a run, sorted by name."""
    for path in sorted(RunFolder(run).evaluations.glob("*.json")):
        yield path, load_evaluation(path)


def _check(found: Evaluation, where: str) -> None:
    """Raises ResultError if the fields contradict each other: a table of the wrong shape would be shown wrongly."""

    def refuse(what: str) -> ResultError:
        return ResultError(f"{where}: {what}. Delete it and run fastcssl-eval again.")

    if not (found.scope in get_args(ScopeName) or found.scope.startswith(DOWNSTREAM)):
        raise refuse(f"{found.scope!r} is not a scope")
    num_rows, num_columns = len(found.checkpoints), len(found.columns)
    if not num_rows or not num_columns or len(found.num_val) != num_columns:
        raise refuse("checkpoints, columns and num_val do not fit each other")
    tables = (("top1", found.top1, found.overall_top1), ("top5", found.top5, found.overall_top5))
    for name, table, overall in tables:
        if [len(row) for row in table] != [num_columns] * num_rows or len(overall) != num_rows:
            raise refuse(f"{name} is not a table of {num_rows} checkpoints and {num_columns} columns")
        if not all(0 <= value <= 1 for row in (*table, overall) for value in row):
            raise refuse(f"{name} holds numbers outside 0..1")
    for row in (found.reference.ft, found.reference.random, found.reference.chance):
        if row is not None and len(row) != num_columns:
            raise refuse(f"a reference has {len(row)} values for {num_columns} columns")
    values = [*found.metrics.A, *found.metrics.numbers.values(), found.seconds]
    if len(found.metrics.A) != num_rows or not all(value is None or math.isfinite(value) for value in values):
        raise refuse("its metrics are not finite, or A does not have one value per checkpoint")


# ---- The metrics of a table ------------------------------------------------------------------------------------------


def metric_inputs(top1: AccuracyTable, seen: Sequence[Sequence[int]], reference: References) -> MetricInputs:
    """Returns the inputs of the metrics. `seen`: the columns that each row's encoder has learnt."""
    return MetricInputs(top1=top1, seen=seen, ft=reference.ft, random=reference.random)


def metrics_of(top1: AccuracyTable, seen: Sequence[Sequence[int]], reference: References) -> Metrics:
    """Returns every metric whose needs are met, and the reasons why the others are missing.

    `seen`: the columns that each row's encoder has learnt. Most metrics need 0..t in row t, for every task.
    """
    known = metric_inputs(top1, seen, reference)
    return Metrics(
        A=average(top1, seen),
        numbers={
            row.name: None if any(map(known.lacks, row.needs)) else row.compute(known) for row in single_metrics()
        },
        missing=_missing(known),
    )


def _missing(known: MetricInputs) -> list[str]:
    """Returns one sentence for each need that is not met. It begins with the names of the metrics that need it.

    Result files hold these sentences, and a file is rewritten if they differ, so their wording must not change.
    """
    if not known.has_every_task:
        names, num_columns = _names_that_need(Need.EVERY_TASK), len(known.top1[0])
        return [
            f"{_joined(names)} compare{_s(names)} checkpoints after every task, two or more; here are "
            f"{len(known.top1)} for {num_columns} column{'s' if num_columns > 1 else ''}."
        ]
    found = []
    if lacking := known.missing_references:
        names = _names_that_need(Need.REFERENCES)
        found.append(
            f"{_joined(names)} need{_s(names)} models trained on one task alone; those of {_listed('task', lacking)} "
            "are missing. fastcssl-eval prints the commands that train them, and takes them by --references."
        )
    if known.lacks(Need.RANDOM_ENCODER):
        names = _names_that_need(Need.RANDOM_ENCODER)
        found.append(
            f"{_joined(names)} need{_s(names)} the accuracy of a random encoder. Leave --no-random-encoder out."
        )
    return found


def metrics_named_in(sentence: str) -> list[str]:
    """Returns the metrics that a sentence of `Metrics.missing` begins with."""
    names = re.split(r" (?:compare|need)s? ", sentence, maxsplit=1)[0]
    return [name for name in re.split(r", | and ", names) if name in METRICS]


def _names_that_need(need: Need) -> list[str]:
    return [row.name for row in METRICS.values() if need in row.needs]


def _joined(names: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _s(names: Sequence[str]) -> str:
    """Returns the ending of the verb."""
    return "s" if len(names) == 1 else ""


def _listed(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
