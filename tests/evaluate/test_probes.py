"""The linear probes against independent ones, and probing side by side against probing one at a time."""

import io
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import backend, prep_ok
from processes import run as on_ranks
from torch import Tensor, nn

from fastcssl.data.backends.engine import EngineBackend
from fastcssl.data.policies import policy
from fastcssl.data.prepared import Prepared
from fastcssl.data.views import with_size
from fastcssl.distributed.world import World
from fastcssl.errors import UserError
from fastcssl.evaluate import probes
from fastcssl.evaluate.features import Features, features_of
from fastcssl.evaluate.probes import Bench, Hits, ProbedEncoder, ProbeViews, cached, knn, linear, plain
from fastcssl.evaluate.probes.linear import Batches, Head, LinearSettings
from fastcssl.evaluate.scopes import merged, plan
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.learn.nets import build_encoder

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
VIEWS = ProbeViews(train=with_size(policy("probe-train-cifar"), 16), val=with_size(policy("probe-val-cifar"), 16))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """20 classes in 4 tasks, 80 images to train on and 40 to validate with."""
    out = tmp_path_factory.mktemp("probes") / "out"
    source = "synthetic:size=32,classes=20,train=4,val=2"
    prep_ok("build", source, "--scenario", "class", "--tasks", 4, "--out", out, "--formats", "array")
    return Prepared.open(out)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that 80 images are five of them."""
    monkeypatch.setattr(probes, "CHUNK", 16)


def bench(data: Prepared, scope: str = "all", **changes: Any) -> Bench:
    return Bench(data=data, plan=plan(data, scope), views=VIEWS, num_threads=1, seed=3, **changes)


def encoders(count: int) -> list[nn.Module]:
    config = EncoderConfig(name="resnet18-w8", stem="cifar")
    return [build_encoder(config, seed, 16).eval() for seed in range(count)]


def settings(**changes: Any) -> LinearSettings:
    return LinearSettings(**{"lr": 0.5, "batch_size": 12, "epochs": 3, **changes})


def weights(training: linear.Training) -> list[list[list[list[Tensor]]]]:
    return [[[head.state() for head in heads] for heads in by_setting] for by_setting in training.heads]


def clusters(num_rows: int, seed: int, spread: float = 1.5) -> Features:
    """Eight features of four classes that overlap, on unlike scales."""
    generator = torch.Generator().manual_seed(seed)
    label_N = torch.randint(4, (num_rows,), generator=generator)
    centre_CF = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    h_NF = centre_CF[label_N] + spread * torch.randn(num_rows, 8, generator=generator)
    return Features(h_NF=h_NF * torch.linspace(0.5, 2, 8), label_N=label_N, id_N=torch.arange(num_rows))


# ---- One classifier --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_head_steps_as_torch_does(momentum: float) -> None:
    rows = clusters(60, 0)
    head = Head(8, 4, settings(momentum=momentum), CPU)
    layer = nn.Linear(8, 4)
    with torch.no_grad():
        layer.weight.copy_(head.weight_CF), layer.bias.copy_(head.bias_C)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=momentum)
    for begin in range(0, 60, 12):
        h_BF, class_B = rows.h_NF[begin : begin + 12], rows.label_N[begin : begin + 12]
        optimizer.zero_grad()
        F.cross_entropy(layer(h_BF), class_B).backward()
        optimizer.step()
        head.step(h_BF, class_B, 0.5)
    torch.testing.assert_close(head.weight_CF, layer.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head.bias_C, layer.bias.detach(), rtol=1e-5, atol=1e-6)


def test_the_learning_rate_drops_at_60_and_80_of_100() -> None:
    usual = LinearSettings(lr=3.0)
    assert [usual.lr_at(epoch) for epoch in (0, 59, 60, 79, 80, 99)] == pytest.approx([3, 3, 0.3, 0.3, 0.03, 0.03])
    assert LinearSettings(lr=3.0, epochs=5).drops == (3, 4)


@pytest.mark.parametrize("change", [{"lr": 0.0}, {"lr": math.nan}, {"momentum": 1.0}, {"batch_size": 0}, {"epochs": 0}])
def test_settings_that_no_probe_can_have(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="A probe cannot have"):
        settings(**change)


def test_batches_are_cut_from_the_stream_whatever_its_pieces() -> None:
    h_NF, class_N = torch.arange(46.0).view(23, 2), torch.arange(23)
    for pieces in ([23], [1] * 23, [10, 13], [3, 0, 20]):
        batches, found = Batches(5, 2, CPU), []
        for h, c in zip(h_NF.split(pieces), class_N.split(pieces), strict=True):
            found += [(h_BF.clone(), class_B.clone()) for h_BF, class_B in batches.add(h, c)]
        assert torch.equal(torch.cat([c for _, c in found]), class_N[:20])
        assert torch.equal(torch.cat([h for h, _ in found]), h_NF[:20])
        assert torch.equal(batches.state()[1], class_N[20:])


def sklearn_fit(train: Features, strength: float | None) -> Any:
    """Standardised as ours; None: without a penalty."""
    backend("sklearn")
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = LogisticRegression(C=math.inf if strength is None else strength, max_iter=2000, tol=1e-8)
    return make_pipeline(StandardScaler(), model).fit(train.h_NF.double().numpy(), train.label_N.numpy())


def cross_entropy(weight_CF: Tensor, bias_C: Tensor, rows: Features) -> float:
    return float(F.cross_entropy(rows.h_NF @ weight_CF.T + bias_C, rows.label_N))


def test_the_cached_probe_is_scikit_learns_logistic_regression() -> None:
    train, val = clusters(400, 0), clusters(300, 5)
    for strength in (0.01, 1.0):
        theirs = sklearn_fit(train, strength)
        ours = cached.fit_linear(train, strength=strength)
        scale = theirs[0].scale_
        np.testing.assert_allclose(ours.weight_CF.numpy(), theirs[1].coef_ / scale, atol=2e-3)
        agree = (ours.predict(val).numpy() == theirs.predict(val.h_NF.double().numpy())).mean()
        assert agree > 0.99
    guess_M5 = ours.guess(val)
    assert torch.equal(guess_M5[:, 0], ours.predict(val)) and bool((guess_M5[:, 4] == -1).all())
    order = np.argsort(-theirs.predict_proba(val.h_NF.double().numpy()), axis=1)
    assert (guess_M5[:, :4].numpy() == order).mean() > 0.98


def test_sgd_comes_to_scikit_learns_optimum_on_the_same_features() -> None:
    train, val = clusters(512, 0), clusters(400, 5)
    theirs = sklearn_fit(train, None)
    probabilities = theirs.predict_proba(train.h_NF.double().numpy())
    optimum = float(-np.log(probabilities[np.arange(512), train.label_N.numpy()]).mean())
    usual = LinearSettings(lr=0.3, batch_size=128, epochs=100)
    head, generator = Head(8, 4, usual, CPU), torch.Generator().manual_seed(0)
    for epoch in range(usual.epochs):
        for rows_B in torch.randperm(512, generator=generator).split(128):
            head.step(train.h_NF[rows_B], train.label_N[rows_B], usual.lr_at(epoch))
    assert optimum <= cross_entropy(head.weight_CF, head.bias_C, train) < optimum + 2e-3
    guess_M = cached.guesses(head.weight_CF, head.bias_C, torch.arange(4), val)[:, 0]
    assert (guess_M.numpy() == theirs.predict(val.h_NF.double().numpy())).mean() > 0.98
    ours, his = (guess_M == val.label_N).double().mean(), theirs.score(val.h_NF.double().numpy(), val.label_N.numpy())
    assert abs(float(ours) - his) < 0.01


# ---- Side by side ----------------------------------------------------------------------------------------------------

GRID = tuple(settings(lr=lr, batch_size=size) for lr in (0.5, 3.0) for size in (12, 40))


@pytest.mark.parametrize("scope", ["all", "per-task"])
def test_side_by_side_is_one_at_a_time_bit_for_bit(data: Prepared, scope: str) -> None:
    found = encoders(3)
    together = weights(linear.train([ProbedEncoder(encoder=item, settings=GRID) for item in found], bench(data, scope)))
    for e, item in enumerate(found):
        for s, one in enumerate(GRID):
            if (e + s) % 2:  # half of them tell as much
                continue
            alone = weights(linear.train([ProbedEncoder(encoder=item, settings=(one,))], bench(data, scope)))[0][0]
            for mine, its in zip(together[e][s], alone, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
    # The settings make a difference, or the test could not fail.
    assert not torch.equal(together[0][0][0][0], together[0][1][0][0])


def test_hits_side_by_side_are_those_one_at_a_time(data: Prepared) -> None:
    found = encoders(2)
    for run, choices in (
        (linear.run, (settings(), settings(lr=2.0))),
        (plain.run, (cached.CachedSettings(), cached.CachedSettings(strength=0.01))),
        (plain.run, (knn.KnnSettings(k=3), knn.KnnSettings(k=3, metric="euclidean"))),
    ):
        call: Any = run
        together = call([ProbedEncoder(encoder=item, settings=choices) for item in found], bench(data))
        for e, item in enumerate(found):
            for s, one in enumerate(choices):
                assert call([ProbedEncoder(encoder=item, settings=(one,))], bench(data)) == [[together[e][s]]]
        assert sum(together[0][0].top5) > sum(together[0][0].top1) > 0


def test_images_are_decoded_once_for_all_encoders(data: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """T times fewer decodes than one at a time, counted where crops are made."""
    decoded = 0
    ours = EngineBackend.run

    def counted(self: EngineBackend, batches: Any, first: int) -> Iterator[Any]:
        nonlocal decoded
        for crops in ours(self, batches, first):
            decoded += len((crops.views_V or crops.crops_V)[0])
            yield crops

    monkeypatch.setattr(EngineBackend, "run", counted)
    found = encoders(5)
    for run, one, passes in ((linear.run, settings(epochs=2), 2), (plain.run, knn.KnnSettings(), 1)):
        call: Any = run
        decoded = 0
        call([ProbedEncoder(encoder=item, settings=(one,)) for item in found], bench(data))
        together, decoded = decoded, 0
        for item in found:
            call([ProbedEncoder(encoder=item, settings=(one,))], bench(data))
        # 80 training images a pass, and 40 to validate with, padded to whole chunks of 16.
        assert together == 80 * passes + 48
        assert decoded == 5 * together


def test_scopes_and_probes_together_are_one_at_a_time(data: Prepared) -> None:
    """Bit for bit: a scope that is left out must not change the chunks that its neighbours' features come from."""
    scopes, found = ("all", "per-task"), encoders(2)
    survey = merged([plan(data, scope) for scope in scopes])
    choices = (cached.CachedSettings(), knn.KnnSettings(k=3), knn.KnnSettings(k=3, metric="euclidean"))
    for call, options in ((linear.run, GRID[:2]), (plain.run, choices)):
        run: Any = call
        contenders = [ProbedEncoder(encoder=item, settings=options) for item in found]
        together = run(contenders, bench_of(bench(data), survey.plan))
        for scope in scopes:
            alone = run(contenders, bench(data, scope))
            for e, s in ((e, s) for e in range(2) for s in range(len(options))):
                assert tuple(together[e][s].top1[place] for place in survey.places[scope]) == alone[e][s].top1
                assert tuple(together[e][s].top5[place] for place in survey.places[scope]) == alone[e][s].top5
        assert together[0][0] != together[0][1]


