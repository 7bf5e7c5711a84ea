"""The measurements of `fastcssl-demo` that no other command makes: baselines, a killed run, and a race of loaders."""

import io
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dataprep.api import build_data
from fastcssl.cli.exit_codes import Ended, ExitCode
from fastcssl.cli.listing import flag_of
from fastcssl.data.loader import Loader, LoaderConfig
from fastcssl.data.policies import policy
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.data.views import ViewSpec, with_size
from fastcssl.evaluate.online_probe import probe
from fastcssl.learn.encoder_file import load_encoder
from fastcssl.report.runs import read_run

THUMBNAIL_PX = 8
WORDS = ("demo-styles", "moco")
STYLES = ("sketch", "photo", "poster", "neon")  # in the order of the tasks
_POLL_S = 0.02
_MADE_AHEAD = 2  # one batch in the queue and one in progress


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoBudget:
    """How much the demo draws, trains and measures."""

    source: str = "synthetic:set=forms,train=480,val=160"
    # Of the recipe, by dotted key. Longer in the first style, so that there is something to forget.
    changes: Mapping[str, Any] = field(default_factory=lambda: {"epochs": (16, 12, 12, 12)})
    checkpoint_minutes: float = 0.02  # in the run that is killed
    photos: str = "synthetic:set=forms,classes=10,train=16,val=1,size=256,format=jpeg"  # for the race of loaders
    batch_size: int = 32  # of the race
    round_s: float = 0.5  # of each loader, in each of the rounds
    num_rounds: int = 4


# ---- Baselines -------------------------------------------------------------------------------------------------------


def thumbnails(data: Path) -> list[float]:
    """Returns the accuracy on each task of logistic regression on the pixels of thumbnails."""
    view = with_size(policy("probe-val-cifar"), THUMBNAIL_PX)
    found = probe(
        nn.Flatten(), Prepared.open(data), LoaderConfig(policy=view, batch_size=256), view=view, amp_dtype=None
    )  # the features of an image are its pixels
    return [task.linear_top1 for task in found.per_task]


# ---- A killed run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedRun:
    """A run that was killed and resumed, compared with one that was not."""

    killed_after_step: int  # the newest checkpoint when it was killed
    num_losses: int  # logged losses that both runs have
    num_equal: int  # of them equal in every bit
    encoders_equal: bool  # whether all weights of the last encoders are equal in every bit

    @property
    def is_identical(self) -> bool:
        return self.encoders_equal and 0 < self.num_losses == self.num_equal


