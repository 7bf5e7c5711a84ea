"""Measures probing a run's checkpoints: side by side, one at a time like the public code, and from cached features.

    python benchmarks/evaluate.py --quick                      # the embedded set, about a minute
    python benchmarks/evaluate.py --data DIR --run RUN --json evaluate.jsonl

It measures an epoch of the exact linear probe for T encoders side by side and one at a time, the loader without
encoders, and the encoders on a batch held in memory. The bound for shared loading is the sum of the last two on a CPU,
where they share the cores, and the slower one on a GPU. The time of 100 epochs one at a time is 100 times that epoch;
the cached probe is measured completely. The accuracies of both probes are compared after 100 epochs on the encoders of
a run: RUN, or one that is trained here in seconds.
"""

import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from timing import Case, environment, interleave, speedup, write_json_lines
from torch import nn

from dataprep.build import BuildJob, build
from dataprep.encode import Encoding
from dataprep.scenario import Scenario
from dataprep.sources import open_source
from fastcssl.config.config import RunConfig
from fastcssl.config.recipes import recipe
from fastcssl.data.policies import policy
from fastcssl.data.prepared import Prepared
from fastcssl.data.views import with_size
from fastcssl.evaluate.evaluate import evaluate
from fastcssl.evaluate.features import embed, full_float32
from fastcssl.evaluate.options import ProbeMachine, Request
from fastcssl.evaluate.probes import Bench, ProbedEncoder, ProbeViews, cached, linear, plain
from fastcssl.evaluate.scopes import plan
from fastcssl.evaluate.targets import open_targets
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.learn.nets import build_encoder
from fastcssl.train.loop import train

PACKAGES = ("fastcssl", "torch", "torchvision", "numpy")
EPOCHS = 100  # in the protocol


@dataclass(frozen=True, kw_only=True)
class Options:
    data: Path | None = None  # A prepared folder to measure speed on. Without it, the embedded set as JPEGs.
    run: Path | None = None  # A run to compare accuracies on. Without it, one is trained.
    json: Path | None = None  # Where to write the numbers, one JSON object per line. The last one is the summary.
    quick: bool = False  # Takes about a minute.
    smoke: bool = False  # Takes seconds: shows that it runs, but measures nothing.
    encoder: str | None = None  # Such as resnet18. Default: resnet18 on a GPU, a narrow one on a CPU.
    checkpoints: int = 5  # The number of encoders to probe.
    size_px: int | None = None
    rounds: int | None = None
    threads: int = 2  # Threads for computing, and as many for loading.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    work: Path | None = None  # Where to prepare images and train. Kept and reused by the next start.
    seed: int = 0


class Scale(NamedTuple):
    rounds: int
    encoder: str
    size_px: int
    num_images: int  # per epoch
    train_epochs: int  # of the run that is trained here
    train_images: int  # per class, of its 20 classes
    exact_epochs: int


SCALES = {
    "smoke": Scale(1, "resnet18-w8", 32, 40, 1, 4, 2),
    "quick": Scale(5, "resnet18-w8", 64, 500, 8, 40, EPOCHS),
    "full": Scale(5, "resnet18-w16", 64, 2048, 20, 80, EPOCHS),
}


# ---- Speed -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Speed:
    """The contenders. Each method runs one epoch, or the complete cached probe, and returns the seconds."""

    bench: Bench
    encoders: list[nn.Module]
    settings: linear.LinearSettings

    def contenders(self) -> list[ProbedEncoder[linear.LinearSettings]]:
        return [ProbedEncoder(encoder=encoder, settings=(self.settings,)) for encoder in self.encoders]

    def side_by_side(self) -> float:
        with stopwatch() as seconds:
            linear.train(self.contenders(), self.bench)
        return seconds()

    def one_at_a_time(self) -> float:
        with stopwatch() as seconds:
            for contender in self.contenders():
                linear.train([contender], self.bench)
        return seconds()

    def loader_alone(self) -> float:
        with stopwatch() as seconds, self.bench.open_loader("train", self.bench.views.train) as loader:
            for _ in loader.open(self.bench.selection("train", "shuffled")).epoch(0):
                pass
        return seconds()

    def compute_alone(self) -> float:
        """Does what `linear.train` does with its batches, on a batch that is already loaded."""
        bench, training = self.bench, linear.Training(self.contenders(), self.bench)
        members = linear.Members(bench)
        with bench.open_loader("train", bench.views.train) as loader:
            stream = loader.open(bench.selection("train", "shuffled"))
            num_batches = len(stream)
            batches = stream.epoch(0)
            batch = next(batches)
            held = tuple(view.clone() for view in batch.views)
            label_N, id_N = batch.label.clone(), batch.id.clone()
            batches.close()  # type: ignore[attr-defined]
        with torch.no_grad(), full_float32(), stopwatch() as seconds:
            for _ in range(num_batches):
                parts = members.of(label_N, id_N)
                for e, encoder in enumerate(self.encoders):
                    h_NF = embed(encoder, held, device=bench.device, amp_dtype=bench.amp_dtype)
                    for group, (rows, class_N) in enumerate(parts):
                        training.step(e, group, h_NF[rows], class_N)
        return seconds()

    def from_cache(self) -> float:
        contenders = [ProbedEncoder(encoder=encoder, settings=(cached.CachedSettings(),)) for encoder in self.encoders]
        with stopwatch() as seconds:
            plain.run(contenders, self.bench)
        return seconds()


