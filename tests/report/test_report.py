"""fastcssl-report: the page and its pictures, the table in the terminal, and what it refuses."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import prep_ok
from made_runs import evaluated, made_run
from PIL import Image
from rich.console import Console
from small_runs import run as train_run
from small_runs import tiny

from fastcssl.cli.report import main
from fastcssl.errors import UserError
from fastcssl.report import Report, report_runs
from fastcssl.report.drawing import LINES, NAMES
from fastcssl.report.runs import found_runs, read_run
from fastcssl.report.summary import summary


class _Page(HTMLParser):
    """Every element closed by its own name; every id once; every reference to one inside the page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.refers: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "br", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for key, value in attrs:
            assert key not in ("src", "srcset", "data", "action"), f"{tag} asks for {value}"
            assert not key.startswith("on"), f"{tag} has a handler"
            if key == "id":
                self.ids.append(value or "")
            if key in ("href", "xlink:href"):
                if value not in ("overview.csv", "overview.tex"):  # files beside it, which it does not need
                    assert value and value.startswith("#"), f"{tag} leads to {value}"
                    self.refers.append(value[1:])
            self.refers += re.findall(r"url\(#([^)]+)\)", value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing of its name"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(path: Path) -> _Page:
    """Well-formed, and in need of nothing else."""
    text = path.read_text(encoding="utf-8")
    page = _Page(text)
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)
    assert set(page.refers) <= set(page.ids)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "@import" not in text
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\((?!#)", text)
    return page


def seen(page: _Page) -> str:
    return " ".join(" ".join(page.text).split())


def terminal(found: Report) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))
    with console.file:
        console.print(summary(found))
        return console.export_text()


# ---- The page --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Seeds, strategies, joint, unfinished, not evaluated, several probes, other numbers of tasks, awkward names."""
    root = tmp_path_factory.mktemp("many")
    for seed, more in ((5, 0.0), (6, 0.02)):
        for strategy, level in (("finetune", 0.45), ("pnr", 0.6)):
            run = made_run(root / strategy / f"seed{seed}", "cifar100-class5", "moco", strategy, seed=seed, epochs=500)
            evaluated(run, level=level + more)
    evaluated(root / "pnr" / "seed5", probe="knn", settings={"k": 20, "metric": "cosine"})
    joint = made_run(root / "joint", "cifar100-class5", "moco", "joint")
    evaluated(joint, level=0.7, ft=False)
    odd = made_run(
        root / "<b>odd</b> & \"so\" 'on'".replace("/", "|"), "imagenet100-class10", "byol", "pnr", tasks_done=4,
        idle_share=0.3,
    )  # fmt: skip
    evaluated(odd, rows=4, ft=False, columns=[f"<i>{t}</i>" for t in range(10)])
    bare = made_run(root / "not evaluated", "domainnet-domain6", "barlow", "cassle")
    return report_runs([root / "finetune", root / "pnr", joint, odd, bare], root / "report")


def test_the_page_is_whole_and_needs_nothing_else(many: Report) -> None:
    page = checked(many.page)
    text = seen(page)
    assert "7 runs" in text
    assert len(many.pictures) == len(list(many.page.parent.glob("figures/*.png")))
    # Averages and the first task.
    # A matrix, curves, training and speed of each; the joint run has no curves, the last only its training.
    assert len(many.pictures) == 2 + 4 * 4 + 2 + 3 + 4 + 2
    num_matrices = sum(path.stem.endswith("matrix") for path in many.pictures)
    assert num_matrices == many.page.read_text().count('class="matrix"') == 7
    assert page.tags.count("svg") == len(many.pictures) - num_matrices
    for path in many.pictures:
        with Image.open(path) as picture:
            picture.verify()
            assert picture.width >= 1000


