"""The training benchmark runs from a clean start and says what it promises. Speed itself is never tested here."""

import importlib.util
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import prepared
from smokes import BENCHMARKS, smoke

OURS = ("data_wait_share", "step_vs_synthetic_batch")
AGAINST_LIGHTLY = ("images_per_s_vs_lightly", "peak_memory_vs_lightly")


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_train_benchmark(tmp_path: Path) -> None:
    args = ("--smoke", "--device", "cpu", "--threads", 1, "--work", tmp_path / "work")
    done = smoke("train", *args, numbers=tmp_path / "train.jsonl")
    rows, summary = done.lines, done.summary
    for key in OURS:
        assert math.isfinite(summary[key]), key
    has_lightly = importlib.util.find_spec("lightly") is not None
    for key in AGAINST_LIGHTLY:
        assert math.isfinite(summary[key]) if has_lightly else summary[key] is None, key
    assert ("lightly is not installed" in done.said) != has_lightly
    sides = {"ours": ["step", "held"], **({"lightly": ["step"]} if has_lightly else {})}
    assert [(row["side"], row["mode"]) for row in rows] == [(side, mode) for side in sides for mode in sides[side]]
    for row in rows:
        assert row["failure"] is None, row
        assert row["images_per_s_median"] > 0
        assert row["peak_mb"] > row["peaks"]["imports_mb"] > 0
        assert row["wait_share"] == [0] if row["mode"] == "held" else 0 < row["wait_share"][0] < 1
        assert math.isfinite(row["loss"][0])


def entry(key: str, side: str, mode: str, image_seconds: list[float], wait: float = 0.0, peak_mb: float = 1.0) -> Any:
    from timing import Case
    from train_process import Peaks, Slice

    seconds = [2 * each for each in image_seconds]
    case = Case(name="", workers=1, num_items=2, num_bytes=0, run=lambda: 0.0, seconds=seconds)
    return SimpleNamespace(
        load=SimpleNamespace(key=key),
        job=SimpleNamespace(side=side, mode=mode),
        case=case,
        slices=[Slice(each, wait, 1.0) for each in seconds],
        peaks=Peaks(1.0, peak_mb - 1.0, 1.0, None),
    )


def summary_of(*entries: Any, device: str = "cpu") -> dict[str, Any]:
    from train_tables import summarize

    found = {(each.load.key, each.job.side, each.job.mode): each for each in entries}
    return summarize(SimpleNamespace(entries=found, device=device))  # type: ignore[arg-type]


def test_the_summary_names_the_worst_work_load() -> None:
    entries = [
        entry("a", "ours", "step", [4.0, 4.0, 8.0], wait=0.25, peak_mb=60.0),
        entry("a", "ours", "held", [1.0, 1.0, 2.0]),
        entry("a", "ours", "loader", [1.0, 1.0, 2.0]),
        entry("a", "lightly", "step", [8.0, 8.0, 16.0], peak_mb=40.0),
        entry("b", "ours", "step", [4.0, 4.0, 4.0], wait=0.125, peak_mb=10.0),
        entry("b", "ours", "held", [2.0, 2.0, 2.0]),
        entry("b", "lightly", "step", [4.0, 4.0, 4.0], peak_mb=40.0),
    ]
    summary = summary_of(*entries)
    assert summary["data_wait_share"] == 0.25
    assert summary["step_vs_synthetic_batch"] == 0.25
    assert summary["images_per_s_vs_lightly"] == 1.0
    assert summary["peak_memory_vs_lightly"] == 1.5
    assert summary["memory_above_imports_vs_lightly"] == 59 / 39
    assert summary["work_loads"]["b"]["peak_memory_vs_lightly"] == 0.25
    # On a CPU the held batch and the loader take turns; on a GPU the slower one counts.
    assert summary["step_vs_ceiling"] == 0.5
    assert summary_of(*entries, device="cuda")["step_vs_ceiling"] == 0.25
    without = summary_of(*(each for each in entries if each.job.side == "ours"))
    assert without["images_per_s_vs_lightly"] is None and without["peak_memory_vs_lightly"] is None


def test_lightly_is_looked_for_where_told(tmp_path: Path) -> None:
    from train_lightly import find_lightly

    # Such an interpreter has no packages but what lies in the folder.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/packages" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(SystemExit, match=r"without lightly\. Give a Python"):
        find_lightly(python)
    about = tmp_path / "packages" / "lightly-9.8.7.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: lightly\nVersion: 9.8.7\n")
    found = find_lightly(python)
    assert (found.version, found.missing) == ("9.8.7", "")
    assert str(tmp_path / "packages") in found.packages
    with pytest.raises(SystemExit, match="cannot be started"):
        find_lightly(tmp_path / "nothing")


def job(data: Path, side: str, **changes: Any) -> Any:
    from train_process import Job

    values: dict[str, Any] = {"mode": "step", "strategy": "finetune", "task": 0, "policy": "cassle-moco-cifar"}
    values |= {"size_px": 16, "stem": "cifar", "encoder": "resnet18-w8", "bank_size": 64, "batch_size": 16}
    values |= {"num_threads": 1, "num_warm_up": 0, "device": "cpu", "seed": 3, "manifest": data}
    torch.set_num_threads(1)
    return Job(side=side, **(values | changes))  # type: ignore[arg-type]


def test_our_parts_of_a_step(tmp_path: Path) -> None:
    """At PNR's second task: what is timed as a held batch or as the networks alone is that and nothing else."""
    from train_process import Ours

    ours = Ours(job(prepared(tmp_path / "data"), "ours", strategy="pnr", task=1, policy="pnr-moco-cifar"))
    method: Any = ours.run.method
    strategy: Any = ours.run.strategy
    assert strategy.frozen is not None and [len(bank.rows_KD) for bank in strategy.banks] == [64, 64]
    assert all(int(bank.filled) == 64 for bank in (*method.banks, *strategy.banks))

    def state() -> list[torch.Tensor]:
        return [p.detach().clone() for p in (*method.parameters(), *(bank.rows_KD for bank in method.banks))]

    batches, before = ours.batches(), state()
    batch = next(batches)
    assert set(batch.id.tolist()) <= set(ours.run.data.manifest.tasks[1].train.iter_ids())
    kept, seen = ours.keep(batch), [view.clone() for view in batch.views]
    ours.networks(kept)
    assert all(map(torch.equal, before, state()))
    assert all(p.grad is not None for p in ours.module.parameters())
    assert math.isfinite(float(ours.train(kept)))
    assert not any(map(torch.equal, before, state()))
    for _ in range(4):  # buffers are used again
        next(batches)
    assert all(map(torch.equal, kept.views, seen))
    ours.run.loader.close()


def test_lightly_trains_what_we_train(tmp_path: Path) -> None:
    """From the same weights and banks, on the same batches, the losses are the same."""
    pytest.importorskip("lightly")
    from train_lightly import Lightly
    from train_process import Ours

    data = prepared(tmp_path / "data")
    ours, theirs = Ours(job(data, "ours")), Lightly(job(data, "lightly"))
    method: Any = ours.run.method
    with torch.no_grad():
        for head in (theirs.online[1], theirs.slow[1]):
            for to, of in zip(head.parameters(), method.online.projector.parameters(), strict=True):
                to.copy_(of)
        for bank, loss in zip(method.banks, theirs.losses, strict=True):
            loss.memory_bank.bank.copy_(bank.rows_KD)
    batches = ours.batches()
    for _ in range(3):
        batch = ours.keep(next(batches))
        assert float(theirs.train(batch.views)) == pytest.approx(float(ours.train(batch)), rel=1e-3)
    ours.run.loader.close()