@contextlib.contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Yields a function that returns the seconds of the block, once it has ended."""
    began, ended = time.perf_counter(), math.nan
    yield lambda: ended - began
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    ended = time.perf_counter()


def prepared(out: Path, source: str, *, kind: Literal["class", "data"], format: str, options: Options) -> Prepared:
    job = BuildJob(
        source=open_source(f"synthetic:{source},seed={options.seed}"),
        scenario=Scenario(kind=kind, num_tasks=2),
        encoding=Encoding(),
        formats=(format,),
        out=out,
        num_workers=options.threads,
    )
    build(job, Console(quiet=True))
    return Prepared.open(out)


def measured(options: Options, scale: Scale, device: torch.device, work: Path, on_step: Callable[[str], None]) -> Speed:
    if options.data is not None:
        data = Prepared.open(options.data)
    else:
        on_step("preparing images")
        each = scale.num_images // 20
        source = f"size=mixed,classes=20,train={each},val={max(1, each // 5)}"
        data = prepared(work / f"jpegs-{each}", source, kind="data", format="tar", options=options)
    config = EncoderConfig(name=scale.encoder)
    encoders = [
        build_encoder(config, seed, scale.size_px).eval().to(memory_format=torch.channels_last).to(device)
        for seed in range(options.checkpoints)
    ]
    train_view, val_view = (with_size(policy(f"probe-{which}-imagenet"), scale.size_px) for which in ("train", "val"))
    bench = Bench(
        data=data,
        plan=plan(data, "all"),
        views=ProbeViews(train=train_view, val=val_view),
        device=device,
        num_threads=options.threads,
    )
    return Speed(bench=bench, encoders=encoders, settings=linear.LinearSettings(lr=0.3, epochs=1))


# ---- Accuracy --------------------------------------------------------------------------------------------------------


def accuracies(options: Options, scale: Scale, work: Path, on_step: Callable[[str], None]) -> dict[str, Any]:
    """Returns the top-1 of every checkpoint with the exact and the cached probe, in float32."""
    run = options.run
    if run is None:
        on_step("training encoders to compare accuracies on")
        each = scale.train_images
        source = f"size=32,classes=20,train={each},val={each}"
        data = prepared(work / f"array-{each}", source, kind="class", format="array", options=options)
        run = work / f"run-{each}-{scale.train_epochs}"
        found = recipe("demo", "moco", "finetune")
        small = replace(
            found.config,
            epochs=scale.train_epochs,
            batch_size=min(found.config.batch_size, 10 * each),
            expect=replace(found.config.expect, source="any", num_tasks=0),
            online_probe="off",
            run=RunConfig(num_threads=options.threads, device=options.device),
        )
        if signal := train(found.changed_to(small), data=data.folder, out=run, console=Console(quiet=True)).signal:
            raise SystemExit(128 + signal)
    on_step(f"{scale.exact_epochs} epochs of the exact probe")
    targets = open_targets([run], architecture=None, family="imagenet", size_px=None, out=None)
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    machine = ProbeMachine(
        device=device, precision="fp32", num_threads=options.threads, command="benchmarks/evaluate.py"
    )
    request = Request(probes=("linear", "linear-cached"), epochs=scale.exact_epochs, random_encoder=False)
    made = {outcome.evaluation.probe: outcome.evaluation for outcome in evaluate(targets, request, machine)}
    exact, solved = made["linear"], made["linear-cached"]
    return {
        "run": targets[0].recipe,
        "encoder": targets[0].encoder.name,
        "lr": exact.settings["lr"],
        "epochs": scale.exact_epochs,
        "num_val": sum(exact.num_val),
        "exact_top1": exact.overall_top1,
        "cached_top1": solved.overall_top1,
        "difference": [a - b for a, b in zip(solved.overall_top1, exact.overall_top1, strict=True)],
    }


# ---- All of it -------------------------------------------------------------------------------------------------------


def summarize(cases: dict[str, Case], found: dict[str, Any], *, on_gpu: bool) -> dict[str, Any]:
    """Returns the ratios. Each is a median over rounds, whose sides ran within seconds of each other."""
    both, alone = cases["side by side"], cases["one at a time"]
    parts = zip(cases["loader alone"].seconds, cases["compute alone"].seconds, strict=True)
    bound = [max(pair) if on_gpu else sum(pair) for pair in parts]
    ratio = statistics.median(least / took for least, took in zip(bound, both.seconds, strict=True))
    allowed = statistics.median(took / least for least, took in zip(bound, alone.seconds, strict=True))
    solved = statistics.median(
        EPOCHS * took / once for took, once in zip(alone.seconds, cases["cached"].seconds, strict=True)
    )
    return {
        "exact_side_by_side_vs_sequential": speedup(both, alone),
        "exact_side_by_side_vs_bound": ratio,
        "bound_vs_sequential": allowed,
        "cached_vs_exact_sequential": solved,
        "one_pass_vs_exact_sequential": EPOCHS * allowed,  # a cache of features needs this pass too
        "cached_minus_exact_accuracy": statistics.fmean(found["difference"]),
        "largest_cached_minus_exact_accuracy": max(found["difference"], key=abs),
    }


def show(console: Console, cases: dict[str, Case], summary: dict[str, Any], found: dict[str, Any], title: str) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for heading in ("seconds, best", "median", "images/s"):
        table.add_column(heading, justify="right")
    names = {"cached": "cached features, complete probe", "one at a time": "one at a time, one epoch"}
    names |= {"side by side": "side by side, one epoch"}
    for name, case in cases.items():
        best, median = min(case.seconds), statistics.median(case.seconds)
        table.add_row(names.get(name, name), f"{best:.3f}", f"{median:.3f}", f"{case.num_items / median:,.0f}")
    console.print(table)
    share = 100 * summary["exact_side_by_side_vs_bound"]
    console.print(
        f"Side by side is {summary['exact_side_by_side_vs_sequential']:.2f} times as fast as one at a time. The bound "
        f"for shared loading is {summary['bound_vs_sequential']:.2f}; this is {share:.0f} % of it. The cached probe is "
        f"{summary['cached_vs_exact_sequential']:.0f} times as fast as {EPOCHS} epochs one at a time."
    )
    pairs = zip(found["exact_top1"], found["cached_top1"], strict=True)
    listed = ", ".join(f"{100 * a:.2f} / {100 * b:.2f}" for a, b in pairs)
    console.print(
        f"Top-1 in %, exact / cached, after each task of {found['run']} ({found['encoder']}, {found['num_val']} "
        f"images, lr {found['lr']:g}, {found['epochs']} epochs): {listed}."
    )


def main() -> int:
    options = tyro.cli(Options, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    options = replace(options, threads=min(options.threads, len(os.sched_getaffinity(0))))
    kind = "smoke" if options.smoke else "quick" if options.quick else "full"
    scale = SCALES[kind]
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and kind != "smoke":
        scale = scale._replace(encoder="resnet18", size_px=224)
    given = {key: getattr(options, key) for key in ("encoder", "size_px", "rounds")}
    scale = scale._replace(**{key: value for key, value in given.items() if value is not None})
    load_before = os.getloadavg()[0]
    torch.set_num_threads(options.threads)
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastcssl-bench-")))
        work.mkdir(parents=True, exist_ok=True)
        status = stack.enter_context(Console(stderr=True).status("starting"))
        speed = measured(options, scale, device, work, status.update)
        num_images = speed.bench.num_images("train")
        runs = {
            "side by side": speed.side_by_side,
            "one at a time": speed.one_at_a_time,
            "loader alone": speed.loader_alone,
            "compute alone": speed.compute_alone,
            "cached": speed.from_cache,
        }
        cases = {
            name: Case(name=name, workers=options.threads, num_items=num_images, num_bytes=0, run=run)
            for name, run in runs.items()
        }
        if kind != "smoke":
            status.update("warm-up")
            speed.side_by_side(), speed.from_cache()
        interleave(list(cases.values()), scale.rounds, lambda n, case: status.update(f"round {n + 1} · {case.name}"))
        found = accuracies(options, scale, work, status.update)
    summary = summarize(cases, found, on_gpu=device.type == "cuda")
    where = "the embedded set" if options.data is None else options.data.name
    title = (
        f"{options.checkpoints} x {scale.encoder}, {scale.size_px} px, {num_images:,} images of {where}, {device.type}"
    )
    show(Console(width=None if sys.stdout.isatty() else 110), cases, summary, found, title)
    if options.json is not None:
        about = environment(
            PACKAGES,
            scale=kind,
            rounds=scale.rounds,
            encoder=scale.encoder,
            size_px=scale.size_px,
            checkpoints=options.checkpoints,
            num_images=num_images,
            images=where,
            device=device.type,
            threads=options.threads,
            seed=options.seed,
            load_average_before=round(load_before, 2),
        )
        records = [case.record("image") for case in cases.values()]
        last = [{"accuracy": found}, {"environment": about}, {"summary": summary}]
        write_json_lines(options.json, [*records, *last])
    print(json.dumps({"summary": summary}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