def test_the_overview_comes_first_and_marks_the_best(many: Report) -> None:
    text = many.page.read_text()
    assert text.index("<h2>Overview") < text.index("<h2>Comparison with published values") < text.index("<h2>Runs")
    first = text[text.index('class="board"') : text.index("</table>")]
    rows = {title: row for row in first.split("<tr")[3:] for title in re.findall(r'href="#run\d+">([^<]+)', row)}
    assert list(rows) == ["MoCo + fine-tune", "MoCo + PNR", "MoCo + joint"]
    assert ["average best" in row for row in rows.values()] == [False, True, False]  # joint is a bound, not a rival
    assert "Joint training is not counted" in text and text.count('<details class="run">') == 7
    assert [path.name for path in many.tables] == ["overview.csv", "overview.tex"]
    assert len(many.tables[0].read_text().splitlines()) == 1 + 7
    assert r"\toprule" in many.tables[1].read_text()


def test_scopes_that_coincide_are_shown_once(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    for scope in ("domain-aware", "per-task"):
        evaluated(run, scope=scope)
    found = report_runs([run])
    assert found.page.read_text().count('class="matrix"') == 1
    assert "the same: classes of each task" in seen(checked(found.page))


def test_names_are_text_and_not_markup(many: Report) -> None:
    text = many.page.read_text()
    assert "<b>odd" not in text and "<i>0" not in text
    page = checked(many.page)
    assert "<b>odd<|b> & \"so\" 'on'" in seen(page)
    assert "<i>0</i>" in seen(page)


def test_what_is_missing_is_said_with_the_command_that_makes_it(many: Report) -> None:
    text = seen(checked(many.page))
    assert "1 of 7 runs have not been evaluated" in text
    assert f"fastcssl-eval '{many.runs[-1].folder}'" in text
    assert "Not finished: 4 of 10 tasks" in text
    assert "Finished: 6 tasks" in text


def test_colours_are_names_of_the_style_sheet_in_both_lights(many: Report) -> None:
    text = many.page.read_text()
    style, svgs = text[: text.index("</style>")], text[text.index("</style>") :]
    dark = style[style.index("prefers-color-scheme: dark") :]
    for color, name in NAMES.items():
        assert f"{name}: {color};" in style and f"{name}: #" in dark
        assert color not in svgs
    assert "var(--line0)" in svgs and "var(--ink)" in svgs
    assert len(set(LINES)) == 7


def test_every_value_stands_with_its_source_and_the_bottleneck_in_a_sentence(many: Report) -> None:
    text = seen(checked(many.page)).replace("\N{NO-BREAK SPACE}", " ")
    for run in many.runs:
        assert run.bound is not None and run.bound.sentence in text
    assert "optim.lr 0.6 paper table 14" in text
    assert "epochs 500 paper table 14" in text
    assert text.count("Configuration, ") == 7


def test_the_table_in_the_terminal_is_that_of_the_page(many: Report) -> None:
    text = terminal(many)
    page = seen(checked(many.page))
    row = next(row for row in many.comparisons[0].rows if row.num_seeds == 2)
    for words in (row.title, str(row.metrics["A"]), "62.36 ± 0.29", "published A", many.comparisons[0].notes[0][:60]):
        assert words in text and words in page
    assert "4 of 10 tasks finished" in text
    assert "not evaluated; run fastcssl-eval '" in text
    assert str(many.page) in text


def test_one_run_goes_beside_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert (run / "report" / "index.html").exists()
    assert "not evaluated" in capsys.readouterr().out
    assert main([str(run), "--out", str(tmp_path / "there")]) == 0
    checked(tmp_path / "there" / "index.html")


def test_a_real_run_from_training_to_the_page(tmp_path: Path) -> None:
    data = tmp_path / "data"
    prep_ok("build", "synthetic:classes=20,train=4,val=2", "--scenario", "class", "--tasks", 2, "--out", data)
    train_run(tiny(online_probe="every=0"), data, tmp_path / "run")
    found = report_runs([tmp_path / "run"])
    text = seen(checked(found.page))
    assert "MoCo + PNR seed 5" in text and "Bottleneck: " in text and "online linear %" in text
    assert found.runs[0].machine.loader == "resident"


# ---- What is refused -------------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _damage_middle(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:3], b"\0\0\0", *lines[3:]]) + b"\n")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda run: shutil.rmtree(run), ("is not a run: there is no such folder",)),
        (lambda run: (run / "config.json").unlink(), ("is not a run: it holds no config.json",)),
        (lambda run: _cut(run / "config.json"), ("config.json cannot be read", "Resuming the run")),
        (lambda run: (run / "status.json").unlink(), ("is not a run",)),
        (lambda run: (run / "metrics.jsonl").unlink(), ("metrics.jsonl does not exist",)),
        (_damage_middle, ("Line 4 of", "is damaged")),
        (
            lambda run: _cut(next((run / "evaluations").iterdir())),
            ("is not valid JSON: it is half-written", "fastcssl-eval"),
        ),
    ],
    ids=["no folder", "no run", "torn config", "no status", "no metrics", "damaged metrics", "half-written result"],
)
def test_bad_input_gets_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], object],
    says: tuple[str, ...],
) -> None:
    run = made_run(tmp_path / "run")
    evaluated(run)
    spoil(run)
    assert main([str(run), "--out", str(tmp_path / "report")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and all(words in error for words in says), error
    assert not (tmp_path / "report").exists()


def test_a_run_without_a_finished_task_gets_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path / "run", tasks_done=0)
    assert main([str(run)]) == 2
    assert "has no finished task yet" in capsys.readouterr().err
    assert main(["--out", "x"]) == 2
    assert "Give a run" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_gets_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(made_run(tmp_path / "run")), "--out", str(tmp_path / "file")]) == 2
    assert "Cannot write the report to" in capsys.readouterr().err


