"""Compares runs: averages seeds, and puts published values beside them with notes on how these were measured."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastcssl.config.recipes import RECIPES, settled
from fastcssl.report.published import Published, published
from fastcssl.report.runs import RunRecord, order
from fastcssl.runs.metrics import METRICS, average, compared_metrics
from fastcssl.runs.overview import row_name
from fastcssl.runs.results import DOWNSTREAM, Evaluation, metrics_named_in

PROBES = {"linear": "linear probe", "linear-cached": "linear probe, cached features", "knn": "k-NN"}
SCOPES = {
    "all": "all classes",
    "per-task": "classes of each task",
    "domain-aware": "one probe per domain",
    "domain-agnostic": "one probe for all domains",
    "semi-1": "1 % of the labels",
    "semi-10": "10 % of the labels",
}
# Settings that do not change the results, or that a comparison is not about.
_BESIDE = ("seed", "loader", "augment", "compile", "online_probe", "probe_lr", "recipe")
_BESIDE_GROUPS = ("run.", "expect.")
_OF_TABLE = ("metric", "k", "momentum", "epochs")  # settings of a probe that get a table of their own
_OF_ROW = ("lr", "batch_size", "strength")  # settings of a probe that get a row of their own
_SETTINGS = {"metric": "", "k": "k = ", "lr": "lr ", "batch_size": "batches of ", "strength": "strength "}
_MAX_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A metric in percent, once per seed."""

    each: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.each)

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.each) if len(self.each) > 1 else None

    def __str__(self) -> str:
        mean = f"{self.mean:z.2f}"  # z: 0.00 instead of -0.00
        return mean if self.deviation is None else f"{mean} ± {self.deviation:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """Runs that differ only in their seeds, under one evaluation."""

    title: str
    runs: tuple[RunRecord, ...]
    results: tuple[Evaluation, ...]  # one per run
    metrics: dict[str, Value]
    A_T: tuple[Value, ...]  # after each task
    published: Published | None = None
    mismatches: tuple[str, ...] = ()

    @property
    def num_seeds(self) -> int:
        return len(self.runs)

    @property
    def first_T(self) -> tuple[Value, ...]:
        """Returns the accuracy on the first task after each task."""
        return tuple(
            Value(each=tuple(100 * result.top1[t][0] for result in self.results)) for t in range(len(self.A_T))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The table of one recipe and one evaluation."""

    recipe: str
    about: str
    evaluation: str
    rows: list[ComparisonRow] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Returns every mismatch once, in the order of the rows."""
        return list(dict.fromkeys(note for row in self.rows for note in row.mismatches))

    def marks(self, row: ComparisonRow) -> str:
        """Returns the marks of the notes that concern the row, such as "a, c"."""
        notes = self.notes
        return ", ".join(mark(notes.index(note)) for note in row.mismatches)

    @property
    def is_telling(self) -> bool:
        """Returns whether it says more than an overview: published values, or means over seeds of several folders."""
        return any(row.published or len({row_name(run.folder)[0] for run in row.runs}) > 1 for row in self.rows)

    @property
    def references(self) -> dict[str, list[float]]:
        """Returns A after each task, in percent, of a random encoder and of chance, where results have them.

        The means are over the tasks that a run has learnt by then, as those of the runs are.
        """
        results = [result for row in self.rows for result in row.results]
        longest = max(results, key=lambda result: len(result.checkpoints))
        fitting = [result.reference for result in results if len(result.columns) == len(longest.columns)]
        seen = [encoder.seen for encoder in longest.checkpoints]
        found = {}
        for title, rows in (
            ("random encoder", [reference.random for reference in fitting if reference.random]),
            ("chance", [reference.chance for reference in fitting if reference.chance]),
        ):
            if rows:
                means = [100 * statistics.fmean(column) for column in zip(*rows, strict=True)]
                found[title] = average([means] * len(seen), seen)
        return found

    @property
    def curves(self) -> tuple[object, ...]:
        """Returns what its figure shows. Scopes that coincide on the data have equal curves."""
        return (self.recipe, self.rows[0].results[0].probe, *((row.title, row.A_T) for row in self.rows))


def lacking(tables: Iterable[Comparison]) -> list[str]:
    """Returns why metrics are missing from the columns, and how to get them. Runs with one checkpoint are skipped."""
    results = (result for table in tables for row in table.rows for result in row.results)
    found = (text for result in results if len(result.checkpoints) > 1 for text in result.metrics.missing)
    return [text for text in dict.fromkeys(found) if _is_about_columns(text)]


def _is_about_columns(text: str) -> bool:
    names = metrics_named_in(text)
    return not names or any(METRICS[name].is_compared for name in names)


def mark(number: int) -> str:
    """Returns the mark of a note: a to z, then aa, ab and so on."""
    return chr(ord("a") + number) if number < 26 else f"{mark(number // 26 - 1)}{mark(number % 26)}"


def evaluation_title(found: Evaluation, others: Sequence[Evaluation] = (), *, of_row: bool = False) -> str:
    """Returns probe, scope and the settings in which it differs from the others. of_row: also the settings of rows."""
    scope = SCOPES.get(found.scope) or f"on {found.scope.removeprefix(DOWNSTREAM)}"
    telling = (*_OF_TABLE, *_OF_ROW) if of_row else _OF_TABLE
    keys = dict.fromkeys(key for other in others for key in other.settings if key in telling)
    settings = [
        f"{_SETTINGS.get(key, f'{key} ')}{shown(found.settings.get(key))}"
        for key in keys
        if any(other.settings.get(key) != found.settings.get(key) for other in others)
    ]
    return ", ".join((PROBES.get(found.probe, found.probe), scope, *settings))


def coinciding(found: Iterable[Evaluation]) -> list[list[Evaluation]]:
    """Returns groups of evaluations that differ in nothing but the name of their scope."""
    groups: dict[str, list[Evaluation]] = {}
    for made in found:
        key = json.dumps([made.probe, made.settings, made.manifest.sha256, made.columns, made.top1, made.metrics.A])
        groups.setdefault(key, []).append(made)
    return list(groups.values())


def compared(runs: Sequence[RunRecord]) -> list[Comparison]:
    """Returns one comparison per recipe and evaluation."""
    pairs = [(run, found) for run in runs for found in run.evaluations]
    tables: dict[tuple[str, ...], Comparison] = {}
    groups: dict[tuple[str, ...], list[tuple[RunRecord, Evaluation]]] = {}
    for run, found in pairs:
        groups.setdefault((*_place(run, found), *_sort(run, found)), []).append((run, found))
    family: dict[tuple[str, ...], list[list[tuple[RunRecord, Evaluation]]]] = {}
    for members in groups.values():
        family.setdefault((*_place(*members[0]), members[0][0].title), []).append(members)
    for members in groups.values():
        run, found = members[0]
        place = _place(run, found)
        if place not in tables:
            others = [other for run_, other in pairs if _place(run_, other)[:3] == place[:3]]
            tables[place] = Comparison(recipe=run.recipe, about=_about(run), evaluation=evaluation_title(found, others))
        tables[place].rows.append(_row(members, family[(*place, run.title)]))
    for table in tables.values():
        table.rows.sort(key=lambda row: (order(row.runs[0].method, row.runs[0].strategy), row.title))
    return sorted(tables.values(), key=_order)


def _about(run: RunRecord) -> str:
    """Describes the data of a run, which may use a recipe's settings on other data."""
    if run.recipe_name not in RECIPES:
        return ""
    data = RECIPES[run.recipe_name]
    if data.follows_data:
        return f"{run.data}, {len(run.task_names)} tasks"
    expected = tuple(run.values.get(f"expect.{name}") for name in ("source", "scenario", "num_tasks"))
    return data.about if expected == (data.source, data.scenario, data.num_tasks) else "its settings, on other data"


