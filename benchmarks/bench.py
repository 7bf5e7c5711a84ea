"""Runs `make bench`: the quick forms of loader, kernel, prep, evaluate and train, then one table and the charts.

    python benchmarks/bench.py                        # under ten minutes on two quiet cores
    python benchmarks/bench.py --only loader,kernel --out /tmp/results
    python benchmarks/bench.py --charts-only          # show the stored results without measuring

`NAME-quick.jsonl` has the results of the last `make bench`, and `NAME-quick.png` is their chart. Each run overwrites
them. `NAME.jsonl` and `NAME-PART.jsonl` are full runs, made by hand with `python benchmarks/NAME.py --json`. This
script never writes them, and only `--charts-only` draws them. If a benchmark fails, its file stays unchanged, the
others still run, and the exit status is 1. A missed aim is shown, but is not a failure.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tyro
from bench_table import ROWS, show
from charts import Results, draw_all
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from timing import environment, write_json_lines

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SECONDS = {"loader": 100, "kernel": 80, "prep": 70, "evaluate": 70, "train": 70}  # on two quiet cores
LIMIT_SECONDS = 1800  # per benchmark; one that takes longer is assumed to hang
PACKAGES = ("fastcssl", "torch", "torchvision", "numpy", "ffcv", "nvidia-dali-cuda130", "lightly")


@dataclass(frozen=True, kw_only=True)
class Options:
    only: str = ""  # Benchmarks to run, separated by commas. Empty: all five.
    out: Path | None = None  # Where to write results and charts. Default: benchmarks/results.
    charts_only: bool = False  # Draw charts and print the table of the stored results, without measuring.
    smoke: bool = False  # Run each in its smallest form: shows that everything runs, but measures nothing.
    images: Path | None = None  # Photos for loader and prep. Without it, the embedded set is used.
    cifar: Path | None = None  # CIFAR-100 for the loader's 32-px rows. Without it, the embedded set is used.
    threads: int | None = None  # Threads of evaluate and train. Default: 2. Use 1 if others use the machine.

    @property
    def form(self) -> str:
        return "smoke" if self.smoke else "quick"

    def scripts(self) -> tuple[str, ...]:
        names = tuple(filter(None, self.only.split(","))) or tuple(SECONDS)
        if unknown := [name for name in names if name not in SECONDS]:
            raise SystemExit(f"--only {unknown[0]}: the benchmarks are {', '.join(SECONDS)}.")
        return names

    def words(self, script: str) -> list[str]:
        """Returns the arguments of a script."""
        given: dict[str, object] = {"--images": self.images} if script in ("loader", "prep") else {}
        given |= {"--cifar": self.cifar} if script == "loader" else {}
        given |= {"--threads": self.threads} if script in ("evaluate", "train") else {}
        return [f"--{self.form}", *(word for flag, value in given.items() if value for word in (flag, str(value)))]


# ---- Running ---------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    seconds: float
    failure: str  # the last line of its output; empty if it succeeded


def run(script: str, words: Sequence[str], target: Path, on_tick: Callable[[float], None]) -> Outcome:
    """Runs a script in a new session, so that it can be killed with its children. Writes `target` if it succeeds."""
    with tempfile.TemporaryDirectory(prefix="fastcssl-bench-") as folder:
        numbers, log = Path(folder) / "numbers.jsonl", Path(folder) / "log"
        command = [sys.executable, str(HERE / f"{script}.py"), *words, "--json", str(numbers)]
        began = time.perf_counter()
        with log.open("wb") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            while process.poll() is None and time.perf_counter() - began < LIMIT_SECONDS:
                on_tick(time.perf_counter() - began)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
            status = process.poll()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = time.perf_counter() - began
        if status is None:
            return Outcome(seconds, f"not done within {LIMIT_SECONDS} s")
        if status or not numbers.exists():
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            return Outcome(seconds, lines[-1][:300] if lines else f"exit status {status}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(numbers.read_bytes())
    return Outcome(seconds, "")


class Forecast:
    """Estimates the time left: the known time of each benchmark, scaled by how much longer the finished ones took."""

    def __init__(self, scripts: Sequence[str]) -> None:
        self.scripts, self.took = scripts, dict[str, float]()

    def left(self, seconds_of_current: float) -> float:
        pace = sum(self.took.values()) / sum(SECONDS[name] for name in self.took) if self.took else 1.0
        ahead = [pace * SECONDS[name] for name in self.scripts[len(self.took) :]]
        return max(0.0, ahead[0] - seconds_of_current) + sum(ahead[1:]) if ahead else 0.0


@contextlib.contextmanager
def reporting(console: Console, scripts: Sequence[str]) -> Iterator[Callable[[str, Forecast, float | None], None]]:
    """Yields a function that shows progress. Its seconds are None when the benchmark has ended."""
    if not console.is_terminal:
        said: set[str] = set()

        def say(script: str, forecast: Forecast, seconds: float | None) -> None:
            place = f"{scripts.index(script) + 1}/{len(scripts)}  {script}"
            if seconds is None:
                console.print(f"{place}: {forecast.took[script]:.0f} s", highlight=False)
            elif script not in said:
                said.add(script)
                console.print(f"{place} begins; about {_minutes(forecast.left(0))} left in all", highlight=False)

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=console) as progress:
        at = progress.add_task("", total=1.0, left="")

        def update(script: str, forecast: Forecast, seconds: float | None) -> None:
            place = f"{scripts.index(script) + 1}/{len(scripts)} {script:8}"
            done, left = sum(forecast.took.values()) + (seconds or 0.0), forecast.left(seconds or 0.0)
            progress.update(at, description=place, completed=done, total=done + left, left=f"{_minutes(left)} left")
            if seconds is None:
                progress.console.print(f"{script}: {forecast.took[script]:.0f} s", highlight=False)

        yield update


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


# ---- Reporting -------------------------------------------------------------------------------------------------------


def tell(console: Console, paths: Sequence[Path]) -> list[dict[str, object]]:
    """Prints the table of these results and the failures in them. Returns the table's rows."""
    groups, kept = [], []
    for path in paths:
        script = path.stem.partition("-")[0]
        results = Results.read(path)
        rows = [row for row in ROWS[script](results) if row.value is not None or results.scale != "full"]
        words = "" if results.scale == "full" else f" --{results.scale}"
        if rows:
            groups.append((f"{script}.py{words}", results, rows))
            kept += [row.record(path.name) for row in rows]
    if groups:
        show(console, groups)
    for _, results, _ in groups:
        for record in results.records:
            if record.get("failure"):
                where = next((record[key] for key in ("section", "part", "work_load") if key in record), "")
                _say_failed(console, f"{results.path.name}, {where} {record['name']}", record["failure"])
    met, missed = (sum(row["is_met"] is wanted for row in kept) for wanted in (True, False))
    console.print(f"{met} aims met, {missed} missed.", highlight=False)
    return kept