def test_a_torn_last_line_is_no_damage(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("ab") as lines:
        lines.write(b'{"kind": "step", "st')
    assert read_run(run).is_finished


def test_runs_are_found_once_and_seeds_stand_for_their_folder(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / "all" / f"seed{seed}", seed=seed) for seed in (5, 6)]
    assert found_runs([tmp_path / "all", runs[1]]) == runs


def test_a_config_without_a_part_is_refused_by_its_name(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    described = json.loads((run / "config.json").read_text())
    del described["words"]
    (run / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"config.json cannot be read \(words is missing\)\. Resuming"):
        read_run(run)


def test_a_run_whose_stages_nobody_timed_has_no_bottleneck(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(re.sub(r', "stages": \{.*\}\}\}', "}", text))
    assert read_run(run).bound is None
    checked(report_runs([run]).page)


# ---- In a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1280, 360])
def test_a_browser_finds_no_error_and_no_sideways_scroll(many: Report, tmp_path: Path, width: int) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        if os.environ.get("FASTCSSL_REQUIRE_BACKENDS") == "1":
            pytest.fail("chromium is required here but not installed")
        pytest.skip("chromium is not installed")
    # The page in a frame of that width; a script outside it measures, opens what is folded, and listens for errors.
    probe = tmp_path / "probe.html"
    probe.write_text(f"""<!doctype html>
<iframe src="{many.page.as_uri()}" style="width:{width}px;height:800px;border:0"></iframe>
<pre id="found"></pre><script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {{
  const page = frame.contentDocument;
  page.querySelectorAll("details").forEach((fold) => {{ fold.open = true; }});
  const root = page.documentElement;
  const asked = frame.contentWindow.performance.getEntriesByType("resource").length;
  const low = [...page.querySelectorAll("svg")].filter((svg) => svg.getBoundingClientRect().height < 40).length;
  document.getElementById("found").textContent = JSON.stringify(
    {{scroll: root.scrollWidth, width: root.clientWidth, asked, low, svgs: page.querySelectorAll("svg").length}});
}});
</script>""")
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--allow-file-access-from-files", "--enable-logging=stderr", "--v=0", "--virtual-time-budget=4000",
         f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", probe.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(re.search(r'<pre id="found">(\{.*?\})</pre>', done.stdout)[1])  # type: ignore[index]
    assert found["scroll"] <= found["width"] <= width
    assert found["asked"] == 0 and found["low"] == 0
    assert found["svgs"] == sum(not path.stem.endswith("matrix") for path in many.pictures)
    assert "CONSOLE" not in done.stderr, done.stderr


def test_the_command_starts_without_torch(tmp_path: Path) -> None:
    """A report of many runs need not wait for it."""
    run = made_run(tmp_path / "run", "cifar100-class5")
    evaluated(run)
    program = f"""
import sys
from fastcssl.cli.report import main
assert main([{str(run)!r}]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