def _order(table: Comparison) -> tuple[str, int, bool, str]:
    found = table.rows[0].results[0]
    return table.recipe, list(PROBES).index(found.probe), found.scope != "all", table.evaluation


def _place(run: RunRecord, found: Evaluation) -> tuple[str, ...]:
    return (run.recipe, found.probe, found.scope, json.dumps([found.settings.get(key) for key in _OF_TABLE]))


def _sort(run: RunRecord, found: Evaluation) -> tuple[str, ...]:
    """Returns a key. Runs with the same key are averaged."""
    return (run.method, run.strategy, json.dumps([_deciding(run), _asked(found), found.manifest.sha256]))


def _deciding(run: RunRecord) -> dict[str, Any]:
    return {key: value for key, value in sorted(run.values.items()) if not _is_beside(key)}


def _is_beside(key: str) -> bool:
    return key in _BESIDE or key.startswith(_BESIDE_GROUPS)


def _asked(found: Evaluation) -> dict[str, Any]:
    return {key: value for key, value in sorted(found.settings.items()) if key != "seed"}


def _row(
    members: list[tuple[RunRecord, Evaluation]], family: list[list[tuple[RunRecord, Evaluation]]]
) -> ComparisonRow:
    members = sorted(members, key=lambda pair: pair[0].seed)
    run, found = members[0]
    results = [result for _, result in members]
    metrics = {}
    for spec in compared_metrics():
        each = [value for result in results if (value := result.metrics.last(spec.name)) is not None]
        if len(each) == len(results):
            metrics[spec.name] = Value(each=tuple(100 * value for value in each))
    length = min(len(result.metrics.A) for result in results)
    A_T = tuple(Value(each=tuple(100 * result.metrics.A[t] for result in results)) for t in range(length))
    known = published(run.recipe, run.method, run.strategy, found.scope) if run.only_task is None else None
    return ComparisonRow(
        title=", ".join((run.title, *_differences(members[0], [other[0] for other in family]))),
        runs=tuple(run for run, _ in members),
        results=tuple(results),
        metrics=metrics,
        A_T=A_T,
        published=known,
        mismatches=tuple(mismatches(run, found, known)) if known else (),
    )


