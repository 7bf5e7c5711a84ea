"""Measures the contrastive loss against two banks of keys, forward and gradient: our operator and its alternatives.

    python benchmarks/kernel.py --quick                    # about a minute, smaller banks
    python benchmarks/kernel.py --json kernel.jsonl

The peers are eager torch as in MoCo's code, eager torch by log-sum-exp, torch.compile of the first (compilation is not
timed), our sweep in plain torch with its best chunk, and torch's flash attention with the keys as values. The ceiling
is the two matrix products alone, whole or in chunks, whichever is faster. There is one process per number of threads,
in which all contenders take turns. A ratio is the median of the ratios of single rounds. kernel_process.py explains
what counts as memory, kernel_step.py the training step, and kernel_model.py the cost model for GPUs. Nothing here has
been measured on a GPU.
"""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import kernel_process
import kernel_step
import tyro
from kernel_model import predictions
from kernel_process import ErrorCase, Shape
from kernel_step import StepShape, Way
from kernel_tables import show, summarize
from kernel_tiles import tiles
from rich.console import Console
from timing import Case, Child, Failed, environment, interleave, write_json_lines

Part = Literal["headline", "grid", "growth", "errors", "step", "model"]
PARTS: tuple[Part, ...] = ("headline", "grid", "growth", "errors", "step", "model")
PACKAGES = ("fastcssl", "torch", "numpy")
HEADLINE = ("moco", "logsumexp", "compile", "chunked", "flash", "gemms", "ours")
GRID = ("moco", "chunked", "flash", "gemms", "ours")
GROWTH = ("moco", "chunked", "ours")


@dataclass(frozen=True, kw_only=True)
class Options:
    json: Path | None = None  # Where to write the numbers, one JSON object per line. The last one is the summary.
    quick: bool = False  # Takes about a minute: smaller banks, fewer shapes and rounds.
    smoke: bool = False  # Takes seconds: shows that it runs, but measures nothing.
    parts: tuple[Part, ...] = PARTS  # The parts to measure.
    rounds: int | None = None  # How many times everything is measured.
    bank_size: int | None = None  # Keys per bank, where the size does not vary.
    compile: bool = True  # Whether to measure torch.compile, which compiles for 10 to 30 s per shape.
    seed: int = 0


class Scale(NamedTuple):
    rounds: int
    more_rounds: int  # for the grid, the growth and the step
    bank_size: int
    headline_rows: tuple[int, ...]
    compiled: tuple[tuple[int, int], ...]  # (rows, threads) for which torch.compile is measured
    grid_rows: tuple[int, ...]
    grid_dims: tuple[int, ...]
    growth_sizes: tuple[int, ...]
    step: StepShape


_FULL_STEP = StepShape(256, 65_536, "resnet18-w16", 32, 2)
SCALES = {
    "smoke": Scale(1, 1, 512, (256, 512), (), (8,), (64,), (256, 512), StepShape(8, 64, "resnet18-w8", 16, 1)),
    "quick": Scale(
        3,
        2,
        16_384,
        (256, 512),
        (),
        (32, 256),
        (64, 256),
        (4096, 16_384, 65_536),
        StepShape(64, 16_384, "resnet18-w8", 32, 2),
    ),
    "full": Scale(
        9,
        3,
        65_536,
        (256, 512),
        ((256, 1), (512, 1), (256, 2), (512, 2)),
        (32, 64, 128, 256, 512, 1024),
        (64, 128, 256),
        (4096, 16_384, 65_536, 262_144),
        _FULL_STEP,
    ),
}


