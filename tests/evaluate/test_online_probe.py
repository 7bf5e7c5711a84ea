"""Features of prepared data, the clean probe that changes nothing, and the references' probe that leaks on purpose."""

import io
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import prep_ok
from processes import run
from torch import Tensor, nn

from fastcssl.config.probe_plan import ProbePlan
from fastcssl.data.loader import Loader, LoaderConfig, Stream
from fastcssl.data.policies import policy
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.data.views import with_size
from fastcssl.distributed.world import World
from fastcssl.errors import UserError
from fastcssl.evaluate.features import Features, features, top1
from fastcssl.evaluate.online_probe import ParityProbe, ProbeResult, probe, stratified_ids
from fastcssl.evaluate.probes.cached import fit_linear
from fastcssl.evaluate.probes.knn import knn
from fastcssl.learn.optim import OptimConfig

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
VIEW = with_size(policy("probe-val-cifar"), 16)
VIEWS = with_size(policy("cassle-byol-cifar"), 16)
CONFIG = LoaderConfig(policy=VIEWS, batch_size=12, seed=3, num_threads=1)
SGD = OptimConfig(name="sgd", momentum=0.0, weight_decay=0.1, schedule="constant")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """20 classes in 4 tasks, 80 images to train on and 40 to validate with."""
    out = tmp_path_factory.mktemp("probe") / "out"
    source = "synthetic:size=32,classes=20,train=4,val=2"
    prep_ok("build", source, "--scenario", "class", "--tasks", 4, "--out", out, "--formats", "array")
    return Prepared.open(out)


def small_encoder(*, norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- Features


def test_features_are_of_every_sample_in_eval_mode_and_in_the_order_of_ids(data: Prepared) -> None:
    encoder = small_encoder()
    for order in ("sequential", "shuffled"):
        with Loader(data, replace(CONFIG, policy=VIEW, last="pad")) as loader:
            stream = loader.open(Selection(tasks=(0, 2), order=order))  # type: ignore[arg-type]
            assert stream.num_samples % CONFIG.batch_size  # so that there is padding to remove
            found = features(encoder, stream, device=CPU)
        rows = data.table[data.rows(Selection(tasks=(0, 2)))]
        assert found.id_N.tolist() == rows["id"].tolist() == sorted(rows["id"].tolist())
        assert found.label_N.tolist() == rows["label"].tolist()
        with Loader(data, replace(CONFIG, policy=VIEW, batch_size=len(rows))) as loader, torch.no_grad():
            whole = next(loader.open(Selection(tasks=(0, 2), order="sequential")).epoch(0))
            truth = small_encoder().eval()(whole.views[0])
        torch.testing.assert_close(found.h_NF, truth)


def test_features_refuse_a_stream_that_drops_or_never_ends(data: Prepared) -> None:
    with Loader(data, replace(CONFIG, policy=VIEW)) as loader:
        with pytest.raises(ValueError, match=r"gave 12 of its 20 samples.*last='pad'"):
            features(small_encoder(), loader.open(Selection(tasks=(0,), order="sequential")), device=CPU)
        with pytest.raises(ValueError, match="endless"):
            features(small_encoder(), loader.open(Selection(tasks=(0,), order="endless")), device=CPU)


# ---- The plan


def test_a_plan_is_read_and_written() -> None:
    assert ProbePlan.parse("off") == ProbePlan() == ProbePlan(every=0, kind="off")
    assert ProbePlan.parse("every=2") == ProbePlan(every=2, kind="clean")
    assert ProbePlan.parse("every=1, parity") == ProbePlan(every=1, kind="parity") == ProbePlan.parse("parity,every=1")
    for text in ("off", "every=0", "every=3", "every=1,parity"):
        assert str(ProbePlan.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("evry=2", r"no 'evry'\. Did you mean 'every'\?"),
        ("every=1,party", r"no 'party'\. Did you mean 'parity'\?"),
        ("", r"no ''\. Known: every, clean, parity, off"),
        ("every", "needs a number of epochs, such as every=2"),
        ("every=two", "needs a number of epochs"),
        ("every=-1", "needs a number of epochs"),
        ("every=1,off", "'off' cannot be combined. Remove it"),
        ("every=1,every=2", "gives the interval twice. Give it once"),
        ("clean,parity", "gives the kind of probe twice. Give it once"),
        ("parity=1", "'parity' takes no value"),
    ],
)
def test_a_wrong_plan_gets_a_sentence(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        ProbePlan.parse(text)
    assert str(caught.value).startswith("--online-probe") and str(caught.value).endswith(".")


def test_when_a_probe_is_due() -> None:
    def epochs(text: str) -> list[int]:
        return [epoch for epoch in range(5) if ProbePlan.parse(text).due(epoch, 5)]

    assert epochs("off") == [] and epochs("every=0") == [4] and epochs("every=2,parity") == [1, 3, 4]


def test_a_plan_asks_for_validation_images(data: Prepared) -> None:
    ProbePlan.parse("every=1").check(data)
    none = replace(data.manifest.tasks[1].val, count=0, ids="")
    tasks = [data.manifest.tasks[0], replace(data.manifest.tasks[1], val=none)]
    without = replace(data, manifest=replace(data.manifest, tasks=tasks))
    ProbePlan.parse("off").check(without)
    with pytest.raises(UserError, match=r"task 1 of .* has none\. Prepare the data"):
        ProbePlan.parse("every=1").check(without)


# ---- The clean probe


def test_the_clean_probe_only_looks(data: Prepared) -> None:
    encoder = small_encoder()
    encoder[0].weight.grad = torch.ones_like(encoder[0].weight)  # type: ignore[union-attr]
    before, flags = state_of(encoder), [m.training for m in encoder.modules()]
    rng = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]
    result = probe(encoder, data, CONFIG, view=VIEW)
    assert same(state_of(encoder), before) and [m.training for m in encoder.modules()] == flags
    assert torch.equal(torch.get_rng_state(), rng[0]) and random.getstate() == rng[1]
    assert np.array_equal(np.random.get_state()[1], rng[2])  # type: ignore[index]
    assert encoder[0].weight.grad.eq(1).all() and encoder[0].bias.grad is None  # type: ignore[union-attr]

    assert (result.kind, result.num_train, result.num_train_all, result.num_val) == ("clean", 80, 80, 40)
    assert result.num_not_finite == 0 and result.seconds > 0
    assert [task.task for task in result.per_task] == [0, 1, 2, 3]
    for kind in ("knn_top1", "linear_top1"):
        mean = sum(getattr(task, kind) * task.num_val for task in result.per_task) / 40
        assert getattr(result, kind) == pytest.approx(mean)
    assert replace(probe(encoder, data, CONFIG, view=VIEW), seconds=0) == replace(result, seconds=0)