def _differences(mine: tuple[RunRecord, Evaluation], family: list[tuple[RunRecord, Evaluation]]) -> list[str]:
    """Returns the settings in which a row differs from other rows with the same title."""
    named = []
    for label, values in (("", [_deciding(run) for run, _ in family]), ("probe ", [_asked(r) for _, r in family])):
        own = values[next(place for place, pair in enumerate(family) if pair[0] is mine[0] and pair[1] is mine[1])]
        for key in own:
            if any(json.dumps(other.get(key)) != json.dumps(own[key]) for other in values):
                named.append(f"{label}{key} {shown(own[key])}")
    if len({found.manifest.sha256 for _, found in family}) > 1:
        named.append(f"data {mine[1].manifest.path}")
    return named


def shown(value: Any) -> str:
    """Returns a setting's value as tables show it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return "none" if value is None else str(value)


# ---- Differences between a run and the published measurement ---------------------------------------------------------


def mismatches(run: RunRecord, found: Evaluation, known: Published) -> Iterable[str]:
    """Yields one sentence per reason why a run's number and the published one cannot be compared directly."""
    if known.protocol.caution:
        yield known.protocol.caution
    if known.caution:
        yield known.caution
    if found.probe != "linear":
        yield f"Published with a linear probe; this is from: {PROBES.get(found.probe, found.probe)}."
    elif known.protocol.probe == "linear":
        epochs, momentum = found.settings.get("epochs", 100), found.settings.get("momentum", 0.0)
        if epochs != 100:
            yield f"Published with a probe of 100 epochs; this has {epochs}."
        if momentum != 0:
            yield f"The authors' released probe has momentum 0; this has {shown(momentum)}, as CaSSLe's probe does."
    other = _other_settings(run)
    if other:
        rest = f", and {len(other) - _MAX_NAMED} more" if len(other) > _MAX_NAMED else ""
        yield f"Trained with other settings than published: {', '.join(other[:_MAX_NAMED])}{rest}."
    if len(found.checkpoints) < len(run.task_names) or not run.is_finished:
        yield f"After {len(found.checkpoints)} of {len(run.task_names)} tasks only."


def _other_settings(run: RunRecord) -> list[str]:
    """Returns the settings that differ, as "epochs 2 (published: 500)", with the most important ones first."""
    theirs = settled(run.recipe, run.method, run.strategy, "published")
    other = {
        key: f"{key} {shown(run.values[key])} (published: {shown(value)})"
        for key, (value, _) in theirs.items()
        if not _is_beside(key) and key in run.values and _plain(run.values[key]) != _plain(value)
    }
    first = [key for key in ("epochs", "encoder.name", "encoder.stem", "batch_size", "views.policy") if key in other]
    return [other[key] for key in (*first, *(key for key in other if key not in first))]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
