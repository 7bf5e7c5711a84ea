"""What bounded a run, in one sentence, from the measured times of its stages.

The thread that trains is always doing one thing: what it did longest bounded the run. Where that was waiting for data,
the loader's threads tell for what. A GPU works beside that thread, so there its idle time counts, not the thread's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastcssl.runs.timing import total

_ENOUGH_SECONDS = 1e-3  # less than this was not measured

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
    """What the advice depends on; RUN/config.json has it."""

    device: str = "cpu"  # or "cuda"
    loader: str = "native"
    augment: str = "fused"
    precision: str = "fp32"  # in effect
    compile: str = "off"
    num_threads: int = 1  # of the loader, a rank
    num_cores: int = 1  # that this process may use
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    stage: str  # a key of NAMES
    shares: dict[str, float]  # of the whole time, largest first; they add up to 1
    advice: str

    @property
    def sentence(self) -> str:
        name = NAMES[self.stage]
        data = {stage: share for stage, share in self.shares.items() if stage in _DATA}
        others = {stage: share for stage, share in self.shares.items() if stage not in data}
        if self.stage in data:
            parts = f" ({_listed(data)})" if len(data) > 1 else ""
            rest = f"; {_listed(others)}" if _listed(others) else ""
            what = f"it waited for data {_percent(sum(data.values()))} of its time{parts}{rest}"
        else:
            rest = _listed({stage: share for stage, share in self.shares.items() if stage != self.stage})
            what = f"{_percent(self.shares[self.stage])} of its time{f' ({rest})' if rest else ''}"
        return f"{name[0].upper()}{name[1:]} bounded this run: {what}. {self.advice}"


def verdict(times: list[Mapping[str, Any]], machine: Machine) -> Verdict | None:
    """Of the states of `StageTimes` of a run's tasks. None: nothing was measured."""
    sums = total(times)
    seconds = _by_stage(sums["main"], sums["loader"], sums["device"], machine)
    whole = sum(seconds.values())
    if whole < _ENOUGH_SECONDS:
        return None
    shares = dict(sorted(((name, s / whole) for name, s in seconds.items() if s > 0), key=lambda item: -item[1]))
    # All that is waited for together decides whether it is the data; then the loader's longest stage has the name.
    waited = {name: shares.get(name, 0.0) for name in _DATA}
    longest = next(iter(shares))
    if sum(waited.values()) > max((share for name, share in shares.items() if name not in waited), default=0.0):
        longest = max(waited, key=lambda name: waited[name])
    return Verdict(stage=longest, shares=shares, advice=_advice(longest, machine))


def _by_stage(
    main: Mapping[str, float], loader: Mapping[str, float], device: Mapping[str, float], machine: Machine
) -> dict[str, float]:
    """Seconds of the run by what they were spent on. They add up to its time."""
    wait, model = main.get("wait", 0.0), main.get("model", 0.0)
    seconds = {name: main.get(name, 0.0) for name in ("probe", "checkpoint", "strategy")}
    seconds["augmentation"] = main.get("augment", 0.0)
    if machine.device == "cuda" and "idle" in device:
        # The GPU is busy with the model or idle. What it did not notice, since its queue was full, cost nothing.
        inside = wait + model + seconds["augmentation"]
        idle = min(device["idle"], inside)
        lost = min(wait + seconds["augmentation"], idle)
        seconds["augmentation"] = min(seconds["augmentation"], lost)
        wait = lost - seconds["augmentation"]
        seconds["transfer"] = min(idle - lost, device.get("transfer", 0.0))
        seconds["host"] = idle - lost - seconds["transfer"]
        model = inside - idle
    seconds["model"] = model
    busy = {_OF_LOADER[name]: 0.0 for name in _OF_LOADER}
    for name, spent in loader.items():
        if name in _OF_LOADER:
            busy[_OF_LOADER[name]] += spent
    if sum(busy.values()) > 0:
        for name, spent in busy.items():
            seconds[name] = seconds.get(name, 0.0) + wait * spent / sum(busy.values())
    else:  # a back end that keeps no such clocks
        seconds["data"] = wait
    return seconds


def _advice(stage: str, machine: Machine) -> str:
    spare = machine.num_cores - machine.num_threads * machine.num_ranks
    threads = (
        f"Use --num-threads {machine.num_threads + spare // machine.num_ranks}: of {machine.num_cores} cores the "
        f"loader uses {machine.num_threads * machine.num_ranks}."
        if machine.device == "cuda" and spare >= machine.num_ranks
        else ""
    )
    other_loader = "Use --loader auto, whose engine decodes each image once for all its views."
    if stage == "disk":
        return (
            "Put the data on a faster disk or into memory (copy it to /dev/shm), prepare it smaller (fastcssl-prep "
            "build --resize short:256), or read further ahead with --prefetch 8."
        )
    if stage in ("decode", "data"):
        if machine.loader in ("torchvision", "ffcv"):
            return other_loader
        smaller = "Prepare smaller images (fastcssl-prep build --resize short:256 or square:N)"
        if machine.loader == "resident":
            smaller = "The images are small and stored as pixels already"
        return threads or f"{smaller}, or give each process more CPU cores: the loader uses all {machine.num_cores}."
    if stage == "augmentation":
        if machine.augment == "torch":
            return "Use --augment fused."
        return threads or f"Give each process more CPU cores: the loader uses all {machine.num_cores}."
    if stage == "transfer":
        return "Keep small images on the card (fastcssl-prep build --formats array, --loader resident)."
    if stage == "host":
        return "Use --compile inductor or a larger --batch-size with its learning rate."
    if stage == "probe":
        return "Probe less often: --online-probe every=E with a larger E, or off; fastcssl-eval probes afterwards."
    if stage == "checkpoint":
        return "Save less often (--checkpoint-minutes 30), or put --out on a faster disk."
    if stage == "strategy":
        return "Longer tasks pay for it; a smaller budget or sample of the strategy's shortens it."
    return _model_advice(machine)


def _model_advice(machine: Machine) -> str:
    if machine.device == "cpu":
        return "Use a GPU, or a smaller --encoder.name; on the CPU more cores help too."
    if machine.precision == "fp32":
        return "Use --precision bf16."
    if machine.compile == "off":
        return "Use --compile inductor, or more GPUs (torchrun)."
    return "More GPUs (torchrun) help; the loader keeps up."


def _listed(shares: Mapping[str, float]) -> str:
    """The largest three that round to a percent."""
    worth = [(stage, share) for stage, share in shares.items() if share >= 0.005]
    return ", ".join(f"{NAMES[stage]} {_percent(share)}" for stage, share in worth[:3])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
