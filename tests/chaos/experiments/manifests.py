"""Gives mutated manifests to everything that reads one: hypothesis draws them, and a child reads a handful per fault.

Each must be a success or a sentence of the project, within a second and without gigabytes of memory, and verify must
not be content if the part of the manifest that finds samples has changed.
"""

import json
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from chaos.experiment import Fault, Outcome
from chaos.manifest_mutations import MUTATIONS
from chaos.nursery import Errand, nursery
from chaos.once import once

NUM_EXAMPLES = 12
_NUM_QUICK_EXAMPLES = 3
_ROUNDS = 40
_CPU_SECONDS_EACH = 1.0
_MORE_BYTES = 1 << 30
_READINGS = ("inspect", "verify", "training")


class Manifests:
    name = "manifests"

    def missing(self) -> str | None:
        return None

    def faults(self, seed: int) -> Iterable[Fault]:
        for number in range(_ROUNDS):
            for what in MUTATIONS:
                yield Fault(kind=f"manifest with {what}", name=f"{what} {seed}.{number}", is_quick=number == 0)

    def prepare(self, folder: Path) -> None:
        once(folder / "prepared", _prepare)

    def inject(self, fault: Fault, folder: Path, scratch: Path) -> Outcome:
        what, _, number = fault.name.rpartition(" ")
        shutil.copytree(folder / "prepared", scratch / "prepared")
        count = _NUM_QUICK_EXAMPLES if fault.is_quick else NUM_EXAMPLES
        errand = Errand(
            target="chaos.experiments.manifests:read_mutants",
            arguments={"what": what, "number": number, "count": count, "where": str(scratch / "prepared")},
            cpu_seconds=60 + 4 * NUM_EXAMPLES,
            more_bytes=2 * _MORE_BYTES,
        )
        ended = nursery().run(errand, scratch / "printed.txt")
        broken = ended.broken(cpu_seconds=60 + NUM_EXAMPLES, more_bytes=_MORE_BYTES)
        value = ended.value or {"broken": [], "seen": "no result"}
        return Outcome((*broken, *value["broken"]), value["seen"])


def _prepare(folder: Path) -> None:
    """Builds a small folder with a second split and both of the formats that the engine reads."""
    from dataprep import build_data, split_data

    source = "synthetic:classes=20,train=1,val=1"
    build_data(source, folder, scenario="class", num_tasks=2, formats=("tar", "array"), num_workers=1)
    split_data(folder, "joint", scenario="joint")


def read_mutants(what: str, number: str, count: int, where: str) -> dict[str, Any]:
    """Reads manifests that hypothesis draws, in a child; returns what was broken and a count of the results."""
    folder = Path(where)
    original = (folder / "manifest.json").read_text()
    broken: list[str] = []
    results: dict[str, int] = {}

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(MUTATIONS[what](json.loads(original)))
    def read(text: bytes) -> None:
        (folder / "manifest.json").write_bytes(text)
        for reading in _READINGS:
            result, problem = _read_within_a_second(reading, folder)
            results[f"{reading} {result}"] = results.get(f"{reading} {result}", 0) + 1
            if reading == "verify" and result == "0" and _finds_other_samples(folder, original):
                problem = "verify is content"
            if problem is not None:
                broken.append(f"{reading}: {problem}; {_difference(original, text)}")

    read()
    return {"broken": broken[:5], "seen": ", ".join(f"{count} x {result}" for result, count in sorted(results.items()))}


class _OutOfTime(BaseException):
    """Raised in code that has used too much of the processor."""


def _read_within_a_second(reading: str, folder: Path) -> tuple[str, str | None]:
    """Returns the exit status or the error's class, and what is wrong with that, or None."""
    from dataprep.errors import UserError

    def give_up(_: int, __: FrameType | None) -> None:
        raise _OutOfTime

    signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, 2 * _CPU_SECONDS_EACH)
    began = time.process_time()
    try:
        result = str(_READERS[reading](folder))
    except UserError:
        result = "refused"
    except _OutOfTime:
        return "out of time", f"it used more than {2 * _CPU_SECONDS_EACH:g} s of the processor"
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return "traceback", f"{type(error).__name__} at {where}: {str(error)[:100]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    used = time.process_time() - began
    return result, f"it used {used:.1f} s of the processor" if used > _CPU_SECONDS_EACH else None


def _inspect(folder: Path) -> int:
    from dataprep import cli

    return cli.main(["inspect", str(folder)])


def _verify(folder: Path) -> int:
    from dataprep import cli

    return cli.main(["verify", str(folder), "--workers", "1"])


def _train(folder: Path) -> int:
    """Opens the folder as a training does, and reads one batch of every task and split from each engine."""
    from fastcssl.data.loader import Loader, LoaderConfig
    from fastcssl.data.policies import policy
    from fastcssl.data.prepared import Prepared, Selection
    from fastcssl.data.views import with_size
    from fastcssl.distributed.world import World

    data = Prepared.open(folder)
    for backend in ("native", "resident"):
        views = with_size(policy("pnr-simclr-cifar"), 8)
        config = LoaderConfig(policy=views, batch_size=4, num_threads=1, loader=backend)
        with Loader(data, config, World()) as loader:
            for task in range(min(3, len(data.manifest.tasks))):
                stream = loader.open(Selection(tasks=(task,)))
                next(iter(stream.epoch(0)))
    return 0


_READERS: dict[str, Callable[[Path], int]] = {"inspect": _inspect, "verify": _verify, "training": _train}


def _finds_other_samples(folder: Path, original: str) -> bool:
    """Returns whether the manifest as it is read differs in what leads to samples: files, shards and ids."""
    from dataprep.manifest import load_manifest

    def essence(content: dict[str, Any]) -> Any:
        tasks = [{split: task[split] for split in ("train", "val")} for task in content["tasks"]]
        return [tasks, content["shards"], content["samples"], content["keys"], content["formats"]]

    read = asdict(load_manifest(folder, check_sizes=False))
    return json.dumps(essence(read)) != json.dumps(essence(json.loads(original)))


def _difference(original: str, text: bytes) -> str:
    """Returns where the manifests begin to differ, for the report."""
    try:
        ours, theirs = json.loads(original), json.loads(text)
    except (ValueError, RecursionError):
        return f"the text begins {text[:40]!r} and has {len(text)} bytes"
    path: list[str] = []
    while True:
        if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
            keys: list[Any] = list(ours)
        elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
            keys = list(range(len(ours)))
        else:
            break
        different = [key for key in keys if json.dumps(ours[key]) != json.dumps(theirs[key])]
        if not different:
            break
        path.append(str(different[0]))
        ours, theirs = ours[different[0]], theirs[different[0]]
    return f"{'.'.join(path) or 'the whole'} is {theirs!r:.100}"


EXPERIMENT = Manifests()