def test_a_probe_of_some_tasks_is_made_from_them_alone(data: Prepared) -> None:
    encoder = small_encoder()
    result = probe(encoder, data, CONFIG, view=VIEW, tasks=(1, 3), k=5, metric="euclidean")
    with Loader(data, replace(CONFIG, policy=VIEW, last="pad")) as loader:
        train, val = (
            features(encoder, loader.open(Selection(tasks=(1, 3), split=s, order="sequential")), device=CPU)  # type: ignore[arg-type]
            for s in ("train", "val")
        )
    near = knn(train, val, num_classes=20, k=5, metric="euclidean")
    assert (result.knn_top1, result.knn_top5) == (near.top1, near.top5)
    assert result.linear_top1 == top1(fit_linear(train).predict(val), val)
    last = torch.from_numpy(np.isin(val.id_N.numpy(), list(data.manifest.tasks[3].val.iter_ids())))
    assert result.per_task[1].task == 3 and result.per_task[1].num_val == 10
    assert result.per_task[1].knn_top1 == top1(near.predictions[last], val[last])


def test_a_large_training_set_is_sampled_by_class(data: Prepared) -> None:
    tasks = (0, 1, 2, 3)
    label_of = dict(zip(data.table["id"].tolist(), data.table["label"].tolist(), strict=True))
    forty, fifty = (stratified_ids(data, tasks, count, 0) for count in (40, 50))
    assert np.bincount([label_of[i] for i in forty.tolist()]).tolist() == [2] * 20
    assert set(forty.tolist()) < set(fifty.tolist()) and len(fifty) == 50 and np.all(np.diff(fifty) > 0)
    assert sorted(np.bincount([label_of[i] for i in fifty.tolist()])) == [2] * 10 + [3] * 10
    assert set(stratified_ids(data, tasks, 40, 1).tolist()) != set(forty.tolist())
    result = probe(small_encoder(), data, CONFIG, view=VIEW, max_train=40)
    assert (result.num_train, result.num_train_all) == (40, 80)


