"""Makes one pass over a data set with all encoders, for all scopes and all probes that see the same images.

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
from dataprep.progress import counted
from fastcssl.data.prepared import Prepared
from fastcssl.errors import UserError
from fastcssl.evaluate import scopes
from fastcssl.evaluate.long_probe import Guard
from fastcssl.evaluate.options import Evaluated, EvaluationInterrupted, ProbeMachine, Progress, Request
from fastcssl.evaluate.probes import CHUNK, Bench, Hits, ProbedEncoder, ProbeViews, cached, knn, linear, plain
from fastcssl.evaluate.targets import Target, matched
from fastcssl.learn.precision import amp_dtype
from fastcssl.runs import results
from fastcssl.runs.git import commit
from fastcssl.runs.interrupt import Stop
from fastcssl.runs.layout import RunFolder
from fastcssl.runs.ownership import UNLOCKED
from fastcssl.runs.results import EvaluatedData, Evaluation, MadeBy, Probe, References

_UNDERWAY = ".underway"


@dataclass(slots=True, eq=False)
class _ProbeSlot:
    """A table to be filled: one target under one probe, scope and setting."""

    target: Target
    probe: Probe
    plan: scopes.Plan
    settings: Any
    noted: dict[str, Any]
    path: Path
    known: Evaluation | None  # from an earlier evaluation
    rows: dict[str, tuple[list[float], list[float], float, float]] = field(default_factory=dict)  # by sha256
    random: list[float] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _EncoderToProbe:
    """An encoder to probe: a key that identifies it, how to build it, and the tables that need it."""

    key: str
    build: Callable[[], nn.Module]
    slots: list[_ProbeSlot] = field(default_factory=list)

    @property
    def settings(self) -> list[Any]:
        return list(dict.fromkeys(slot.settings for slot in self.slots))


class SideBySide:
    """Probes several encoders in one pass, and saves one result file per target, probe, scope and setting.

    The probes must see the same images: either `linear`, or any of the others.
    """

    def __init__(
        self,
        *,
        data: Prepared,
        manifest: Path,
        plans: Sequence[scopes.Plan],
        views: ProbeViews,
        probes: Sequence[Probe],
        batch_size: int,
        targets: Sequence[Target],
        request: Request,
        machine: ProbeMachine,
        progress: Progress,
    ) -> None:
        self._data, self._manifest, self._plans, self._views, self._probes = data, manifest, plans, views, probes
        self._batch_size, self._request, self._machine, self._progress = batch_size, request, machine, progress
        self._sha256 = sha256_of(manifest)
        self._amp_dtype = amp_dtype(machine.precision, machine.device)
        self._slots = [slot for target in targets for slot in self._slots_of(target)]

    # ---- Planning ----------------------------------------------------------------------------------------------------

    def _slots_of(self, target: Target) -> list[_ProbeSlot]:
        return [
            self._slot(target, probe, plan, settings)
            for plan in self._plans
            for probe in self._probes
            for settings in self._settings(target, probe)
        ]

    def _slot(self, target: Target, probe: Probe, plan: scopes.Plan, settings: Any) -> _ProbeSlot:
        noted = asdict(settings) | self._circumstances(probe, plan)
        name = results.result_name(probe, plan.scope, noted, self._sha256)
        path = RunFolder(target.folder).evaluations / f"{name}.json"
        known = results.load_evaluation(path) if path.is_file() else None
        slot = _ProbeSlot(target, probe, plan, settings, noted, path, known)
        if known is not None and not self._request.again:
            for row, encoder in enumerate(known.checkpoints):
                slot.rows[encoder.sha256] = (
                    known.top1[row],
                    known.top5[row],
                    known.overall_top1[row],
                    known.overall_top5[row],
                )
            slot.random = known.reference.random
        return slot

    def _settings(self, target: Target, probe: Probe) -> list[Any]:
        request = self._request
        if probe == "knn":
            return [knn.KnnSettings(k=request.k, metric=metric) for metric in request.metrics]
        if probe == "linear-cached":
            return [cached.CachedSettings(strength=strength) for strength in request.strengths]
        usual = linear.LEARNING_RATES.get(target.method, linear.OTHER_LEARNING_RATE)
        return [
            linear.LinearSettings(lr=lr, batch_size=size, momentum=momentum, epochs=request.epochs, seed=request.seed)
            for lr in request.lrs or (usual,)
            for size in request.batch_sizes or (self._batch_size,)
            for momentum in request.momenta
        ]

    def _circumstances(self, probe: Probe, plan: scopes.Plan) -> dict[str, Any]:
        """Returns the facts besides the settings that affect the numbers."""
        view = self._views.val[0]
        noted: dict[str, Any] = {
            "size_px": view.size_px,
            "val_crop": view.crop,
            "mean": list(view.mean),
            "std": list(view.std),
            "precision": str(self._amp_dtype or torch.float32).removeprefix("torch."),
        }
        if probe == "linear":
            noted["train_crop"] = "random resized, flip"
            noted["drops"] = list(linear.LinearSettings(lr=1, epochs=self._request.epochs).drops)
        if plan.scope in scopes.SHARES:
            noted |= {"share": scopes.SHARES[plan.scope], "subset_seed": scopes.SUBSET_SEED}
        return noted

    def _needs(self) -> list[_EncoderToProbe]:
        """Returns the encoders to probe, each once."""
        found: dict[str, _EncoderToProbe] = {}
        for slot in self._slots:
            for checkpoint in slot.target.checkpoints:
                key = checkpoint.noted.sha256
                if key not in slot.rows:
                    found.setdefault(key, _EncoderToProbe(key, checkpoint.load)).slots.append(slot)
            if self._wants_random(slot) and slot.random is None:
                key = f"random {slot.target.encoder} {slot.target.seed} {slot.target.style.size_px}"
                found.setdefault(key, _EncoderToProbe(key, slot.target.random_encoder)).slots.append(slot)
        return list(found.values())

    def _wants_random(self, slot: _ProbeSlot) -> bool:
        """Returns whether a table gets the accuracy of a random encoder. That of a reference needs none."""
        return self._request.random_encoder and slot.target.only_task is None

    def _seen(self, slot: _ProbeSlot) -> list[list[int]]:
        """Returns the columns that each checkpoint has learnt."""
        same = slot.plan.follows_tasks and slot.target.manifest_sha256 == self._sha256
        return [checkpoint.noted.seen if same else [] for checkpoint in slot.target.checkpoints]

    # ---- Computing ---------------------------------------------------------------------------------------------------

    def run(self, stop: Stop) -> list[Evaluated]:
        """Computes what is missing, saves the result files and returns the outcomes, in the order of the targets."""
        began = time.perf_counter()
        needs = self._needs()
        if needs:
            self._compute(needs, stop)
        return self._outcomes([slot for need in needs for slot in need.slots], time.perf_counter() - began)

    def _compute(self, needs: Sequence[_EncoderToProbe], stop: Stop) -> None:
        machine = self._machine
        missing = {slot.plan.scope for need in needs for slot in need.slots}
        survey = scopes.merged([plan for plan in self._plans if plan.scope in missing])
        contenders = [self._contender(need, survey) for need in needs]
        folder = self._underway(needs, survey)
        bench = Bench(
            data=self._data,
            plan=survey.plan,
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
        found = self._probed(contenders, bench, folder, self._title(needs, survey), stop)
        for text in dict.fromkeys(bench.notes):
            self._progress.note(text)
        for need, by_setting in zip(needs, found, strict=True):
            for slot in need.slots:
                self._fill(slot, need.key, by_setting[need.settings.index(slot.settings)], survey)
        machine.world.barrier()
        if machine.world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # another pass may be using the folder
                folder.parent.rmdir()

    def _contender(self, need: _EncoderToProbe, survey: scopes.Survey) -> ProbedEncoder[Any]:
        encoder = need.build().to(memory_format=torch.channels_last).to(self._machine.device)
        self._check_size(encoder)
        groups = set[int]().union(*(survey.groups_of(slot.plan.scope) for slot in need.slots))
        return ProbedEncoder(encoder=encoder, settings=tuple(need.settings), groups=frozenset(groups))

    def _title(self, needs: Sequence[_EncoderToProbe], survey: scopes.Survey) -> str:
        """Returns the heading of the progress display."""
        probes = " + ".join(probe for probe in self._probes if any(s.probe == probe for n in needs for s in n.slots))
        where = " + ".join(survey.places) if len(survey.places) < 3 else f"{len(survey.places)} scopes"
        num_settings, groups = sum(len(need.settings) for need in needs), len(survey.plan.groups)
        title = f"{probes} · {where} · {counted(len(needs), 'encoder')}"
        return title if num_settings * groups == len(needs) else f"{title}, {num_settings * groups} classifiers"

    def _probed(
        self, contenders: list[ProbedEncoder[Any]], bench: Bench, folder: Path, title: str, stop: Stop
    ) -> list[list[Hits]]:
        num_val, num_train = bench.num_images("val"), bench.num_images("train")
        if "linear" not in self._probes:
            self._progress.begin(title, num_val + num_train)
            bench.on_images = self._stopping(stop)
            return plain.run(contenders, bench)
        guard = Guard(folder, self._machine, stop, self._request.epochs)
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

    def _underway(self, needs: Sequence[_EncoderToProbe], survey: scopes.Survey) -> Path:
        """Returns the folder for the state of this pass, which the same pass finds again after an interruption."""
        slots = [[[slot.noted, slot.probe, slot.plan.scope] for slot in need.slots] for need in needs]
        identity = [[need.key for need in needs], slots, list(survey.places), self._sha256]
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

    def _fill(self, slot: _ProbeSlot, key: str, hits: Hits, survey: scopes.Survey) -> None:
        num_val = slot.plan.num_val
        mine1, mine5 = ([found[place] for place in survey.places[slot.plan.scope]] for found in (hits.top1, hits.top5))
        top1, top5 = ([n / m for n, m in zip(row, num_val, strict=True)] for row in (mine1, mine5))
        if key.startswith("random "):
            slot.random = top1
        else:
            slot.rows[key] = (top1, top5, sum(mine1) / sum(num_val), sum(mine5) / sum(num_val))

    # ---- Results -----------------------------------------------------------------------------------------------------

    def _outcomes(self, computed: Sequence[_ProbeSlot], seconds: float) -> list[Evaluated]:
        found = []
        for slot in self._slots:
            made = self._evaluation(slot, seconds if slot in computed else 0.0)
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
        top1, seen = [row[0] for row in rows], self._seen(slot)
        reference = References(ft=self._ft(slot), random=slot.random, chance=slot.plan.chance)
        both = zip(target.checkpoints, seen, strict=True)
        noted = [replace(checkpoint.noted, seen=tasks) for checkpoint, tasks in both]
        known = slot.known if not self._request.again else None
        return Evaluation(
            format=results.FORMAT,
            probe=slot.probe,
            scope=slot.plan.scope,
            settings=slot.noted,
            manifest=EvaluatedData(
                path=str(self._manifest),
                sha256=self._sha256,
                source=manifest.source.kind,
                scenario=manifest.scenario.kind,
                num_tasks=len(manifest.tasks),
                task_names=[task.name for task in manifest.tasks],
            ),
            columns=[column.name for column in slot.plan.columns],
            checkpoints=noted,
            top1=top1,
            top5=[row[1] for row in rows],
            overall_top1=[row[2] for row in rows],
            overall_top5=[row[3] for row in rows],
            num_val=slot.plan.num_val,
            reference=reference,
            metrics=results.metrics_of(top1, seen, reference),
            seconds=seconds + (known.seconds if known else 0.0),
            made_by=MadeBy(command=self._machine.command, version=fastcssl.__version__, commit=commit()),
        )

    def _ft(self, slot: _ProbeSlot) -> list[float | None] | None:
        """Returns FT_i from the references' tables under the same settings, and values from earlier evaluations."""
        before = slot.known.reference.ft if slot.known is not None and not self._request.again else None
        found: list[float | None] = list(before) if before else [None] * len(slot.plan.columns)
        alike = (slot.probe, slot.plan.scope, slot.noted)
        tables = [other for other in self._slots if (other.probe, other.plan.scope, other.noted) == alike]
        for task, index in matched(slot.target, [other.target for other in tables], self._sha256).items():
            other = tables[index]
            found[task] = other.rows[other.target.checkpoints[0].noted.sha256][0][task]
        return found if any(value is not None for value in found) and slot.plan.follows_tasks else None
