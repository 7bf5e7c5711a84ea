"""Plans an evaluation: the data sets, the encoders that share a pass, and the checks made before decoding any image."""

from collections.abc import Sequence
from pathlib import Path

from dataprep.manifest import manifest_path, sha256_of
from fastcssl.data.prepared import Prepared
from fastcssl.errors import UserError
from fastcssl.evaluate import downstream, scopes
from fastcssl.evaluate.options import Evaluated, ProbeMachine, Progress, Request
from fastcssl.evaluate.probe_pass import SideBySide
from fastcssl.evaluate.probes import ProbeViews
from fastcssl.evaluate.targets import Target, unmatched
from fastcssl.runs.interrupt import Stop
from fastcssl.runs.results import DOWNSTREAM, Probe

_CIFAR_BATCH, _BATCH = 128, 256  # batch sizes of the linear probe: paper, table 16


def evaluate(
    targets: Sequence[Target],
    request: Request,
    machine: ProbeMachine | None = None,
    *,
    references: Sequence[Target] = (),
    progress: Progress | None = None,
) -> list[Evaluated]:
    """Probes the targets and returns the outcomes in their order. All ranks must call this; rank 0 writes the files."""
    machine, progress = machine or ProbeMachine(), progress or Progress()
    folders = {target.folder.resolve() for target in targets}
    others = [target for target in references if target.folder.resolve() not in folders]
    for strange in unmatched(targets, others):
        progress.note(f"{strange.folder} is not a reference for these runs: its data, method or encoder differs.")
        others.remove(strange)
    found: list[Evaluated] = []
    with Stop() as stop:
        for where, name in _data_sets(targets, request):
            data = Prepared.open(where)
            everyone = [*targets] if name else [*targets, *others]  # a downstream set has no references
            for views, batch_size, members in _by_views(everyone, data, where, name, request):
                plans = [scopes.plan(data, scope) for scope in ((f"{DOWNSTREAM}{name}",) if name else request.scopes)]
                for probes in _sharing(request.probes):
                    shared = SideBySide(
                        data=data,
                        manifest=where,
                        plans=plans,
                        views=views,
                        probes=probes,
                        batch_size=batch_size,
                        targets=members,
                        request=request,
                        machine=machine,
                        progress=progress,
                    )
                    found += [item for item in shared.run(stop) if item.target in targets]
    return sorted(found, key=lambda outcome: targets.index(outcome.target))


def _sharing(probes: Sequence[Probe]) -> list[list[Probe]]:
    """Returns the probes in groups that see the same images. The quick ones come first."""
    plain, random = ([probe for probe in probes if (probe == "linear") == crops] for crops in (False, True))
    return [group for group in (plain, random) if group]


def _data_sets(targets: Sequence[Target], request: Request) -> list[tuple[Path, str]]:
    """Returns the manifests, each with a name if it is downstream. Those of the targets come first, each once."""
    found: dict[Path, str] = {}
    for target in targets if request.scopes else ():
        where = request.data or target.data
        if where is None:
            raise UserError(
                f"{target.folder}: an encoder file does not name its data. Give --data DIR, a prepared folder."
            )
        if not where.exists() and request.data is None:
            raise UserError(
                f"{target.folder} was trained on {where}, which no longer exists. Give its new place with --data."
            )
        found.setdefault(manifest_path(where).resolve(), "")
    return [*found.items(), *((manifest_path(path).resolve(), name) for name, path in request.downstream)]


def _by_views(
    targets: Sequence[Target], data: Prepared, where: Path, name: str, request: Request
) -> list[tuple[ProbeViews, int, list[Target]]]:
    """Returns groups (views, batch size, targets) of targets that see this data set the same way and share a pass."""
    sha256 = sha256_of(where)
    groups: dict[tuple[ProbeViews, int], list[Target]] = {}
    for target in targets:
        if name:
            recipe = downstream.recipe_of(name, data.manifest.source.kind, where)
            views = target.style.views(size_px=request.size_px or recipe.size_px, crop=recipe.crop)
            batch_size = recipe.batch_size
        else:
            own = target.data
            if request.data is None and own is not None and manifest_path(own).resolve() != where:
                continue
            _check_classes(target, data, where, sha256)
            views = target.style.views(size_px=request.size_px)
            batch_size = _CIFAR_BATCH if target.style.family == "cifar" else _BATCH
        groups.setdefault((views, batch_size), []).append(target)
    return [(views, batch_size, members) for (views, batch_size), members in groups.items()]


def _check_classes(target: Target, data: Prepared, where: Path, sha256: str) -> None:
    """Raises UserError unless the data has the classes that the run was trained on.

    Another split of the same classes is accepted. Other classes are not, nor is a run's own data if it has changed.
    """
    if not target.is_run or sha256 == target.manifest_sha256:
        return
    own = target.data
    if own is not None and own.exists() and manifest_path(own).resolve() != where:
        classes = Prepared.open(own).manifest.classes
        if classes == data.manifest.classes:
            return
        raise UserError(
            f"{where} has other classes ({len(data.manifest.classes)}, such as {data.manifest.classes[0]!r}) than "
            f"{target.folder} was trained on ({len(classes)}, such as {classes[0]!r}). To evaluate on another data "
            "set, use --downstream NAME=DIR."
        )
    raise UserError(
        f"{where} is not the data that {target.folder} was trained on: its manifest has changed. Restore it, or "
        "evaluate on it as --downstream NAME=DIR."
    )
