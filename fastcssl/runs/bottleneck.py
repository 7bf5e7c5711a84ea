"""Finds the bottleneck of a run from the measured times of its stages, and says it in one line.

The training thread is always doing one thing, and the bottleneck is what it did longest. If that was waiting for data,
the clocks of the loader's threads show which stage it waited for. A GPU works in parallel with the training thread, so
on a GPU the idle time of the GPU counts instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastcssl.runs.timing import total

_ENOUGH_SECONDS = 1e-3  # a shorter total means that nothing was measured

NAMES = {
    "disk": "the disk",
    "decode": "decoding",
    "augmentation": "augmentation",
    "data": "waiting for data",
    "transfer": "the transfer to the GPU",
    "host": "the host, which launches the GPU's work",
    "model": "the model",
    "probe": "the probe",
    "checkpoint": "checkpoints",
    "strategy": "the strategy's work between tasks",
}
_DATA = ("disk", "decode", "augmentation", "data")
_OF_LOADER = {"read": "disk", "decode": "decode", "crop": "augmentation", "photometric": "augmentation"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts that the advice depends on, as stored in RUN/config.json."""

    device: str = "cpu"  # or "cuda"
    loader: str = "native"
    augment: str = "fused"
    precision: str = "fp32"  # in effect
    compile: str = "off"
    num_threads: int = 1  # loader threads per rank
    num_cores: int = 1  # cores that this process may use
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The bottleneck of a run, and how to relieve it."""

    stage: str  # a key of NAMES
    shares: dict[str, float]  # share of the total time by stage, largest first; they add up to 1
    advice: str

    @property
    def sentence(self) -> str:
        """Returns the bottleneck, the shares of the time and the advice, in one line."""
        name = NAMES[self.stage]
        data = {stage: share for stage, share in self.shares.items() if stage in _DATA}
        others = {stage: share for stage, share in self.shares.items() if stage not in data}
        if self.stage in data and self.stage != "data":
            parts = f" ({_listed(data)})" if len(data) > 1 else ""
            rest = f"; {_listed(others)}" if _listed(others) else ""
            what = f". The run waited for data {_percent(sum(data.values()))} of the time{parts}{rest}"
        else:
            rest = _listed({stage: share for stage, share in self.shares.items() if stage != self.stage})
            what = f" ({_percent(self.shares[self.stage])} of the time{f'; {rest}' if rest else ''})"
        return f"Bottleneck: {name}{what}. {self.advice}"


def verdict(times: list[Mapping[str, Any]], machine: Machine) -> Verdict | None:
    """Returns the bottleneck, or None if nothing was measured. `times`: the `StageTimes` states of the run's tasks."""
    sums = total(times)
    seconds = _by_stage(sums["main"], sums["loader"], sums["device"], machine)
    whole = sum(seconds.values())
    if whole < _ENOUGH_SECONDS:
        return None
    shares = dict(sorted(((name, s / whole) for name, s in seconds.items() if s > 0), key=lambda item: -item[1]))
    # The total wait decides whether the data is the bottleneck. If it is, the loader's longest stage gives the name.
    waited = {name: shares.get(name, 0.0) for name in _DATA}
    longest = next(iter(shares))
    if sum(waited.values()) > max((share for name, share in shares.items() if name not in waited), default=0.0):
        longest = max(waited, key=lambda name: waited[name])
    return Verdict(stage=longest, shares=shares, advice=_advice(longest, machine))


def _by_stage(
    main: Mapping[str, float], loader: Mapping[str, float], device: Mapping[str, float], machine: Machine
) -> dict[str, float]:
    """Returns the seconds that the run spent on each stage. They add up to its total time."""
    wait, model = main.get("wait", 0.0), main.get("model", 0.0)
    seconds = {name: main.get(name, 0.0) for name in ("probe", "checkpoint", "strategy")}
    seconds["augmentation"] = main.get("augment", 0.0)
    if machine.device == "cuda" and "idle" in device:
        # The GPU computes the model, is idle, or gets its work only as fast as the host launches it. A wait of the host
        # costs nothing while the queue of the GPU has work.
        inside = wait + model + seconds["augmentation"]
        idle = min(device["idle"], inside)
        lost = min(wait + seconds["augmentation"], idle)
        seconds["augmentation"] = min(seconds["augmentation"], lost)
        wait = lost - seconds["augmentation"]
        seconds["transfer"] = min(idle - lost, device.get("transfer", 0.0))
        launched = min(device.get("launch", 0.0), inside - idle)
        seconds["host"] = idle - lost - seconds["transfer"] + launched
        model = inside - idle - launched
    seconds["model"] = model
    busy = {_OF_LOADER[name]: 0.0 for name in _OF_LOADER}
    for name, spent in loader.items():
        if name in _OF_LOADER:
            busy[_OF_LOADER[name]] += spent
    if sum(busy.values()) > 0:
        for name, spent in busy.items():
            seconds[name] = seconds.get(name, 0.0) + wait * spent / sum(busy.values())
    else:  # a back end without such clocks
        seconds["data"] = wait
    return seconds


def _advice(stage: str, machine: Machine) -> str:
    spare = machine.num_cores - machine.num_threads * machine.num_ranks
    threads = (
        f"Use --num-threads {machine.num_threads + spare // machine.num_ranks}: the loader uses only "
        f"{machine.num_threads * machine.num_ranks} of {machine.num_cores} cores."
        if machine.device == "cuda" and spare >= machine.num_ranks
        else ""
    )
    other_loader = "Use --loader auto, whose engine decodes each image once for all its views."
    if stage == "disk":
        return (
            "Put the data on a faster disk or into memory (copy it to /dev/shm), prepare smaller images (fastcssl-prep "
            "build --resize short:256), or read further ahead with --prefetch 8."
        )
    if stage in ("decode", "data"):
        if machine.loader in ("torchvision", "ffcv"):
            return other_loader
        more = "Prepare smaller images (fastcssl-prep build --resize short:256 or square:N), or give"
        if machine.loader == "resident":
            more = "The images are already small and stored as pixels. Give"
        return threads or f"{more} each process more CPU cores: the loader uses all {machine.num_cores}."
    if stage == "augmentation":
        if machine.augment == "torch":
            return "Use --augment fused."
        return threads or f"Give each process more CPU cores: the loader uses all {machine.num_cores}."
    if stage == "transfer":
        return "Keep small images on the card (fastcssl-prep build --formats array, --loader resident)."
    if stage == "host":
        return "Use --compile inductor, or a larger --batch-size with a learning rate that suits it."
    if stage == "probe":
        return "Probe less often (--online-probe every=E with a larger E, or off); fastcssl-eval can probe afterwards."
    if stage == "checkpoint":
        return "Save less often (--checkpoint-minutes 30), or put --out on a faster disk."
    if stage == "strategy":
        return "Train longer per task to make it matter less, or give the strategy a smaller budget or sample."
    return _model_advice(machine)


def _model_advice(machine: Machine) -> str:
    if machine.device == "cpu":
        return "Use a GPU, a smaller --encoder.name or more CPU cores."
    if machine.precision == "fp32":
        return "Use --precision bf16."
    if machine.compile == "off":
        return "Use --compile inductor, or more GPUs (torchrun)."
    return "Use more GPUs (torchrun); the loader keeps up."


def _listed(shares: Mapping[str, float]) -> str:
    """Returns the three largest shares as text, without those that round to 0 %."""
    worth = [(stage, share) for stage, share in shares.items() if share >= 0.005]
    return ", ".join(f"{NAMES[stage]} {_percent(share)}" for stage, share in worth[:3])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
