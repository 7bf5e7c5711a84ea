"""What every format must do; formats are discovered, so a new one is tested the day it appears."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import backend, decoded, prep, prep_ok

from dataprep.manifest import load_manifest
from dataprep.sources import open_source
from dataprep.table import load_table
from dataprep.writers import ShardDamage, formats

Tree = Callable[..., Path]
NAMES = sorted(formats())


def needs(format: str) -> None:
    if format == "ffcv":
        backend("ffcv")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The embedded set in one format, built once."""
    done: dict[str, Path] = {}

    def get(format: str) -> Path:
        needs(format)
        if format not in done:
            out = tmp_path_factory.mktemp(format) / "out"
            prep_ok(
                *("build", "synthetic:train=8,val=4,size=48,format=jpeg", "--scenario", "class", "--tasks", 2),
                *("--out", out, "--formats", format, "--resize", "none", "--workers", 2),
            )
            done[format] = out
        return done[format]

    return get


def test_the_formats_of_the_design_exist() -> None:
    assert {"tar", "ffcv", "array"} <= set(NAMES)


@pytest.mark.parametrize("format", NAMES)
def test_round_trip(format: str, built: Callable[[str], Path]) -> None:
    """Every sample of the source is stored once, exactly: pass-through bytes, or the pixels they decode to."""
    out = built(format)
    manifest, source = load_manifest(out), open_source("synthetic:train=8,val=4,size=48,format=jpeg")
    table = load_table(manifest, out)
    assert (table["id"] == source.samples.id_S).all() and table["is_stored"].all()
    assert (table["width"] == 48).all() and (table["height"] == 48).all()
    seen: set[int] = set()
    for number, shard in enumerate(manifest.shards):
        rows = table[table[f"{format}_shard"] == number]
        rows = rows[np.argsort(rows[f"{format}_place"])]
        assert len(rows) == shard.count
        for record in formats()[format].read(out / shard.path, rows):
            assert record.id not in seen
            seen.add(record.id)
            sample = source.samples[record.id]
            original = source.payload(sample)
            assert isinstance(original, bytes)
            assert record.label == sample.label
            if isinstance(record.content, bytes):
                assert record.content == original
            else:
                assert (record.content == decoded(original)).all()
    assert len(seen) == len(source.samples)


@pytest.mark.parametrize("format", NAMES)
def test_samples_are_shuffled_inside_a_task(format: str, built: Callable[[str], Path]) -> None:
    """Readers that shuffle within a window must not meet one class after another."""
    out = built(format)
    manifest = load_manifest(out)
    table = load_table(manifest, out)
    rows = table[table[f"{format}_shard"] == manifest.tasks[0].train.shards[format][0]]
    labels = rows["label"][np.argsort(rows[f"{format}_place"])]
    assert (np.diff(labels) != 0).mean() > 0.8


@pytest.mark.parametrize("format", NAMES)
def test_verify_finds_damage(format: str, built: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(built(format), out)
    assert prep("verify", out).returncode == 0
    assert prep("verify", out, "--quick").returncode == 0
    shard = out / load_manifest(out).shards[0].path
    whole = shard.read_bytes()

    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 0x55
    shard.write_bytes(flipped)
    assert prep("verify", out, "--quick").returncode == 0  # the size is right, which is all that it looks at
    done = prep("verify", out)
    assert done.returncode == 1 and "checksum" in done.stdout and shard.name in done.stdout

    shard.write_bytes(whole[:-100])
    for quick in ((), ("--quick",)):
        done = prep("verify", out, *quick)
        assert done.returncode == 1 and f"instead of {len(whole)}" in done.stdout

    shard.unlink()
    done = prep("verify", out, "--quick")
    assert done.returncode == 1 and "missing" in done.stdout
    shard.write_bytes(whole)
    assert prep("verify", out).returncode == 0


@pytest.mark.parametrize("format", NAMES)
def test_a_foreign_or_cut_shard_is_damage_not_a_crash(
    format: str, built: Callable[[str], Path], tmp_path: Path
) -> None:
    out = built(format)
    manifest = load_manifest(out)
    table = load_table(manifest, out)
    rows = table[table[f"{format}_shard"] == 0]
    rows = rows[np.argsort(rows[f"{format}_place"])]
    whole = (out / manifest.shards[0].path).read_bytes()
    for content in (b"", b"rubbish" * 100, whole[: len(whole) // 2], whole[:40]):
        bad = tmp_path / f"bad{formats()[format].suffix}"
        bad.write_bytes(content)
        with pytest.raises(ShardDamage):
            list(formats()[format].read(bad, rows))


@pytest.mark.parametrize("format", NAMES)
def test_all_formats_of_one_build_hold_the_same(format: str, tree: Tree, tmp_path: Path) -> None:
    """Together with tar, every format stores the same samples in the same tasks."""
    needs(format)
    root = tree(images=4)
    out = tmp_path / "out"
    wanted = ",".join(dict.fromkeys(["tar", format]))
    prep_ok(
        *("build", f"folder:{root}", "--scenario", "class", "--tasks", 2, "--out", out),
        *("--formats", wanted, "--resize", "square:32"),
    )
    manifest = load_manifest(out)
    table = load_table(manifest, out)
    assert (table[f"{format}_shard"] >= 0).all() and (table["tar_shard"] >= 0).all()
    for row in table:
        ours, theirs = manifest.shards[int(row[f"{format}_shard"])], manifest.shards[int(row["tar_shard"])]
        assert Path(ours.path).parent == Path(theirs.path).parent and ours.split == theirs.split
    assert prep("verify", out).returncode == 0
