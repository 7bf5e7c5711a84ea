"""Writes the report as one HTML file that contains its figures, and uses neither scripts nor other files."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from shlex import quote

from fastcssl.config.recipes.rows import COMMAND_LINE
from fastcssl.report.board import board, scope_title
from fastcssl.report.comparison import Comparison, coinciding, evaluation_title, lacking, shown
from fastcssl.report.drawing import DrawnPicture
from fastcssl.report.markup import Html, el, joined, table
from fastcssl.report.matrix import matrix_table
from fastcssl.report.runs import RunRecord
from fastcssl.runs.bottleneck import NAMES, Verdict
from fastcssl.runs.display import PROBE_NAMES, duration, number, share
from fastcssl.runs.metrics import AVERAGE, METRICS, compared_metrics
from fastcssl.runs.overview import Overview
from fastcssl.runs.results import Evaluation

CSV, LATEX = "overview.csv", "overview.tex"  # beside the page
_STAGE_LINES = ("model", "decode", "augmentation", "disk", "probe", "data", "checkpoint")
_NONE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The content of a page."""

    runs: Sequence[RunRecord]
    overviews: Sequence[Overview]
    comparisons: Sequence[Comparison]
    pictures: Mapping[tuple[str, str], Sequence[DrawnPicture]]  # of ("comparison", ""), or (run, "training" or result)
    ranges: Mapping[tuple[str, str], tuple[float, float]]  # of the colours of (run, result), in percent

    def figures(self, *key: str) -> Html:
        """Returns the figures of one place that the page shows."""
        first, second = key
        drawn = [_figure(picture) for picture in self.pictures.get((first, second), ()) if picture.svg]
        return el("div", *drawn, class_="figures") if drawn else joined()


