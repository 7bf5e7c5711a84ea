"""Injects the faults of all experiments until the time is over, and writes one JSON line for each of them."""

import importlib
import json
import multiprocessing
import pkgutil
import re
import shutil
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from chaos.experiment import Experiment, Fault, Outcome
from chaos.progress import Progress
from chaos.records import Record, facts_of_this_machine, read_records, write_facts

_SPAWN = multiprocessing.get_context("spawn")  # a worker must not inherit the progress bar's thread
_UNPREPARED = "the experiment could not be prepared"


@dataclass(frozen=True)
class Campaign:
    """What to inject, for how long, and where the results go."""

    out: Path
    minutes: float
    seed: int
    is_quick: bool = False
    only: str | None = None
    num_workers: int = 2
    package: str = "chaos.experiments"


@dataclass(frozen=True)
class Found:
    """An experiment of the folder `experiments`, and why it cannot run here if it cannot."""

    name: str
    experiment: Experiment
    needs_machine: bool
    missing: str | None


def discover(package: str = "chaos.experiments", only: str | None = None) -> list[Found]:
    """Return the experiments of a package, or only one of them, sorted by their names."""
    names = sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__))
    found = []
    for name in names if only is None else [name for name in names if name == only]:
        loaded = importlib.import_module(f"{package}.{name}")
        experiment: Experiment = loaded.EXPERIMENT
        found.append(Found(name, experiment, bool(vars(loaded).get("ALONE", False)), experiment.missing()))
    if not found:
        raise SystemExit(f"There is no experiment {only!r}. Known: {', '.join(names)}.")
    return found


def run(campaign: Campaign) -> list[Record]:
    """Inject faults until the time is over or none is left. Return all records, with those of earlier campaigns."""
    campaign.out.mkdir(parents=True, exist_ok=True)
    found = discover(campaign.package, campaign.only)
    able = [one for one in found if one.missing is None]
    skipped = {one.name: one.missing for one in found if one.missing is not None}
    write_facts(campaign.out, campaign.seed, skipped, facts_of_this_machine())
    alone, shared = ([one.name for one in able if one.needs_machine is needs] for needs in (True, False))
    seconds = 60 * campaign.minutes
    with Progress(campaign.out, seconds, skipped) as progress:
        began = time.monotonic()
        if alone:
            _phase(campaign, alone, seconds * len(alone) / len(able), 1, progress)
        if shared:
            _phase(campaign, shared, seconds - (time.monotonic() - began), campaign.num_workers, progress)
    shutil.rmtree(campaign.out / "scratch", ignore_errors=True)
    return read_records(campaign.out)


def _phase(campaign: Campaign, names: list[str], seconds: float, num_workers: int, progress: Progress) -> None:
    """Let some workers inject the faults of some experiments. Write what they report."""
    done = {(record.experiment, record.name) for record in read_records(campaign.out)}
    pipes: list[Connection] = []
    workers = []
    for number in range(num_workers):
        ours, theirs = _SPAWN.Pipe(duplex=False)
        job = Job(campaign, tuple(names), time.time() + seconds, number, num_workers, frozenset(done))
        worker = _SPAWN.Process(target=_work, args=(job, theirs))
        worker.start()
        theirs.close()
        workers.append(worker)
        pipes.append(ours)
    try:
        with (campaign.out / "faults.jsonl").open("a") as lines:
            while pipes:
                for pipe in wait(pipes):
                    assert isinstance(pipe, Connection)
                    try:
                        record: Record = pipe.recv()
                    except EOFError:
                        pipes.remove(pipe)
                        continue
                    lines.write(json.dumps(asdict(record)) + "\n")
                    lines.flush()
                    progress.add(record)
    except KeyboardInterrupt:
        for worker in workers:
            worker.terminate()
        raise
    finally:
        for worker in workers:
            worker.join()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError("A worker of the campaign failed; what it printed says why.")


@dataclass(frozen=True)
class Job:
    """The share of a campaign that one worker does."""

    campaign: Campaign
    names: tuple[str, ...]
    until: float  # seconds since 1970
    number: int
    num_workers: int
    done: frozenset[tuple[str, str]]


@dataclass
class _Turn:
    """An experiment in a worker, with the faults that are left and the time that it took so far."""

    found: Found
    faults: Iterator[Fault]
    seconds: float = 0.0
    num_done: int = field(default=0)


def _work(job: Job, pipe: "Connection") -> None:
    """Inject every fault whose turn it is in this worker. The experiment that took the least time so far is next."""
    turns = []
    for found in discover(job.campaign.package, job.campaign.only):
        if found.name in job.names:
            began = time.monotonic()
            try:
                found.experiment.prepare(job.campaign.out / "references" / found.name)
            except Exception as error:
                pipe.send(_failure(found.name, Fault(_UNPREPARED, f"{_UNPREPARED} ({job.number})"), error, began))
                continue
            turns.append(_Turn(found, iter(_share(job, found))))
    while turns and time.time() < job.until:
        turn = min(turns, key=lambda one: one.seconds)
        began = time.monotonic()
        fault = next(turn.faults, None)
        if fault is None:
            turns.remove(turn)
            continue
        pipe.send(inject(turn.found, fault, job.campaign.out, f"{job.number}-{turn.num_done}"))
        turn.num_done += 1
        turn.seconds += time.monotonic() - began


def _share(job: Job, found: Found) -> Iterable[Fault]:
    """Yield the faults of an experiment that this worker injects."""
    for index, fault in enumerate(found.experiment.faults(job.campaign.seed)):
        if job.campaign.is_quick and not fault.is_quick:
            return
        if index % job.num_workers == job.number and (found.name, fault.name) not in job.done:
            yield fault


def inject(found: Found, fault: Fault, out: Path, label: str) -> Record:
    """Inject one fault in a scratch folder of its own, and return what to write about it.

    If something broke, what the commands printed is kept in `out`/broken.
    """
    scratch = (out / "scratch" / f"{found.name}-{label}").absolute()
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    began = time.monotonic()
    try:
        outcome = found.experiment.inject(fault, out / "references" / found.name, scratch)
        record = _record(found.name, fault, outcome, began)
    except Exception as error:
        record = _failure(found.name, fault, error, began)
    if not record.held and (scratch / "logs").exists():
        kept = re.sub(r"[^A-Za-z0-9]+", "-", f"{found.name}-{fault.name}").strip("-")
        shutil.copytree(scratch / "logs", out / "broken" / kept, dirs_exist_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
    return record


def _failure(name: str, fault: Fault, error: Exception, began: float) -> Record:
    """Return the record of an experiment that failed itself, which counts as broken."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    sentence = f"the experiment itself failed: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    return _record(name, fault, Outcome((sentence,), "an error of the suite"), began)


def _record(name: str, fault: Fault, outcome: Outcome, began: float) -> Record:
    return Record(
        experiment=name,
        kind=fault.kind,
        name=fault.name,
        held=outcome.held,
        injected=outcome.injected,
        broken=outcome.broken,
        seen=outcome.seen,
        seconds=round(time.monotonic() - began, 3),
    )