# ---- The references' probe


def parity(data: Prepared, **changes: Any) -> ParityProbe:
    settings: dict[str, Any] = {"view": VIEW, "optim": SGD, **changes}
    return ParityProbe(32, 20, data, settings.pop("config", CONFIG), **settings)


def test_the_parity_probe_leaks_into_the_statistics_and_nowhere_else(data: Prepared) -> None:
    encoder = small_encoder()
    encoder.eval()  # whatever the loop left it in, the forward is in train mode
    encoder[0].weight.grad = torch.ones_like(encoder[0].weight)  # type: ignore[union-attr]
    before = state_of(encoder)
    graphs: list[bool] = []
    encoder.register_forward_hook(lambda *_: graphs.append(torch.is_grad_enabled()))
    probe = parity(data)
    try:
        batch = next(iter(probe.batches(0)))
        views = batch.views[0].clone()
        loss = probe.step(encoder, batch, epoch=0, num_epochs=1)
    finally:
        probe.close()
    after = state_of(encoder)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    with torch.no_grad():
        mean = encoder[0](views).mean(dim=(0, 2, 3))
    torch.testing.assert_close(after["1.running_mean"], 0.1 * mean, rtol=1e-4, atol=1e-6)
    assert encoder[0].weight.grad.eq(1).all() and encoder[0].bias.grad is None  # type: ignore[union-attr]
    assert not any(m.training for m in encoder.modules()) and not loss.requires_grad
    assert graphs == [False]  # nor is memory spent on one


def test_parity_batches_are_labelled_images_of_all_tasks_as_the_last_view(data: Prepared) -> None:
    config = replace(CONFIG, policy=VIEWS[:1] + with_size(VIEWS[1:], 20))
    probe = parity(data, config=config)
    try:
        batches = [(b.id.clone(), b.label.clone(), b.views) for b in islice(probe.batches(0), 10)]
        again = [b.id.clone() for b in islice(probe.batches(1), 10)]
    finally:
        probe.close()
    assert all(len(views) == 1 and views[0].shape == (12, 3, 20, 20) for *_, views in batches)
    id_S = torch.cat([ids for ids, *_ in batches])
    assert set(id_S.tolist()) == set(data.table["id"][data.rows(Selection(tasks=(0, 1, 2, 3)))].tolist())
    assert len(id_S) == 120 and not torch.equal(id_S, torch.cat(again))  # past its end, in another order every epoch
    with Loader(data, CONFIG) as loader:  # and not in that of the training, whose augmentations it would repeat
        beside = next(iter(loader.open(Selection(tasks=(0, 1, 2, 3))).epoch(0)))
        assert not torch.equal(beside.id, batches[0][0])
    rows = data.table[np.searchsorted(data.table["id"], id_S.numpy())]
    assert torch.cat([label for _, label, _ in batches]).tolist() == rows["label"].tolist()


def test_the_parity_layer_steps_without_decay_by_its_own_rate(data: Prepared) -> None:
    encoder = small_encoder(norm=False)
    probe = parity(data, lr=0.3, optim=replace(SGD, schedule="cosine"))
    try:
        batch = next(iter(probe.batches(0)))
        weight, bias = (p.detach().clone().requires_grad_() for p in probe.head.parameters())
        torch.manual_seed(0)
        with torch.no_grad():
            h_NF = encoder(batch.views[0])
        F.cross_entropy(h_NF @ weight.T + bias, batch.label).backward()  # type: ignore[no-untyped-call]
        torch.manual_seed(0)
        probe.step(encoder, batch, epoch=5, num_epochs=10)
    finally:
        probe.close()
    assert weight.grad is not None and bias.grad is not None
    torch.testing.assert_close(probe.head.weight.detach(), (weight - 0.15 * weight.grad).detach())
    torch.testing.assert_close(probe.head.bias.detach(), (bias - 0.15 * bias.grad).detach())


