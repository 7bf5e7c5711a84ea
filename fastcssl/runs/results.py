"""What an evaluation found, as a file: RUN/evaluations/<name>.json, one for each (probe, scope, data, settings).

A file holds one table: a row for each checkpoint of the run, a column for each evaluation task. It names the manifest
and the checkpoints by their hashes, so that the next evaluation knows what it need not do again.
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
from fastcssl.runs import metrics

FORMAT = 1
FOLDER = "evaluations"
DOWNSTREAM = "downstream:"

Probe = Literal["linear", "linear-cached", "knn"]
Scope = Literal["all", "per-task", "domain-aware", "domain-agnostic", "semi-1", "semi-10"]  # or downstream:NAME


class ResultError(UserError):
    """A result file that cannot be used: which, why, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedData:
    path: str
    sha256: str  # of the manifest
    source: str
    scenario: str
    num_tasks: int
    task_names: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEncoder:
    task: int  # of the run, counted from 0; for an encoder that is no run's, its place on the command line
    path: str
    sha256: str
    seen: list[int]  # the manifest's tasks that it has learnt; [] if nobody knows, or if they are not these


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """Accuracies (top-1) of other encoders under the same probe, one a column."""

    ft: list[float | None] | None = None  # FT_i: trained on task i alone
    random: list[float] | None = None  # not trained at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    A: list[float]  # after each checkpoint
    S: float | None = None
    P: float | None = None
    F: float | None = None
    missing: list[str] = field(default_factory=list)  # a sentence for each that is None


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBy:
    command: str
    version: str
    commit: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A table of accuracies (shares 0..1), a row a checkpoint and a column a task, with A, S, P and F."""

    format: int
    probe: Probe
    scope: str
    settings: dict[str, Any]
    manifest: EvaluatedData
    columns: list[str]  # names of the evaluation tasks: the manifest's tasks, or its domains
    checkpoints: list[EvaluatedEncoder]  # in the order in which they were trained
    top1: list[list[float]]  # [checkpoint][column], shares 0..1
    top5: list[list[float]]
    overall_top1: list[float]  # over all validation images together, so a task counts by its images
    overall_top5: list[float]
    num_val: list[int]
    reference: References
    metrics: Metrics
    seconds: float  # that it took; of all that was probed side by side
    made_by: MadeBy

    @property
    def name(self) -> str:
        return result_name(self.probe, self.scope, self.settings, self.manifest.sha256)

    def save(self, run: Path) -> Path:
        """Whole or not at all."""
        _check(self, "the result")
        folder = run / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        write_atomically(path, json.dumps(asdict(self), indent=1, allow_nan=False).encode())
        return path


def result_name(probe: Probe, scope: str, settings: Mapping[str, Any], manifest_sha256: str) -> str:
    """What a person recognises, and six digits of what makes it this evaluation and no other."""
    identity = json.dumps([probe, scope, dict(settings), manifest_sha256], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:6]
    return f"{probe}-{re.sub(r'[^A-Za-z0-9._-]+', '-', scope)}-{digest}"


def load_evaluation(path: Path) -> Evaluation:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"{path} cannot be read ({error.strerror}). Check its permissions.") from None
    except (ValueError, RecursionError):
        raise ResultError(
            f"{path} is not valid JSON: half-written or damaged. Delete it and run fastcssl-eval again."
        ) from None
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise ResultError(
            f"{path} is no result of fastcssl-eval that this version reads (format {version!r}, not {FORMAT}). "
            "Delete it and run fastcssl-eval again."
        )
    try:
        found: Evaluation = typed(Evaluation, content, str(path))
    except ManifestError as error:
        raise ResultError(f"{error} Delete the file and run fastcssl-eval again.") from None
    _check(found, str(path))
    return found


def evaluations(run: Path) -> Iterator[tuple[Path, Evaluation]]:
    """All results of a run, by name."""
    for path in sorted((run / FOLDER).glob("*.json")):
        yield path, load_evaluation(path)


def _check(found: Evaluation, where: str) -> None:
    """That the parts fit each other: a table of another shape would be drawn wrongly, not refused."""

    def refuse(what: str) -> ResultError:
        return ResultError(f"{where}: {what}. Delete it and run fastcssl-eval again.")

    if not (found.scope in get_args(Scope) or found.scope.startswith(DOWNSTREAM)):
        raise refuse(f"{found.scope!r} is not a scope")
    num_rows, num_columns = len(found.checkpoints), len(found.columns)
    if not num_rows or not num_columns or len(found.num_val) != num_columns:
        raise refuse("checkpoints, columns and num_val do not fit each other")
    for name in ("top1", "top5"):
        table, overall = getattr(found, name), getattr(found, f"overall_{name}")
        if [len(row) for row in table] != [num_columns] * num_rows or len(overall) != num_rows:
            raise refuse(f"{name} is not a table of {num_rows} checkpoints and {num_columns} columns")
        if not all(0 <= value <= 1 for row in (*table, overall) for value in row):
            raise refuse(f"{name} holds numbers that are no shares")
    for row in (found.reference.ft, found.reference.random):
        if row is not None and len(row) != num_columns:
            raise refuse(f"a reference has {len(row)} values for {num_columns} columns")
    values = [*found.metrics.A, found.metrics.S, found.metrics.P, found.metrics.F, found.seconds]
    if len(found.metrics.A) != num_rows or not all(value is None or math.isfinite(value) for value in values):
        raise refuse("its metrics are not finite or not one a checkpoint")


# ---- The metrics of a table, where they can be known -----------------------------------------------------------------


def metrics_of(
    top1: Sequence[Sequence[float]],
    seen: Sequence[Sequence[int]],
    reference: References,
) -> Metrics:
    """`seen` says which columns each row's encoder has learnt; S, P and F need 0..t in row t, for every task."""
    num_rows, num_columns = len(top1), len(top1[0])
    found: dict[str, float | None] = dict.fromkeys("SPF")
    missing: list[str] = []
    if [list(tasks) for tasks in seen] != [list(range(t + 1)) for t in range(num_columns)] or num_columns < 2:
        missing.append(
            f"S, P and F compare checkpoints after every task, two or more; here are {num_rows} for {num_columns} "
            f"column{'s' if num_columns > 1 else ''}."
        )
        return Metrics(A=metrics.average(top1, seen), missing=missing)
    found["S"] = metrics.stability(top1)
    lacking = [i for i in range(1, num_columns) if reference.ft is None or reference.ft[i] is None]
    if lacking:
        missing.append(
            f"P needs models trained on one task alone; those of {_listed('task', lacking)} are missing. fastcssl-eval "
            "prints the commands that train them, and takes them by --references."
        )
    else:
        assert reference.ft is not None
        found["P"] = metrics.plasticity(top1, reference.ft)
    if reference.random is None:
        missing.append("F needs the accuracy of a random encoder. Leave --no-random-encoder out.")
    else:
        found["F"] = metrics.forward_transfer(top1, reference.random)
    return Metrics(A=metrics.average(top1, seen), **found, missing=missing)


def _listed(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