def kill_and_resume(whole: Path, out: Path, data: Path, changes: Mapping[str, Any], minutes: float) -> ResumedRun:
    """Repeats the last task of a finished run, kills it in the middle, resumes it, and compares the two.

    whole: the finished run. out: the folder of the repetition; its output is in OUT.log. changes: those of the recipe,
    by dotted key. minutes: the time between checkpoints.
    """
    record = read_run(whole)
    last = len(record.task_names) - 1
    steps = [report.step for report in record.steps if report.task == last]
    changes = {**changes, "run.checkpoint_minutes": minutes}
    flags = [word for key, value in changes.items() for word in (flag_of(key), _listed(value))]
    words = [*WORDS, record.strategy, "--data", str(data), "--out", str(out), *flags]
    command = [sys.executable, "-m", "fastcssl.cli.train", *words]
    with out.with_suffix(".log").open("w", encoding="utf-8") as log:
        child = subprocess.Popen([*command, "--from", f"{whole}@{last - 1}"], stdout=log, stderr=log)
        try:
            killed_at = _killed(child, out, (steps[0] + steps[-1]) // 2)
        finally:
            child.kill()  # also after Ctrl-C
            child.wait()
        if killed_at is None or subprocess.run(command, stdout=log, stderr=log, check=False).returncode != ExitCode.OK:
            raise Ended(f"The run that was to be killed and resumed failed. See {log.name}.", ExitCode.FAILED)
    return _compared(whole, out, last, killed_at)


def _listed(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _killed(child: "subprocess.Popen[bytes]", out: Path, middle: int) -> int | None:
    """Kills a run once it has a checkpoint past its middle, and returns the checkpoint's step. None: it had ended."""
    while child.poll() is None:
        saved = [int(path.stem.removeprefix("step-")) for path in out.glob("checkpoints/step-*.pt")]
        if saved and max(saved) >= middle:
            os.kill(child.pid, signal.SIGKILL)
            return max(saved) if child.wait() == -signal.SIGKILL else None
        time.sleep(_POLL_S)
    return None


def _compared(whole: Path, resumed: Path, last: int, killed_at: int) -> ResumedRun:
    expected, found = (
        {report.step: dict(report.terms) for report in read_run(run).steps if report.task == last}
        for run in (whole, resumed)
    )
    both = [step for step in expected if step in found]
    first, second = (
        load_encoder(run / "encoders" / f"task{last}.safetensors").state_dict() for run in (whole, resumed)
    )
    return ResumedRun(
        killed_after_step=killed_at,
        num_losses=len(both),
        num_equal=sum(expected[step] == found[step] for step in both),
        encoders_equal=first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first),
    )


# ---- A race of loaders -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRace:
    """Images per second of one thread each, both views: medians over interleaved rounds."""

    native: float
    torchvision: float

    @property
    def ratio(self) -> float:
        return self.native / self.torchvision


def race(out: Path, budget: DemoBudget) -> LoaderRace:
    """Measures the native loader against torchvision's transforms on PIL images, with the same JPEGs and settings."""
    build_data(budget.photos, out, scenario="joint", formats=("tar",))
    views = policy("pnr-moco-imagenet")
    # torch would use all cores for a tensor, and this is about one.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        config = LoaderConfig(policy=views, batch_size=budget.batch_size, loader="native", num_threads=1, prefetch=1)
        with Loader(Prepared.open(out), config) as loader:
            stream = loader.open(Selection(tasks=(0,)))
            sources = (
                (batch.views for epoch in range(sys.maxsize) for batch in stream.epoch(epoch)),
                _by_torchvision(_jpegs(out), views, budget.batch_size),
            )
            rates = [[_rate(source, budget) for source in sources] for _ in range(budget.num_rounds)]
    finally:
        torch.set_num_threads(before)
    native, torchvision = (statistics.median(column) for column in zip(*rates, strict=True))
    return LoaderRace(native=native, torchvision=torchvision)


def _rate(batches: Iterator[object], budget: DemoBudget) -> float:
    """Returns images per second over about one round, without the batches made while the other loader ran."""
    for _ in range(_MADE_AHEAD):
        next(batches)
    began, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - began) < budget.round_s or not count:
        next(batches)
        count += budget.batch_size
    return count / seconds


def _jpegs(out: Path) -> list[bytes]:
    found = []
    for path in sorted(out.rglob("*.tar")):
        with tarfile.open(path) as shard:
            files = [shard.extractfile(member) for member in shard if member.name.endswith((".jpg", ".jpeg"))]
            found += [file.read() for file in files if file is not None]
    return found


def _by_torchvision(jpegs: Sequence[bytes], views: Sequence[ViewSpec], batch_size: int) -> Iterator[list[torch.Tensor]]:
    """Yields batches of views, as CaSSLe and solo-learn make them: Pillow decodes, torchvision transforms."""
    from PIL import Image

    transforms = [_transform(view) for view in views]
    while True:
        chosen = torch.randint(len(jpegs), (batch_size,)).tolist()
        images = [Image.open(io.BytesIO(jpegs[place])).convert("RGB") for place in chosen]
        yield [torch.stack([transform(image) for image in images]) for transform in transforms]


def _transform(spec: ViewSpec) -> Callable[[Any], torch.Tensor]:
    from PIL import ImageFilter, ImageOps
    from torchvision import transforms as T

    def blur(image: Any) -> Any:
        low, high = spec.blur_sigma
        return image.filter(ImageFilter.GaussianBlur(radius=low + (high - low) * float(torch.rand(()))))

    def solarize(image: Any) -> Any:
        return ImageOps.solarize(image, int(spec.solarize_threshold))

    crop = T.RandomResizedCrop(spec.size_px, spec.scale, spec.ratio, T.InterpolationMode.BICUBIC)
    jitter = T.ColorJitter(spec.brightness, spec.contrast, spec.saturation, spec.hue)
    steps = [crop, T.RandomApply([jitter], spec.jitter_p), T.RandomGrayscale(spec.gray_p)]
    steps += [T.RandomApply([blur], spec.blur_p), T.RandomApply([solarize], spec.solarize_p)]
    steps += [T.RandomHorizontalFlip(spec.flip_p), T.ToTensor(), T.Normalize(spec.mean, spec.std)]
    composed: Callable[[Any], torch.Tensor] = T.Compose(steps)
    return composed
