"""Replay: which samples, how often, never copied; and runs that use it go on bit for bit after being stopped."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab import BATCH, batches
from small_runs import losses, prepared, run, tiny

from fastcssl.config.recipes import Recipe
from fastcssl.data.loader import Loader, LoaderConfig
from fastcssl.data.policies import policy
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.data.views import with_size
from fastcssl.distributed.world import World
from fastcssl.errors import UserError
from fastcssl.learn.methods import Inputs
from fastcssl.learn.replay import Replay, choice
from fastcssl.learn.strategies import CurrentTask, find
from fastcssl.runs import checkpoint
from fastcssl.train.build import Run
from fastcssl.train.watch import Decision, Watch


@pytest.fixture(scope="session")
def four_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 images each."""
    return prepared(tmp_path_factory.mktemp("four") / "data", tasks=4)


@pytest.fixture
def loader(four_tasks: Path) -> Any:
    views = with_size(policy("pnr-simclr-cifar"), 12)
    with Loader(Prepared.open(four_tasks), LoaderConfig(policy=views, batch_size=BATCH, seed=3, num_threads=1)) as made:
        yield made


def _task(loader: Loader, index: int) -> CurrentTask:
    return CurrentTask(index=index, tasks=(index,), earlier=tuple(range(index)), open=loader.open)


def _replay(loader: Loader, index: int, budget: int = 9) -> Replay:
    replay = Replay()
    replay.id_B = torch.from_numpy(choice(_task(loader, index), tuple(range(index)), budget, seed=3))
    replay.begin(_task(loader, index))
    return replay


def _like(count: int) -> Inputs:
    inputs = next(batches())
    return Inputs(views=tuple(view[:count] for view in inputs.views), label=inputs.label[:count], id=inputs.id[:count])


def _copied(inputs: Inputs) -> tuple[list[int], torch.Tensor]:
    return inputs.id.tolist(), torch.cat([view.flatten(1) for view in inputs.views], dim=1).clone()


def _of_tasks(loader: Loader, tasks: tuple[int, ...]) -> set[int]:
    return set(loader.open(Selection(tasks=tasks, order="endless")).ids.tolist())


def test_the_choice_is_of_earlier_tasks_within_the_budget_and_by_seed(loader: Loader) -> None:
    task = _task(loader, 3)
    chosen = {budget: choice(task, task.earlier, budget, seed=3) for budget in (7, 12, 1000)}
    for budget, ids in chosen.items():
        assert len(ids) == min(budget, 60) and len(set(ids.tolist())) == len(ids)
        assert set(ids.tolist()) <= _of_tasks(loader, (0, 1, 2))
        assert np.array_equal(ids, choice(task, task.earlier, budget, seed=3))
    assert set(chosen[7]) < set(chosen[12])
    assert not np.array_equal(chosen[12], choice(task, task.earlier, 12, seed=4))
    # What is kept of a task only shrinks as tasks are added.
    first = _of_tasks(loader, (0,))
    assert set(chosen[12].tolist()) & first <= set(choice(_task(loader, 1), (0,), 12, seed=3).tolist())
    # Every task has its share.
    shares = [len(_of_tasks(loader, (t,)) & set(choice(task, task.earlier, 30, 3).tolist())) for t in range(3)]
    assert min(shares) >= 5