def stored(out: Path, scripts: Sequence[str]) -> list[Path]:
    """Returns the stored results, with the full results of each benchmark first."""
    found = [
        path for name in scripts for path in sorted(out.glob(f"{name}.jsonl")) + sorted(out.glob(f"{name}-*.jsonl"))
    ]
    return [path for path in found if not path.stem.endswith("-smoke")]


def main() -> int:
    options = tyro.cli(Options, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    scripts = options.scripts()
    console = Console(width=None if sys.stdout.isatty() else 120)
    with contextlib.ExitStack() as stack:
        out = options.out or RESULTS
        if options.smoke and options.out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastcssl-bench-")))
        if options.charts_only:
            paths = stored(out, scripts)
            if not paths:
                raise SystemExit(f"{out} holds no results of {', '.join(scripts)}. Leave out --charts-only.")
            tell(console, paths)
            _draw(console, paths)
            return 0
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the running benchmark is ended first
        try:
            return measure(console, options, scripts, out)
        except KeyboardInterrupt:
            raise SystemExit("Interrupted. The results of finished benchmarks are kept.") from None


def measure(console: Console, options: Options, scripts: Sequence[str], out: Path) -> int:
    forecast, failures, load_before = Forecast(scripts), {}, os.getloadavg()[0]
    paths = {name: out / f"{name}-{options.form}.jsonl" for name in scripts}
    with reporting(console, scripts) as report:
        for name in scripts:
            outcome = run(name, options.words(name), paths[name], lambda s, name=name: report(name, forecast, s))
            forecast.took[name] = outcome.seconds
            report(name, forecast, None)
            if outcome.failure:
                failures[name] = outcome.failure
                _say_failed(console, name, outcome.failure)
    whole = [paths[name] for name in scripts if name not in failures]
    rows = tell(console, whole)
    if options.smoke:
        console.print("[yellow]Note:[/] a smoke run measures nothing, so its numbers have no meaning.")
    elif load_before > 0.5:
        console.print(f"[yellow]Note:[/] the machine was busy (load {load_before:.1f} before): do not rely on this.")
    _draw(console, whole)
    took = {name: round(seconds, 1) for name, seconds in forecast.took.items()}
    about = environment(PACKAGES, scale=options.form, seed=0, seconds=took, load_average_before=round(load_before, 2))
    summary = {
        "num_met": sum(row["is_met"] is True for row in rows),
        "num_missed": sum(row["is_met"] is False for row in rows),
        "failures": failures,
        "seconds": round(sum(took.values()), 1),
    }
    write_json_lines(out / f"bench-{options.form}.jsonl", [*rows, {"environment": about}, {"summary": summary}])
    console.print(f"Done in {_minutes(summary['seconds'])}; results are in {_short(out)}.", highlight=False)
    for name, failure in failures.items():
        _say_failed(console, name, failure)
    return 1 if failures else 0


def _draw(console: Console, paths: Sequence[Path]) -> None:
    drawn = draw_all(paths)
    console.print("Charts: " + (", ".join(map(_short, drawn)) or "none") + ".", highlight=False)


def _say_failed(console: Console, what: str, why: str) -> None:
    console.print(f"[red]✗ {escape(what)} failed:[/] {escape(why)}", highlight=False)


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main())