def test_groups_that_are_not_needed_are_left_out(data: Prepared) -> None:
    (encoder,), whole = encoders(1), bench(data, "per-task")
    for call, one in ((linear.run, settings()), (plain.run, cached.CachedSettings()), (plain.run, knn.KnnSettings())):
        run: Any = call
        (every,), (few,) = (
            run([ProbedEncoder(encoder=encoder, settings=(one,), groups=groups)], whole)
            for groups in (None, frozenset({1, 3}))
        )
        assert few[0].top5[1::2] == every[0].top5[1::2] != (0, 0) and few[0].top5[::2] == (0, 0)


def test_a_probe_of_one_task_learns_from_its_images_alone(data: Prepared) -> None:
    """As if the other tasks were not there, but for the rounding of chunks that are made up differently."""
    found, whole = encoders(1), bench(data, "per-task")
    together = weights(linear.train([ProbedEncoder(encoder=found[0], settings=(settings(batch_size=5),))], whole))[0][0]
    for number, group in enumerate(whole.plan.groups):
        assert len(group.labels) == 5 and len(group.train_ids) == 20
        part = replace(whole.plan, groups=(group,))
        alone = linear.train(
            [ProbedEncoder(encoder=found[0], settings=(settings(batch_size=5),))], bench_of(whole, part)
        )
        torch.testing.assert_close(together[number][0], weights(alone)[0][0][0][0], rtol=1e-4, atol=1e-5)