def test_every_pass_has_every_sample_once_and_augments_it_anew(loader: Loader) -> None:
    replay = _replay(loader, 2)
    seen: list[tuple[int, torch.Tensor]] = []
    for _ in range(9):  # 16 passes
        ids, pixels = _copied(replay.next(_like(BATCH)))
        seen += zip(ids, pixels, strict=True)
    replay.close()
    kept = replay.id_B.tolist()
    for number in range(len(seen) // 9):
        assert sorted(i for i, _ in seen[9 * number : 9 * number + 9]) == kept
    orders = {tuple(i for i, _ in seen[9 * n : 9 * n + 9]) for n in range(16)}
    assert len(orders) > 10
    for sample in kept:
        visits = [pixels for i, pixels in seen if i == sample]
        assert len({visit.numpy().tobytes() for visit in visits}) == len(visits) == 16


def test_tasks_replay_the_same_sample_in_other_views(loader: Loader) -> None:
    drawn = []
    for index in (1, 2):
        replay = Replay()
        replay.id_B = torch.from_numpy(choice(_task(loader, 1), (0,), 1, seed=3))
        replay.begin(_task(loader, index))
        drawn.append(_copied(replay.next(_like(4))))
        replay.close()
    assert drawn[0][0] == drawn[1][0] and not torch.equal(drawn[0][1], drawn[1][1])


@pytest.mark.parametrize("counts", [(16, 16, 16), (4,) * 12, (10, 10, 28), (5, 6, 5, 16, 16)])
def test_parts_of_any_size_are_the_same_samples(loader: Loader, counts: tuple[int, ...]) -> None:
    whole, parts = _replay(loader, 2), _replay(loader, 2)
    expected = [_copied(whole.next(_like(BATCH))) for _ in range(3)]
    many = Inputs(views=(torch.zeros(28, 3, 1, 1, dtype=torch.float64),) * 2, label=torch.zeros(28), id=torch.zeros(28))
    found = [_copied(parts.next(_like(count) if count <= BATCH else many)) for count in counts]
    assert [i for ids, _ in found for i in ids] == [i for ids, _ in expected for i in ids]
    assert torch.equal(torch.cat([p for _, p in found]), torch.cat([p for _, p in expected]))
    assert whole.state_dict()["batch"] == parts.state_dict()["batch"] == 3
    whole.close()
    parts.close()


@pytest.mark.parametrize("before", [(16,), (16, 5)])
def test_a_saved_position_goes_on(loader: Loader, before: tuple[int, ...]) -> None:
    """Also in the middle of a batch."""
    replay, other = _replay(loader, 2), _replay(loader, 2, budget=3)
    for count in before:
        replay.next(_like(count))
    other.load_state_dict(replay.state_dict())
    for _ in range(3):
        (ids, pixels), (again, others) = (_copied(r.next(_like(BATCH))) for r in (replay, other))
        assert ids == again and torch.equal(pixels, others)
    replay.close()
    other.close()


# ---- Whole runs ------------------------------------------------------------------------------------------------------


def _tiny(strategy: str, method: str = "simclr", **changes: Any) -> Recipe:
    found = tiny(method, strategy, epochs=1, **changes)
    if not find(strategy).replays:
        return found
    own = dataclasses.replace(found.config.strategy, budget=12)
    return dataclasses.replace(found, config=dataclasses.replace(found.config, strategy=own))


@pytest.mark.parametrize(("method", "strategy"), [("moco", "der"), ("supcon", "lump"), ("byol", "ewc")])
def test_a_run_stopped_in_any_task_goes_on_bit_for_bit(
    tmp_path: Path, four_tasks: Path, monkeypatch: pytest.MonkeyPatch, method: str, strategy: str
) -> None:
    """Batches of 8, two a task: stopped between them, once in the second task and once in the third."""
    found = _tiny(strategy, method, batch_size=8)
    run(found, four_tasks, tmp_path / "whole")
    decide, stops = Watch.decide, {3, 5}

    def interrupt(self: Watch, step: int, terms: dict[str, torch.Tensor], *, last: bool) -> Decision:
        if step in stops:
            stops.remove(step)
            self._stop.requested = 15
        return decide(self, step, terms, last=last)

    monkeypatch.setattr(Watch, "decide", interrupt)
    for _ in range(2):
        assert run(found, four_tasks, tmp_path / "run").status == "stopped"
    assert run(found, four_tasks, tmp_path / "run").status == "finished"
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 8


@pytest.fixture(scope="session")
def finetuned(tmp_path_factory: pytest.TempPathFactory, four_tasks: Path) -> Path:
    out = tmp_path_factory.mktemp("shared") / "run"
    run(_tiny("finetune"), four_tasks, out)
    return out


@pytest.mark.parametrize("strategy", ["der", "lump", "ewc", "lessforget"])
def test_it_starts_from_another_strategys_task(
    tmp_path: Path, four_tasks: Path, finetuned: Path, strategy: str
) -> None:
    """As if it had trained the first task itself; and from a later one."""
    run(_tiny(strategy), four_tasks, tmp_path / "whole")
    run(_tiny(strategy), four_tasks, tmp_path / "branch", start_from=f"{finetuned}@0")
    assert losses(tmp_path / "branch") == losses(tmp_path / "whole")[1:]
    run(_tiny(strategy), four_tasks, tmp_path / "later", start_from=f"{finetuned}@2")
    last = losses(tmp_path / "later")
    assert [step for step, _ in last] == [4] and all(np.isfinite(v) for v in last[0][1].values())
    if strategy == "der":  # what it could not store in time, it stored when it began
        kept = checkpoint.load(tmp_path / "later/checkpoints/task-3.pt")["strategy_copies"]["replay"]
        assert len(kept["z"]) == 12 and (kept["z"].abs().sum(dim=1) > 0).all()


def test_ders_memory_keeps_what_was_stored_when_a_task_ended(
    tmp_path: Path, four_tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    der, kept = find("der"), []
    end_task = der.end_task

    def look(self: Any, task: CurrentTask, method: Any) -> None:
        end_task(self, task, method)
        kept.append({int(i): z.clone() for i, z in zip(self.replay.id_B, self.replay.z_BD, strict=True)})

    monkeypatch.setattr(der, "end_task", look)
    run(_tiny("der"), four_tasks, tmp_path / "run")
    assert [len(memory) for memory in kept] == [12] * 4
    for before, after in pairwise(kept):
        common = before.keys() & after.keys()
        assert common and len(common) < 12
        assert all(torch.equal(before[i], after[i]) for i in common)
        assert all(z.dtype == torch.float32 and z.abs().sum() > 0 for z in after.values())


def test_micro_batches_replay_their_part(tmp_path: Path, four_tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    step = Replay.next

    def count(self: Replay, like: Inputs) -> Inputs:
        asked.append(len(like.label))
        return step(self, like)

    monkeypatch.setattr(Replay, "next", count)
    run(_tiny("lump", "moco", accumulate=4), four_tasks, tmp_path / "run")
    assert asked == [4] * 4 * 3  # four parts, one step a task, three later tasks
    state = json.loads((tmp_path / "run/config.json").read_text())
    assert state["config"]["strategy"]["budget"] == 12


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("der", {"precision": "bf16"}),
        ("lump", {"precision": "fp16", "accumulate": 2}),
        ("ewc", {"precision": "bf16", "accumulate": 2}),
        ("ewc", {"precision": "fp16"}),
        ("lessforget", {"precision": "bf16"}),
    ],
)
def test_half_precision_trains(tmp_path: Path, four_tasks: Path, strategy: str, changes: dict[str, Any]) -> None:
    run(_tiny(strategy, "vicreg", **changes), four_tasks, tmp_path / "run")
    assert all(np.isfinite(value) for _, terms in losses(tmp_path / "run") for value in terms.values())


@pytest.mark.parametrize("strategy", ["der", "lump"])
def test_compiled_replay_is_the_same(tmp_path: Path, four_tasks: Path, strategy: str) -> None:
    run(_tiny(strategy, compile="eager", run={"stop_after_task": 1}), four_tasks, tmp_path / "compiled")
    run(_tiny(strategy, run={"stop_after_task": 1}), four_tasks, tmp_path / "plain")
    for (_, compiled), (_, plain) in zip(losses(tmp_path / "compiled"), losses(tmp_path / "plain"), strict=True):
        assert compiled == pytest.approx(plain, rel=1e-3, abs=1e-3)


def test_dali_cannot_replay(four_tasks: Path) -> None:
    with pytest.raises(UserError, match=r"der reads earlier samples.*--loader auto"):
        Run(_tiny("der", loader="dali").config, four_tasks, World(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("strategy", "values", "says"),
    [
        ("der", {"budget": 0}, "budget is 0"),
        ("lump", {"budget": 0}, "budget is 0"),
        ("lump", {"alpha": 0.0}, "alpha is 0"),
        ("ewc", {"fisher_batches": 0}, "fisher_batches is 0"),
    ],
)
def test_impossible_settings_are_refused(strategy: str, values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        find(strategy).Config(**values)
