"""Runs the probes that see each image once, without random crops: k-NN and logistic regression, on the same features.

The validation and the training images are embedded once for all encoders, probes, settings and scopes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastcssl.evaluate.features import Features
from fastcssl.evaluate.probes import Bench, Hits, ProbedEncoder, cached, hits, knn, on_all_ranks, rows_of
from fastcssl.evaluate.probes.cached import CachedSettings
from fastcssl.evaluate.probes.knn import KnnSettings

PlainSettings = CachedSettings | KnnSettings


def run(contenders: Sequence[ProbedEncoder[PlainSettings]], bench: Bench) -> list[list[Hits]]:
    """Returns the hits of all classifiers, [encoder][setting].

    The ranks divide the encoders among them, and each fits the logistic regressions of its own. For k-NN they divide
    the validation images of every encoder, so that no rank is idle if there are fewer encoders than ranks.
    """
    world, encoders = bench.world, [contender.encoder for contender in contenders]
    train_E = bench.features(encoders, "train", mine=lambda e: e % world.size == world.rank)
    val_E = bench.features(encoders, "val")
    found: dict[tuple[int, int], Hits] = {}
    places = [(e, s) for e, contender in enumerate(contenders) for s in range(len(contender.settings))]
    # Every rank takes part in k-NN, so it comes first, in the same order on all of them.
    for e, s in sorted(places, key=lambda place: isinstance(contenders[place[0]].settings[place[1]], CachedSettings)):
        contender, train, val = contenders[e], train_E[e], val_E[e]
        assert val is not None
        settings = contender.settings[s]
        if train is None and isinstance(settings, CachedSettings):
            continue
        guesser = _Guesser(train, settings, bench)
        counted = hits(bench.plan, val, guesser, contender.needs)
        if train is not None:
            found[e, s] = counted
    return on_all_ranks(found, [len(item.settings) for item in contenders], len(bench.plan.columns), world)


class _Guesser:
    """Maps a group and validation rows to guesses [M, 5], for one encoder and one setting."""

    def __init__(self, train: Features | None, settings: PlainSettings, bench: Bench) -> None:
        self._train, self._settings, self._bench = train, settings, bench

    def __call__(self, group: int, val: Features) -> Tensor:
        bench, settings = self._bench, self._settings
        train = None if self._train is None else rows_of(self._train, bench.plan.groups[group].train_ids)
        if isinstance(settings, KnnSettings) and bench.world.size > 1:
            guess_M5 = knn.guess_on_all_ranks(train, val, settings, bench)
            return torch.full((len(val), 5), -1, device=val.h_NF.device) if guess_M5 is None else guess_M5
        assert train is not None
        if isinstance(settings, KnnSettings):
            return knn.guess(train, val, settings, bench)
        return cached.guess(train, val, settings, bench)