def bench_of(whole: Bench, part: Any) -> Bench:
    return Bench(data=whole.data, plan=part, views=whole.views, num_threads=1, seed=whole.seed)


def test_the_encoder_stays_as_it_is(data: Prepared) -> None:
    (encoder,) = encoders(1)
    encoder.train()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    linear.run([ProbedEncoder(encoder=encoder, settings=(settings(),))], bench(data))
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert encoder.training


def test_a_diverged_classifier_knows_nothing_and_says_so(data: Prepared) -> None:
    table = bench(data)
    found = linear.run([ProbedEncoder(encoder=encoders(1)[0], settings=(settings(lr=1e38), settings()))], table)
    assert sum(found[0][0].top5) == 0 and sum(found[0][1].top5) > 0
    assert "1e+38 diverged" in table.notes[0]


class Enough(Exception):
    pass


@pytest.mark.parametrize("after", [1, 7, 15, 16])
def test_a_probe_goes_on_where_it_was_stopped_bit_for_bit(data: Prepared, after: int) -> None:
    contenders = [ProbedEncoder(encoder=item, settings=GRID[:2]) for item in encoders(2)]
    whole = weights(linear.train(contenders, bench(data)))
    saved: dict[str, Any] = {}
    count = 0

    def stop(training: linear.Training) -> None:
        nonlocal count
        count += 1
        if count == after:
            saved.update(torch.load(_stored(training.state()), weights_only=True))
            raise Enough

    with pytest.raises(Enough):
        linear.train(contenders, bench(data), after_batch=stop)
    went_on = weights(linear.train(contenders, bench(data), state=saved))
    for mine, its in zip(whole, went_on, strict=True):
        for a, b in zip(mine, its, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))