def test_the_parity_layer_learns_is_carried_over_and_validated(data: Prepared) -> None:
    optim = OptimConfig(name="lars", eta=0.1, clip=True, schedule="cosine")
    encoder, probe = small_encoder(), parity(data, optim=optim, lr=0.5)
    encoder[3] = nn.Identity()
    try:
        batch = next(iter(probe.batches(0)))
        losses = [probe.step(encoder, batch, epoch=0, num_epochs=10).item() for _ in range(30)]
        assert losses[-1] < losses[0] - 1
        before = state_of(probe.head)
        assert probe.state_dict()["optimizer"]["state"]
        probe.begin_task()
        assert same(state_of(probe.head), before) and not probe.state_dict()["optimizer"]["state"]
        rng, encoder_before = torch.get_rng_state(), state_of(encoder)
        result = probe.validate(encoder)
        assert torch.equal(torch.get_rng_state(), rng) and same(state_of(encoder), encoder_before)
    finally:
        probe.close()
    with Loader(data, replace(CONFIG, policy=VIEW, last="pad")) as loader:
        stream: Stream = loader.open(Selection(tasks=(0, 1, 2, 3), split="val", order="sequential"))
        val = features(encoder, stream, device=CPU)
    predicted = (val.h_NF @ before["weight"].T + before["bias"]).argmax(dim=1)
    assert result.linear_top1 == top1(predicted, val)
    assert (result.kind, result.knn_top1, result.num_val, result.num_train) == ("parity", None, 40, 80)
    assert sum(t.linear_top1 * t.num_val for t in result.per_task) / 40 == pytest.approx(result.linear_top1)


def test_the_parity_probe_goes_on_in_the_middle_of_an_epoch(data: Prepared) -> None:
    optim = OptimConfig(warmup_epochs=2)
    encoder = small_encoder(norm=False).eval()  # its dropout is in train mode all the same; seeded below

    def steps(probe: ParityProbe, epoch: int, numbers: range) -> None:
        for number, batch in zip(numbers, probe.batches(epoch), strict=False):
            torch.manual_seed(number)
            probe.step(encoder, batch, epoch=epoch, num_epochs=4)

    whole, first, second = (parity(data, optim=optim) for _ in range(3))
    try:
        steps(whole, 0, range(5))
        steps(whole, 1, range(5))
        steps(first, 0, range(5))
        steps(first, 1, range(2))
        saved = io.BytesIO()
        torch.save(first.state_dict(), saved)
        saved.seek(0)
        second.load_state_dict(torch.load(saved, weights_only=True))
        steps(second, 1, range(2, 5))
        assert same(state_of(second.head), state_of(whole.head))
        assert not same(state_of(second.head), state_of(first.head))
    finally:
        for probe in (whole, first, second):
            probe.close()


# ---- Ranks


def on_a_rank(world: World, folder: Path) -> tuple[Features, ProbeResult, dict[str, Tensor], ProbeResult]:
    torch.set_num_threads(1)
    data, encoder = Prepared.open(folder), small_encoder(norm=False)
    encoder[3] = nn.Identity()  # dropout would differ between one process and two
    with Loader(data, replace(CONFIG, policy=VIEW, last="pad"), world) as loader:
        stream = loader.open(Selection(tasks=(0, 1, 2, 3), split="val", order="sequential"))
        found = features(encoder, stream, device=CPU, world=world)
    clean = probe(encoder, data, CONFIG, view=VIEW, world=world, max_train=70)
    # Local scope: the probe spans the ranks all the same.
    leaky = ParityProbe(32, 20, data, CONFIG, view=VIEW, optim=SGD, world=World(world.rank, world.size, "local"))
    for batch in islice(leaky.batches(0), 4):
        leaky.step(encoder, batch, epoch=0, num_epochs=1)
    validated = leaky.validate(encoder)
    leaky.close()
    return found, replace(clean, seconds=0), state_of(leaky.head), replace(validated, seconds=0)


def test_two_ranks_find_what_one_finds(data: Prepared) -> None:
    found, clean, head, validated = on_a_rank(World(), data.folder)
    ranks = run(2, on_a_rank, data.folder, timeout_s=300)
    for found_r, clean_r, head_r, validated_r in ranks:
        assert torch.equal(found_r.id_N, found.id_N) and torch.equal(found_r.label_N, found.label_N)
        torch.testing.assert_close(found_r.h_NF, found.h_NF)
        assert clean_r == clean and validated_r == validated
        for name in head:
            torch.testing.assert_close(head_r[name], head[name])
    assert same(ranks[0][2], ranks[1][2])
