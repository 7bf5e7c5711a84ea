"""Makes one pass over the data, for one data set, scope, set of views and probe, with all encoders that need it.

The encoders are the checkpoints of all runs, the single-task references, and untrained encoders for forward transfer.
Results that a file already holds are not computed again. A long pass saves its state, and continues from it after an
interruption.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fastcssl
from dataprep.manifest import sha256_of
from fastcssl.data.prepared import Prepared
from fastcssl.errors import UserError
from fastcssl.evaluate import scopes
from fastcssl.evaluate.options import Evaluated, EvaluationInterrupted, ProbeMachine, Progress, Request
from fastcssl.evaluate.probes import CHUNK, Bench, Hits, ProbedEncoder, ProbeViews, cached, knn, linear
from fastcssl.evaluate.targets import Target, matched
from fastcssl.learn.precision import amp_dtype
from fastcssl.runs import results
from fastcssl.runs.checkpoint import Checkpoints, latest, load
from fastcssl.runs.git import commit
from fastcssl.runs.interrupt import Stop
from fastcssl.runs.layout import RunFolder
from fastcssl.runs.metrics import learnt_in_order
from fastcssl.runs.ownership import UNLOCKED
from fastcssl.runs.results import EvaluatedData, Evaluation, MadeBy, Probe, References

_UNDERWAY = ".underway"


@dataclass(slots=True, eq=False)
class _ProbeSlot:
    """A table to be filled: one target under one setting."""

    target: Target
    settings: Any
    noted: dict[str, Any]
    path: Path
    known: Evaluation | None  # from an earlier evaluation
    rows: dict[str, tuple[list[float], list[float], float, float]] = field(default_factory=dict)  # by sha256
    random: list[float] | None = None


class SideBySide:
    """Probes several encoders in one pass, and saves one result file per target and setting."""

    def __init__(
        self,
        *,
        data: Prepared,
        manifest: Path,
        plan: scopes.Plan,
        views: ProbeViews,
        probe: Probe,
        batch_size: int,
        targets: Sequence[Target],
        request: Request,
        machine: ProbeMachine,
        progress: Progress,
    ) -> None:
        self._data, self._manifest, self._plan, self._views, self._probe = data, manifest, plan, views, probe
        self._batch_size, self._request, self._machine, self._progress = batch_size, request, machine, progress
        self._sha256 = sha256_of(manifest)
        self._amp_dtype = amp_dtype(machine.precision, machine.device)
        self._num_val = [len(column.val_ids) for column in plan.columns]
        self._slots = [slot for target in targets for slot in self._slots_of(target)]

    # ---- Planning ----------------------------------------------------------------------------------------------------

    def _slots_of(self, target: Target) -> list[_ProbeSlot]:
        found = []
        for settings in self._settings(target):
            noted = asdict(settings) | self._circumstances()
            name = results.result_name(self._probe, self._plan.scope, noted, self._sha256)
            path = RunFolder(target.folder).evaluations / f"{name}.json"
            known = results.load_evaluation(path) if path.is_file() else None
            slot = _ProbeSlot(target, settings, noted, path, known)
            if known is not None and not self._request.again:
                for row, encoder in enumerate(known.checkpoints):
                    slot.rows[encoder.sha256] = (
                        known.top1[row],
                        known.top5[row],
                        known.overall_top1[row],
                        known.overall_top5[row],
                    )
                slot.random = known.reference.random
            found.append(slot)
        return found

    def _settings(self, target: Target) -> list[Any]:
        request = self._request
        if self._probe == "knn":
            return [knn.KnnSettings(k=request.k, metric=metric) for metric in request.metrics]
        if self._probe == "linear-cached":
            return [cached.CachedSettings(strength=strength) for strength in request.strengths]
        usual = linear.LEARNING_RATES.get(target.method, linear.OTHER_LEARNING_RATE)
        return [
            linear.LinearSettings(lr=lr, batch_size=size, momentum=momentum, epochs=request.epochs, seed=request.seed)
            for lr in request.lrs or (usual,)
            for size in request.batch_sizes or (self._batch_size,)
            for momentum in request.momenta
        ]

    def _circumstances(self) -> dict[str, Any]:
        """Returns the facts besides the settings that affect the numbers."""
        view = self._views.val[0]
        noted: dict[str, Any] = {
            "size_px": view.size_px,
            "val_crop": view.crop,
            "mean": list(view.mean),
            "std": list(view.std),
            "precision": str(self._amp_dtype or torch.float32).removeprefix("torch."),
        }
        if self._probe == "linear":
            noted["train_crop"] = "random resized, flip"
            noted["drops"] = list(linear.LinearSettings(lr=1, epochs=self._request.epochs).drops)
        if self._plan.scope in scopes.SHARES:
            noted |= {"share": scopes.SHARES[self._plan.scope], "subset_seed": scopes.SUBSET_SEED}
        return noted

    def _needs(self) -> list[tuple[str, Callable[[], nn.Module], list[_ProbeSlot]]]:
        """Returns the encoders to probe: a key that identifies each, how to build it, and the slots that need it."""
        found: dict[str, tuple[Callable[[], nn.Module], list[_ProbeSlot]]] = {}
        for slot in self._slots:
            for checkpoint in slot.target.checkpoints:
                if checkpoint.noted.sha256 not in slot.rows:
                    found.setdefault(checkpoint.noted.sha256, (checkpoint.load, []))[1].append(slot)
            if self._wants_random(slot) and slot.random is None:
                key = f"random {slot.target.encoder} {slot.target.seed} {slot.target.style.size_px}"
                found.setdefault(key, (slot.target.random_encoder, []))[1].append(slot)
        return [(key, build, slots) for key, (build, slots) in found.items()]

    def _wants_random(self, slot: _ProbeSlot) -> bool:
        """Returns whether a random encoder would allow more metrics to be computed."""
        return (
            self._request.random_encoder
            and slot.target.only_task is None
            and learnt_in_order(self._seen(slot.target), len(self._plan.columns))
            and len(self._plan.columns) > 1
        )

    def _seen(self, target: Target) -> list[list[int]]:
        """Returns the columns that each checkpoint has learnt."""
        same = self._plan.follows_tasks and target.manifest_sha256 == self._sha256
        return [checkpoint.noted.seen if same else [] for checkpoint in target.checkpoints]

    # ---- Computing ---------------------------------------------------------------------------------------------------

    def run(self, stop: Stop) -> list[Evaluated]:
        """Computes what is missing, saves the result files and returns the outcomes, in the order of the targets."""
        began = time.perf_counter()
        needs = self._needs()
        if needs:
            self._compute(needs, stop)
        return self._outcomes(bool(needs), time.perf_counter() - began)

    def _compute(self, needs: Sequence[tuple[str, Callable[[], nn.Module], list[_ProbeSlot]]], stop: Stop) -> None:
        machine = self._machine
        distinct = [list(dict.fromkeys(slot.settings for slot in slots)) for _, _, slots in needs]
        contenders: list[ProbedEncoder[Any]] = []
        for (_, build, _), settings in zip(needs, distinct, strict=True):
            encoder = build().to(memory_format=torch.channels_last).to(machine.device)
            self._check_size(encoder)
            contenders.append(ProbedEncoder(encoder=encoder, settings=tuple(settings)))
        identity = [
            [key, [asdict(item) for item in settings]] for (key, _, _), settings in zip(needs, distinct, strict=True)
        ]
        folder = self._underway([*identity, self._probe, self._plan.scope, self._sha256, self._circumstances()])
        bench = Bench(
            data=self._data,
            plan=self._plan,
            views=self._views,
            device=machine.device,
            world=machine.world,
            amp_dtype=self._amp_dtype,
            loader=machine.loader,
            num_threads=machine.num_threads,
            seed=self._request.seed,
            spill=folder,
            on_images=self._progress.advance,
        )
        size = len(contenders)
        title = f"{self._probe} · {self._plan.scope} · {size} encoder{'s' if size > 1 else ''}"
        if (count := sum(len(item) for item in distinct)) > size:
            title += f", {count} classifiers"
        found = self._probed(contenders, bench, folder, title, stop)
        for text in dict.fromkeys(bench.notes):
            self._progress.note(text)
        for (key, _, slots), settings, by_setting in zip(needs, distinct, found, strict=True):
            for slot in slots:
                self._fill(slot, key, by_setting[settings.index(slot.settings)])
        machine.world.barrier()
        if machine.world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # another pass may be using the folder
                folder.parent.rmdir()

    def _probed(
        self, contenders: list[ProbedEncoder[Any]], bench: Bench, folder: Path, title: str, stop: Stop
    ) -> list[list[Hits]]:
        num_val, num_train = bench.num_images("val"), bench.num_images("train")
        if self._probe != "linear":
            self._progress.begin(title, num_val + num_train)
            bench.on_images = self._stopping(stop)
            return knn.run(contenders, bench) if self._probe == "knn" else cached.run(contenders, bench)
        guard = _Guard(folder, self._machine, stop, self._request.epochs)
        state = guard.state()
        done = state["epoch"] * num_train + min(state["batch"] * CHUNK, num_train) if state else 0
        self._progress.begin(title, self._request.epochs * num_train + num_val, done)
        if state:
            self._progress.note(f"Continuing in epoch {state['epoch'] + 1} of {self._request.epochs}.")
        return linear.run(contenders, bench, state=state, after_batch=guard.after_batch)

    def _stopping(self, stop: Stop) -> Callable[[int], None]:
        def advance(num_images: int) -> None:
            self._progress.advance(num_images)
            if signal := self._machine.world.agree(stop.requested):
                raise EvaluationInterrupted(signal)

        return advance

    def _underway(self, identity: list[Any]) -> Path:
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        folder = RunFolder(self._slots[0].target.folder).evaluations / _UNDERWAY / digest
        with UNLOCKED.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _check_size(self, encoder: nn.Module) -> None:
        """Raises UserError if the encoder only takes images of another size."""
        only: int | None = encoder.size_px  # type: ignore[assignment]  # which `build_encoder` sets
        size_px = self._views.val[0].size_px
        if only not in (None, size_px):
            raise UserError(f"The encoder only takes images of {only} px, not of {size_px} px. Use --size-px {only}.")

    def _fill(self, slot: _ProbeSlot, key: str, hits: Hits) -> None:
        top1, top5 = ([n / m for n, m in zip(row, self._num_val, strict=True)] for row in (hits.top1, hits.top5))
        if key.startswith("random "):
            slot.random = top1
        else:
            total = sum(self._num_val)
            slot.rows[key] = (top1, top5, sum(hits.top1) / total, sum(hits.top5) / total)

    # ---- Results -----------------------------------------------------------------------------------------------------

    def _outcomes(self, computed: bool, seconds: float) -> list[Evaluated]:
        found = []
        for slot in self._slots:
            made = self._evaluation(slot, seconds if computed else 0.0)
            was_there = slot.known is not None and replace(made, made_by=slot.known.made_by) == slot.known
            if not was_there and self._machine.world.rank == 0:
                path = made.save(slot.target.folder)
                assert path == slot.path
            kept = slot.known if was_there and slot.known else made
            found.append(Evaluated(target=slot.target, path=slot.path, evaluation=kept, was_there=was_there))
        return found

    def _evaluation(self, slot: _ProbeSlot, seconds: float) -> Evaluation:
        manifest, target = self._data.manifest, slot.target
        rows = [slot.rows[checkpoint.noted.sha256] for checkpoint in target.checkpoints]
        top1, seen = [row[0] for row in rows], self._seen(target)
        reference = References(ft=self._ft(slot), random=slot.random)
        both = zip(target.checkpoints, seen, strict=True)
        noted = [replace(checkpoint.noted, seen=tasks) for checkpoint, tasks in both]
        known = slot.known if not self._request.again else None
        return Evaluation(
            format=results.FORMAT,
            probe=self._probe,
            scope=self._plan.scope,
            settings=slot.noted,
            manifest=EvaluatedData(
                path=str(self._manifest),
                sha256=self._sha256,
                source=manifest.source.kind,
                scenario=manifest.scenario.kind,
                num_tasks=len(manifest.tasks),
                task_names=[task.name for task in manifest.tasks],
            ),
            columns=[column.name for column in self._plan.columns],
            checkpoints=noted,
            top1=top1,
            top5=[row[1] for row in rows],
            overall_top1=[row[2] for row in rows],
            overall_top5=[row[3] for row in rows],
            num_val=self._num_val,
            reference=reference,
            metrics=results.metrics_of(top1, seen, reference),
            seconds=seconds + (known.seconds if known else 0.0),
            made_by=MadeBy(command=self._machine.command, version=fastcssl.__version__, commit=commit()),
        )

    def _ft(self, slot: _ProbeSlot) -> list[float | None] | None:
        """Returns FT_i from the references' tables under the same settings, and values from earlier evaluations."""
        before = slot.known.reference.ft if slot.known is not None and not self._request.again else None
        found: list[float | None] = list(before) if before else [None] * len(self._plan.columns)
        tables = [other for other in self._slots if other.noted == slot.noted]
        for task, index in matched(slot.target, [other.target for other in tables], self._sha256).items():
            other = tables[index]
            found[task] = other.rows[other.target.checkpoints[0].noted.sha256][0][task]
        return found if any(value is not None for value in found) and self._plan.follows_tasks else None


class _Guard:
    """Saves the state of a long probe every few minutes, and when a signal asks it to stop."""

    def __init__(self, folder: Path, machine: ProbeMachine, stop: Stop, epochs: int) -> None:
        self._folder, self._machine, self._stop, self._epochs = folder, machine, stop, epochs
        self._last = time.monotonic()
        self._step = 0

    def state(self) -> dict[str, Any] | None:
        world = self._machine.world
        found = latest(self._folder) if world.rank == 0 else None
        name = world.share(found.path.name if found else "")
        if not name:
            return None
        state = found.state if found else load(self._folder / name)
        self._step = state["step"]
        return state

    def after_batch(self, training: linear.Training) -> None:
        world, self._step = self._machine.world, self._step + 1
        done = training.epoch == self._epochs
        due = world.rank == 0 and (done or time.monotonic() - self._last > 60 * self._machine.checkpoint_minutes)
        signal = world.agree(self._stop.requested)
        if world.agree(int(due)) or signal:
            if world.rank == 0:
                checkpoints = Checkpoints(self._folder, keep=1)
                checkpoints.save(self._step, training.state() | {"step": self._step}, wait=True)
            self._last = time.monotonic()
        if signal:
            raise EvaluationInterrupted(signal)
