"""Writes the report as one HTML file that contains its figures, and uses neither scripts nor other files."""

import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from shlex import quote

from fastcssl.config.recipes.rows import COMMAND_LINE
from fastcssl.report.comparison import Comparison, evaluation_title, lacking, shown
from fastcssl.report.figures import DrawnPicture
from fastcssl.report.markup import Html, el, joined, table
from fastcssl.report.runs import RunRecord
from fastcssl.runs.bottleneck import NAMES, Verdict
from fastcssl.runs.display import PROBE_NAMES, duration, number, share
from fastcssl.runs.metrics import AVERAGE, METRICS, compared_metrics
from fastcssl.runs.results import Evaluation

_FEW_RUNS = 4  # more runs than this are shown collapsed
_STAGE_LINES = ("model", "decode", "augmentation", "disk", "probe", "data", "checkpoint")
_NONE = "-"

# Keys are ("comparison", number) or (run, "training" or result).
Pictures = Mapping[tuple[str, str], Sequence[DrawnPicture]]


def page(runs: Sequence[RunRecord], comparisons: Sequence[Comparison], pictures: Pictures) -> str:
    """Returns the page."""
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
            _results(runs, comparisons, pictures),
            *(_run(place, run, pictures, is_open=len(runs) <= _FEW_RUNS) for place, run in enumerate(runs)),
        ),
        el("footer", _definitions()),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _header(runs: Sequence[RunRecord], heading: str) -> list[Html]:
    made = time.strftime("%Y-%m-%d %H:%M")
    recipes = list(dict.fromkeys(run.recipe for run in runs))
    parts = [el("p", f"fastcssl {version('fastcssl')} · report of {made}", class_="eyebrow"), el("h1", heading)]
    parts.append(el("p", ", ".join(recipes), class_="quiet"))
    if len(runs) > 1:
        links = (
            el("li", el("a", run.title, href=f"#run{place}"), f" · seed {run.seed} · {run.recipe}")
            for place, run in enumerate(runs)
        )
        parts.append(el("nav", el("ul", *links), aria_label="Runs"))
    return parts


# ---- Results ---------------------------------------------------------------------------------------------------------


def _results(runs: Sequence[RunRecord], comparisons: Sequence[Comparison], pictures: Pictures) -> Html:
    parts: list[Html] = [el("h2", "Results")]
    told: set[str] = set()
    missing = [run for run in runs if not run.evaluations]
    if missing:
        parts.append(_not_evaluated(missing, len(runs)))
    for place, comparison in enumerate(comparisons):
        parts += [
            el("h3", f"{comparison.recipe}: {comparison.evaluation}"),
            el("p", comparison.about, class_="quiet") if comparison.recipe not in told else joined(),
            _comparison(comparison),
            _figures(pictures.get(("comparison", str(place)), ())),
        ]
        told.add(comparison.recipe)
    parts += [el("p", text, class_="quiet") for text in lacking(comparisons)]
    return el("section", *parts)


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


def _run(place: int, run: RunRecord, pictures: Pictures, *, is_open: bool) -> Html:
    parts: list[Html] = []
    bound = run.bound
    if bound is not None:
        parts.append(_bound(bound))
    for found in run.evaluations:
        parts += [
            el("h3", evaluation_title(found, _same_probe(run, found), of_row=True)),
            _evaluated(found),
            _figures(pictures.get((run.name, found.name), ())),
        ]
    parts += [el("h3", "Training"), _tasks(run), _figures(pictures.get((run.name, "training"), ()))]
    parts.append(el("details", el("summary", f"Configuration, {len(run.values)} values"), _configuration(run)))
    heading = el("h2", f"{run.title} · seed {run.seed}", id=f"run{place}")
    facts = joined(el("p", _state(run)), el("p", run.name, class_="path"))
    if not is_open:
        parts = [el("details", el("summary", "Accuracies, training and configuration"), *parts)]
    return el("section", heading, facts, *parts, class_="run")


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


def _figures(pictures: Sequence[DrawnPicture]) -> Html:
    if not pictures:
        return joined()
    return el("div", *(_figure(picture) for picture in pictures), class_="figures")


def _figure(picture: DrawnPicture) -> Html:
    wide = float(picture.svg.partition('viewBox="')[2].split()[2]) > 400
    return el(
        "figure",
        el("h4", picture.title),
        el("div", Html(picture.svg), class_="scroll" if wide else None),
        el("figcaption", picture.caption),
        class_="wide" if wide else None,
    )


def _definitions() -> Html:
    terms = {name: f"{metric.description}. {metric.better.capitalize()} is better." for name, metric in METRICS.items()}
    rows = [part for name, text in terms.items() for part in (el("dt", name), el("dd", text))]
    text = "Values are top-1 accuracies in percent. Tasks are counted from 0, as in file names. ± is one standard "
    return joined(
        el("h2", "Definitions"),
        el("dl", *rows),
        el("p", f"{text}deviation over seeds."),
    )