def _stored(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_features_that_spill_are_the_same(data: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, found = bench(data), encoders(2)
    plain = table.features(found, "val")
    monkeypatch.setattr("fastcssl.evaluate.features._SPILL_BYTES", 1)
    table.spill = tmp_path
    spilled = table.features(found, "val")
    for a, b in zip(plain, spilled, strict=True):
        assert a is not None and b is not None and torch.equal(a.h_NF, b.h_NF)
    assert not list(tmp_path.iterdir())  # without a name, so that nothing is left behind
    with table.open_loader("val", VIEWS.val) as loader:
        stream = loader.open(table.selection("val", "sequential"))
        mine = features_of(found, stream, device=CPU, mine=lambda e: e == 1)
    assert mine[0] is None and mine[1] is not None


# ---- Several ranks ---------------------------------------------------------------------------------------------------


def probed(world: World, folder: Path) -> tuple[list[Tensor], list[list[list[Hits]]]]:
    torch.set_num_threads(1)
    probes.CHUNK = 16
    data, found = Prepared.open(folder), encoders(3)
    contenders = [ProbedEncoder(encoder=item, settings=GRID[:2]) for item in found]
    heads = [x for by in weights(linear.train(contenders, bench(data, world=world))) for s in by for g in s for x in g]
    hits = [linear.run(contenders, bench(data, world=world))]
    few, usual = knn.KnnSettings(k=3), cached.CachedSettings()
    both = (few, replace(few, metric="euclidean"), usual)
    hits.append(plain.run([ProbedEncoder(encoder=item, settings=both) for item in found], bench(data, world=world)))
    hits.append(plain.run([ProbedEncoder(encoder=item, settings=(usual,)) for item in found], bench(data, world=world)))
    return heads, hits


def searched(world: World, folder: Path) -> list[Tensor | None]:
    """Returns the guesses of k-NN in chunks of seven validation rows; only rank 0 has the training rows."""
    torch.set_num_threads(1)
    table, rows, val = bench(Prepared.open(folder), world=world), clusters(90, 0), clusters(40, 5)
    train = rows if world.rank == 0 else None
    return [
        knn.guess_on_all_ranks(train, val, knn.KnnSettings(k=5, metric=metric), table, val_chunk=7)
        for metric in ("cosine", "euclidean")
    ]


def test_the_ranks_divide_the_search_for_neighbours(data: Prepared) -> None:
    first, second = on_ranks(2, searched, data.folder, timeout_s=300)
    assert second == [None, None]
    for metric, guess_M5 in zip(("cosine", "euclidean"), first, strict=True):
        alone = knn.knn(clusters(90, 0), clusters(40, 5), num_classes=20, k=5, metric=metric, val_chunk=7)
        assert torch.equal(guess_M5, alone.guess_M5)


def test_two_ranks_find_what_one_finds(data: Prepared) -> None:
    heads, hits = probed(World(), data.folder)
    ranks = on_ranks(2, probed, data.folder, timeout_s=300)
    for heads_r, hits_r in ranks:
        for mine, its in zip(heads, heads_r, strict=True):
            torch.testing.assert_close(its, mine, rtol=1e-4, atol=1e-5)
        assert hits_r == hits
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][0], ranks[1][0], strict=True))