def page(content: Content) -> str:
    """Returns the page."""
    runs = content.runs
    heading = runs[0].title if len(runs) == 1 else f"{len(runs)} runs"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{heading} · fastcssl report"),
        el("style", Html(files("fastcssl.report").joinpath("page.css").read_text(encoding="utf-8"))),
    )
    body = el(
        "body",
        el("header", *_header(runs, heading)),
        el(
            "main",
            _overview(content),
            _published(content.comparisons),
            _averages(content),
            el("section", el("h2", "Runs"), *(_run(place, run, content) for place, run in enumerate(runs))),
        ),
        el("footer", _definitions()),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _header(runs: Sequence[RunRecord], heading: str) -> list[Html]:
    made = time.strftime("%Y-%m-%d %H:%M")
    return [
        el("p", f"fastcssl {version('fastcssl')} · report of {made}", class_="eyebrow"),
        el("h1", heading),
        el("p", ", ".join(dict.fromkeys(run.recipe for run in runs)), class_="quiet"),
    ]


# ---- Results ---------------------------------------------------------------------------------------------------------


def _overview(content: Content) -> Html:
    parts: list[Html] = [el("h2", "Overview")]
    about = dict.fromkeys((table.recipe, table.about) for table in content.comparisons if table.about)
    parts += [el("p", f"{recipe}: {text}", class_="quiet") for recipe, text in about]
    missing = [run for run in content.runs if not run.evaluations]
    if missing:
        parts.append(_not_evaluated(missing, len(content.runs)))
    parts += [board(table, content.runs) for table in content.overviews]
    if content.overviews:
        parts.append(el("p", *_about_overview(content.overviews), class_="quiet"))
    parts += [el("p", text, class_="quiet") for text in lacking(content.comparisons)]
    return el("section", *parts)


def _about_overview(tables: Sequence[Overview]) -> list[str | Html]:
    """Returns what the marks mean, and links to the files with the same values."""
    said: list[str | Html] = []
    if any(table.is_best(row, place) for table in tables for row in table.rows for place in range(len(row.cells))):
        others = " Joint training is not counted." if any(row.is_joint for t in tables for row in t.rows) else ""
        said.append(f"Highlighted: the best run of each column.{others} ")
    said += ["The same values as files: ", el("a", CSV, href=CSV), ", ", el("a", LATEX, href=LATEX), "."]
    return said


def _published(comparisons: Sequence[Comparison]) -> Html:
    telling = [comparison for comparison in comparisons if comparison.is_telling]
    if not telling:
        return joined()
    is_published = any(row.published for comparison in telling for row in comparison.rows)
    parts = [el("h2", "Comparison with published values" if is_published else "Means over seeds")]
    for comparison in telling:
        parts += [el("h3", f"{comparison.recipe}: {comparison.evaluation}"), _comparison(comparison)]
    return el("section", *parts)


def _averages(content: Content) -> Html:
    figures = content.figures("comparison", "")
    return el("section", el("h2", "Average accuracy after each task"), figures) if figures else joined()


def _not_evaluated(missing: Sequence[RunRecord], num_runs: int) -> Html:
    which = "This run has" if num_runs == 1 else f"{len(missing)} of {num_runs} runs have"
    command = f"fastcssl-eval {' '.join(quote(run.name) for run in missing)}"
    return el(
        "div",
        el("p", f"{which} not been evaluated. Only the training log is shown. To compute accuracies, run:"),
        el("pre", el("code", command), class_="scroll"),
        class_="callout warning",
    )


def _comparison(comparison: Comparison) -> Html:
    metrics = compared_metrics()
    names = [metric.name for metric in metrics]
    shown_too = [
        name
        for name in names
        if any(row.published and row.published.value(name) is not None for row in comparison.rows)
    ]
    head: list[str | Html] = ["", "seeds", *(metric.heading for metric in metrics)]
    head += [f"published {name}" for name in shown_too]
    rows: list[list[str | Html]] = []
    for row in comparison.rows:
        cells: list[str | Html] = [row.title, str(row.num_seeds)]
        cells += [str(row.metrics[name]) if name in row.metrics else _NONE for name in names]
        marks = comparison.marks(row)
        for name in shown_too:
            text = row.published.text(name) if row.published else None
            raised = el("sup", marks) if text and marks and name == AVERAGE.name else None
            cells.append(el("td", text or _NONE, raised, class_="published"))
        rows.append(cells)
    parts = [table(head, rows)]
    if comparison.notes:
        items = (el("li", note) for note in comparison.notes)
        parts.append(el("p", "Differences between the published measurements and these:", class_="quiet"))
        parts.append(el("ol", *items, class_="notes"))
    sources = dict.fromkeys(
        f"{row.published.where}: {row.published.protocol.about}" for row in comparison.rows if row.published
    )
    if sources:
        parts.append(el("p", f"Published values: PNR paper, {'; '.join(sources)}.", class_="quiet"))
    return joined(*parts)


# ---- One run ---------------------------------------------------------------------------------------------------------


def _run(place: int, run: RunRecord, content: Content) -> Html:
    """Returns a run's section, folded if there are several. A link to its content unfolds it."""
    parts: list[Html] = [el("p", _state(run)), el("p", run.name, class_="path")]
    bound = run.bound
    if bound is not None:
        parts.append(_bound(bound))
    for found, *same in coinciding(run.evaluations):
        title = evaluation_title(found, _same_probe(run, found), of_row=True)
        low, high = content.ranges[run.name, found.name]
        parts += [
            el("h3", "; ".join((title, *(f"the same: {scope_title(other.scope)}" for other in same)))),
            _evaluated(found),
            matrix_table(found, low, high),
            content.figures(run.name, found.name),
        ]
    parts += [el("h3", "Training"), _tasks(run), content.figures(run.name, "training")]
    parts.append(el("details", el("summary", f"Configuration, {len(run.values)} values"), _configuration(run)))
    facts = el("span", f"seed {run.seed} · {run.recipe}", class_="quiet")
    return el(
        "details",
        el("summary", el("span", run.title, class_="title"), " ", facts),
        el("div", *parts, id=f"run{place}"),
        class_="run",
        open="" if len(content.runs) == 1 else None,
    )


def _same_probe(run: RunRecord, found: Evaluation) -> list[Evaluation]:
    return [other for other in run.evaluations if (other.probe, other.scope) == (found.probe, found.scope)]


def _state(run: RunRecord) -> str:
    done, count = len(run.tasks), len(run.task_names)
    seconds = sum(task.seconds for task in run.tasks)
    where = f"{run.recipe}, {run.machine.device.upper()}, loader {run.machine.loader}"
    if run.is_finished:
        return f"{where}. Finished: {count} {'task' if count == 1 else 'tasks'} in {duration(seconds)}."
    state = {"failed": "failed", "stopped": "stopped", "running": "still running"}.get(
        run.status.state, run.status.state
    )
    return f"{where}. Not finished: {done} of {count} tasks in {duration(seconds)}; {state}."


def _evaluated(found: Evaluation) -> Html:
    values = [f"{name} {100 * value:z.2f}" for name in METRICS if (value := found.metrics.last(name)) is not None]
    facts = " · ".join((*values, f"{sum(found.num_val):,} validation images", f"{duration(found.seconds)} to evaluate"))
    if len(found.columns) == 1:
        return el("p", facts, class_="quiet")
    names = ", ".join(f"{place}: {name}" for place, name in enumerate(found.columns))
    return el("p", facts, el("br"), f"Tasks {names}", class_="quiet")


def _bound(found: Verdict) -> Html:
    """Returns the sentence about the bottleneck, and the shares of the time as a bar."""
    shares = [(stage, value) for stage, value in found.shares.items() if value >= 0.005]
    color = {
        stage: f"var(--line{_STAGE_LINES.index(stage) % 7 if stage in _STAGE_LINES else 6})" for stage, _ in shares
    }
    bar = (el("span", style=f"width:{100 * value:.1f}%;background:{color[stage]}") for stage, value in shares)
    legend = (
        el("li", el("i", style=f"background:{color[stage]}"), f"{NAMES[stage]} {share(value)}")
        for stage, value in shares
    )
    return el(
        "div",
        el("p", found.sentence.replace(" %", "\N{NO-BREAK SPACE}%")),
        el("div", *bar, class_="bar", aria_hidden="true"),
        el("ul", *legend, class_="legend"),
        class_="callout",
    )


def _tasks(run: RunRecord) -> Html:
    probes = list(dict.fromkeys(name for task in run.tasks for name in task.accuracy))
    head: list[str | Html] = ["task", "name", "images", "epochs", "loss"]
    head += [f"online {PROBE_NAMES.get(name, name)} %" for name in probes]
    head += ["images/s", "waited", "time"]
    rows: list[list[str | Html]] = []
    for task in run.tasks:
        cells: list[str | Html] = [str(task.task), task.name, f"{task.num_images:,}", str(task.num_epochs)]
        cells.append(number(task.loss))
        cells += [f"{100 * task.accuracy[name]:.1f}" if name in task.accuracy else _NONE for name in probes]
        cells += [f"{task.images_per_s:,.0f}", share(task.data_wait_share), duration(task.seconds)]
        rows.append(cells)
    classes: list[str | None] = [None, "left", *[None] * (len(head) - 2)]
    return table(head, rows, classes=classes)


def _configuration(run: RunRecord) -> Html:
    """Returns a table of every setting with its source. Settings from the command line are highlighted."""
    rows = []
    for key, value in run.values.items():
        source = run.sources.get(key, "")
        rows.append(
            el(
                "tr",
                el("td", el("code", key)),
                el("td", shown(value), class_="left wrap"),
                el("td", source, class_="left quiet"),
                class_="said" if source == COMMAND_LINE else None,
            )
        )
    head = el("tr", *(el("th", name, scope="col", class_="left") for name in ("setting", "value", "source")))
    return el("div", el("table", el("thead", head), el("tbody", *rows)), class_="scroll configuration")


def _figure(picture: DrawnPicture) -> Html:
    return el("figure", el("h4", picture.title), Html(picture.svg), el("figcaption", picture.caption))


def _definitions() -> Html:
    terms = {name: f"{metric.description}. {metric.better.capitalize()} is better." for name, metric in METRICS.items()}
    rows = [part for name, text in terms.items() for part in (el("dt", name), el("dd", text))]
    text = (
        "Values are top-1 accuracies in percent. Tasks are counted from 0, as in file names. In a table of tasks, "
        "those left of the line were already learnt; A is their mean. A random encoder was not trained; chance is "
        "guessing one of the classes. ± is one standard deviation over seeds."
    )
    return joined(
        el("h2", "Definitions"),
        el("dl", *rows),
        el("p", text),
    )