# ---- Shapes ----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Group:
    """The contenders on one problem."""

    part: Part
    shape: Shape
    cases: dict[str, Case]
    about: dict[str, str] = field(default_factory=dict)  # the variant of each contender that is measured
    memory_mb: dict[str, float] = field(default_factory=dict)
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)

    def records(self) -> Iterator[dict[str, Any]]:
        for name, case in self.cases.items():
            best, median = (min(case.seconds), sorted(case.seconds)[len(case.seconds) // 2]) if case.seconds else (0, 0)
            yield {
                "part": self.part,
                "name": name,
                "variant": self.about.get(name) or None,
                **self.shape._asdict(),
                "seconds_best": best or None,
                "seconds_median": median or None,
                "gflop_per_s_median": self.shape.flop / median / 1e9 if median else None,
                "extra_mb": self.memory_mb.get(name),
                "errors": self.errors.get(name),
                "round_seconds": case.seconds,
                "failure": case.failure or None,
            }


@dataclass(kw_only=True)
class Bench:
    options: Options
    scale: Scale
    folder: Path
    on_step: Callable[[str], None]
    threads: tuple[int, ...]
    groups: list[Group] = field(default_factory=list)
    accuracy: list[dict[str, Any]] = field(default_factory=list)
    step: dict[str, Any] = field(default_factory=dict)
    step_cases: dict[str, Case] = field(default_factory=dict)
    model: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    children: dict[int, Child] = field(default_factory=dict)
    part_seconds: dict[str, float] = field(default_factory=dict)
    sgemm: dict[int, float] = field(default_factory=dict)  # GFLOP/s of one large product, by threads

    def start(self) -> None:
        for number in self.threads:
            self.children[number] = Child(self.folder / f"{number}.log")
        for child in self.children.values():
            child.call(kernel_process.settle_in, limit_seconds=240)

    def close(self) -> None:
        for child in self.children.values():
            child.close(patience_seconds=3)

    def run(self, part: Part) -> None:
        {
            "headline": self.headline,
            "grid": self.grid,
            "growth": self.growth,
            "errors": self.budget,
            "step": self.training_step,
            "model": self.cost_model,
        }[part]()

    def headline(self) -> None:
        for number in self.threads:
            for rows in self.scale.headline_rows:
                absent = {"compile"} if not self.options.compile or (rows, number) not in self.scale.compiled else set()
                if self.options.quick:
                    absent.add("logsumexp")
                names = tuple(name for name in HEADLINE if name not in absent)
                group = self.timed("headline", Shape(rows, 128, self.scale.bank_size, number), names, self.scale.rounds)
                if number == 1 and not (self.options.quick and rows > 256):
                    self.weigh(group, names)
                    self.compare(group)
            size = 256 if self.options.smoke else 1536
            found = self.children[number].call(kernel_process.sgemm_gflop_per_s, size, number, limit_seconds=240)
            self.sgemm[number] = found
        if 2 in self.sgemm and self.sgemm[2] < 1.5 * self.sgemm[1]:
            self.notes.append("Other work used the cores of the two threads, so the 2-thread numbers are not reliable.")
        if self.options.quick:
            self.notes.append(
                "torch.compile, which compiles for 10 to 30 s per shape, and log-sum-exp are only in the full run."
            )

    def grid(self) -> None:
        for dim in self.scale.grid_dims:
            for rows in self.scale.grid_rows:
                self.timed("grid", Shape(rows, dim, self.scale.bank_size, 1), GRID, self.scale.more_rounds)

    def growth(self) -> None:
        for size in self.scale.growth_sizes:
            shape = Shape(256 if size > 512 else 16, 128, size, 1)
            absent = set() if self._fits(shape) else {"moco"}
            names = tuple(
                name for name in GROWTH if name not in absent | ({"chunked"} if self.options.quick else set())
            )
            self.weigh(self.timed("growth", shape, names, self.scale.more_rounds), names)

    def _fits(self, shape: Shape) -> bool:
        """Returns whether eager torch fits into memory: it needs four copies of the logits at the same time."""
        wanted = 4 * 4 * shape.num_rows * 2 * shape.bank_size
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        if wanted > there:
            self.notes.append(
                f"Banks of {shape.bank_size:,} keys: eager torch is left out, because it needs {wanted / 1e9:.1f} GB."
            )
        return wanted <= there

    def timed(self, part: Part, shape: Shape, names: tuple[str, ...], rounds: int) -> Group:
        child = self.children[shape.num_threads]
        where = f"{part} · N {shape.num_rows}, D {shape.dim}, K {shape.bank_size:,}, {shape.num_threads} threads"
        self.on_step(f"{where} · warm-up")
        group = Group(part=part, shape=shape, cases={})
        for name in names:

            def run(name: str = name) -> float:
                timed: kernel_process.Timed = child.call(kernel_process.measure, name, limit_seconds=240)
                return timed.seconds

            group.cases[name] = Case(name=name, workers=shape.num_threads, num_items=1, num_bytes=0, run=run)
        group.about = child.call(kernel_process.begin, shape, names, self.options.seed, limit_seconds=600)
        for name, about in group.about.items():
            if about.startswith("failed: "):
                group.cases[name].failure = about.removeprefix("failed: ")
                self.notes.append(_excuse(name, group.cases[name].failure))
        rounds = self.options.rounds or rounds
        interleave(list(group.cases.values()), rounds, lambda n, c: self.on_step(f"{where} · round {n + 1} · {c.name}"))
        self.groups.append(group)
        return group

    def weigh(self, group: Group, names: tuple[str, ...]) -> None:
        for name in names:
            if not group.cases[name].failure and name != "gemms":
                self.on_step(f"{group.part} · memory of {name}")
                with contextlib.suppress(Failed):
                    group.memory_mb[name] = kernel_process.peak_extra_mb(
                        group.shape, name, group.about[name], self.options.seed
                    )

    def compare(self, group: Group) -> None:
        self.on_step(f"{group.part} · errors")
        child = self.children[group.shape.num_threads]
        for name, case in group.cases.items():
            if not case.failure and name != "gemms":
                group.errors[name] = tuple(child.call(kernel_process.errors, name, limit_seconds=240))

    def budget(self) -> None:
        child = self.children[min(self.children)]
        cases = error_cases(self.scale)
        for number, case in enumerate(cases):
            self.on_step(f"errors · {number + 1} of {len(cases)}")
            self.accuracy.append(child.call(kernel_process.error_of, case, self.options.seed, limit_seconds=240))

    def training_step(self) -> None:
        shape = self.scale.step._replace(num_threads=min(self.scale.step.num_threads, max(self.threads)))
        child = self.children[max(self.threads)]
        self.on_step("step · warm-up")
        about = child.call(kernel_step.begin_steps, shape, self.options.seed, limit_seconds=240)
        ways: tuple[Way, ...] = ("ours", "released")
        for way in ways:

            def run(way: Way = way) -> float:
                seconds: float = child.call(kernel_step.measure_step, way, limit_seconds=240)
                return seconds

            self.step_cases[way] = Case(
                name=way, workers=shape.num_threads, num_items=shape.batch_size, num_bytes=0, run=run
            )
        rounds = self.options.rounds or self.scale.more_rounds + 1
        interleave(
            list(self.step_cases.values()), rounds, lambda n, c: self.on_step(f"step · round {n + 1} · {c.name}")
        )
        memory = {way: kernel_step.step_extra_mb(way, shape, self.options.seed) for way in ways}
        self.step = {**shape._asdict(), **about, "extra_mb": memory}

    def cost_model(self) -> None:
        self.on_step("cost model")
        self.model = predictions(((32, 128), (512, 128)))
        if isinstance(missing := tiles(), str):
            self.notes.append(f"The cost model is left out: {missing}.")


def _excuse(name: str, failure: str) -> str:
    if name == "compile":
        return f"torch.compile is left out: {failure}. It needs a C++ compiler on PATH, as 'c++' or $CXX."
    return f"{name} is left out: {failure}"


def error_cases(scale: Scale) -> list[ErrorCase]:
    """Returns problems with sizes that do and do not fill tiles, random and clustered keys, in all storage types.

    The largest one has the size of the headline.
    """
    small = scale.bank_size <= 512
    cases = [
        ErrorCase(rows, dim, sizes, dtype, temperature, clusters)
        for rows, dim, sizes, clusters in (
            (252, 128, (5000, 333), 0),
            (64, 256, (4096, 1000), 100),
            (7, 64, (77, 0), 3),
        )
        for dtype in ("float32", "float16", "bfloat16")
        for temperature in (0.05, 0.2, 1.0)
    ]
    if not small:
        cases.append(ErrorCase(256, 128, (scale.bank_size,) * 2, "float32", 0.07, 100))
    return cases[-3:] if small else cases


def main() -> int:
    options = tyro.cli(Options, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    kind = "smoke" if options.smoke else "quick" if options.quick else "full"
    scale = SCALES[kind]
    if options.bank_size is not None:
        scale = scale._replace(bank_size=options.bank_size, step=scale.step._replace(bank_size=options.bank_size))
    load_before, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    threads = (1,) if kind == "smoke" or cores < 2 else (1, 2)
    with tempfile.TemporaryDirectory(prefix="fastcssl-bench-") as folder, Console(stderr=True).status("") as status:
        bench = Bench(options=options, scale=scale, folder=Path(folder), on_step=status.update, threads=threads)
        if load_before > 0.5:
            bench.notes.append(f"The machine was busy (load {load_before:.1f}), so these numbers are not reliable.")
        if cores < 2:
            bench.notes.append("Only one core is available, so nothing was measured with two threads.")
        try:
            bench.start()
            for part in PARTS:
                if part in options.parts:
                    began = time.perf_counter()
                    bench.run(part)
                    bench.part_seconds[part] = round(time.perf_counter() - began, 1)
        except Failed as failure:
            raise SystemExit(f"The benchmark could not continue: {failure}") from None
        finally:
            bench.close()
    summary, details = summarize(bench)
    show(Console(width=None if sys.stdout.isatty() else 110), bench, summary, details)
    if options.json is not None:
        about = environment(
            PACKAGES,
            scale=kind,
            seed=options.seed,
            part_seconds=bench.part_seconds,
            load_average_before=round(load_before, 2),
        )
        records = [record for group in bench.groups for record in group.records()]
        records += [{"part": "errors", **found} for found in bench.accuracy]
        if bench.step:
            cases = {f"{way}_round_seconds": case.seconds for way, case in bench.step_cases.items()}
            records.append({"part": "step", **bench.step, **cases})
        records += [{"part": "model", **line} for line in bench.model]
        ends = [{"environment": about}, {"details": details}, {"summary": summary}]
        write_json_lines(options.json, [*records, *ends])
    return 0


if __name__ == "__main__":
    sys.exit(main())
