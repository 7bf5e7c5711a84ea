"""Other people's readers read our shards, every sample of them: DALI, FFCV, webdataset, tar."""

import gc
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from conftest import Pixels, backend, decoded, prep_ok

from dataprep.manifest import Manifest, load_manifest
from dataprep.sources import open_source
from dataprep.table import Table, load_table

SPEC = "synthetic:train=4,val=2,size=64,format=jpeg"


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest, Table]:
    out = tmp_path_factory.mktemp("tars") / "out"
    prep_ok(
        *("build", SPEC, "--scenario", "domain", "--out", out, "--formats", "tar"),
        *("--shard-mb", 1, "--resize", "none"),
    )
    manifest = load_manifest(out)
    return out, manifest, load_table(manifest, out)


def originals() -> dict[int, tuple[int, bytes]]:
    source = open_source(SPEC)
    found: dict[int, tuple[int, bytes]] = {}
    for sample in source.samples:
        content = source.payload(sample)
        assert isinstance(content, bytes)
        found[sample.id] = (sample.label, content)
    return found


def test_any_tar_tool(tars: tuple[Path, Manifest, Table]) -> None:
    out, manifest, _ = tars
    wanted = originals()
    for shard in manifest.shards:
        listed = subprocess.run(["tar", "tvf", out / shard.path], capture_output=True, text=True, check=True)
        assert len(listed.stdout.splitlines()) == 2 * shard.count
        with tarfile.open(out / shard.path) as archive:
            for member in archive:
                content = archive.extractfile(member)
                assert content is not None and member.mtime == 0 and member.uid == 0
                label, jpeg = wanted[int(member.name.partition(".")[0])]
                assert content.read() == (jpeg if member.name.endswith(".jpg") else str(label).encode())


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset(tars: tuple[Path, Manifest, Table]) -> None:
    wds = backend("webdataset")
    out, manifest, _ = tars
    urls = [str(out / shard.path) for shard in manifest.shards]
    seen = {
        int(sample["__key__"]): (int(sample["cls"]), sample["jpg"])
        for sample in wds.WebDataset(urls, shardshuffle=False, empty_check=False)
    }
    assert seen == originals()
    gc.collect()  # webdataset leaves its files to the collector; let it complain here, where that is ignored


def test_dalis_webdataset_reader(tars: tuple[Path, Manifest, Table]) -> None:
    """By DALI's own reader with our index: bytes, labels and decoded pixels of every sample."""
    backend("nvidia.dali")
    from nvidia.dali import fn, pipeline_def

    out, manifest, table = tars
    assert all(shard.index is not None for shard in manifest.shards)

    @pipeline_def(batch_size=8, num_threads=2, device_id=None)  # type: ignore[untyped-decorator]
    def read() -> object:
        jpeg, label = fn.readers.webdataset(
            paths=[str(out / shard.path) for shard in manifest.shards],
            index_paths=[str(out / shard.index.path) for shard in manifest.shards if shard.index],
            ext=["jpg", "cls"],
            missing_component_behavior="error",
            name="shards",
        )
        return jpeg, label, fn.decoders.image(jpeg, device="cpu")

    pipeline = read()
    pipeline.build()
    total = len(table)
    assert pipeline.epoch_size("shards") == total
    expected = [row for n in range(len(manifest.shards)) for row in by_place(table, n)]
    got: list[tuple[bytes, int, Pixels]] = []
    while len(got) < total:
        jpegs, labels, images = pipeline.run()
        for i in range(len(jpegs)):
            got.append((bytes(jpegs.at(i)), int(bytes(labels.at(i))), np.array(images.at(i))))
    wanted = originals()
    for row, (jpeg, label, image) in zip(expected, got[:total], strict=True):
        assert (label, jpeg) == wanted[int(row["id"])]
        assert np.abs(image.astype(int) - decoded(jpeg)).max() <= 8  # another inverse transform


def by_place(table: Table, shard: int) -> Table:
    rows: Table = table[table["tar_shard"] == shard]
    return rows[np.argsort(rows["tar_place"])]


def test_dalis_index_is_the_one_its_own_tool_writes(tars: tuple[Path, Manifest, Table], tmp_path: Path) -> None:
    backend("nvidia.dali")
    out, manifest, _ = tars
    tool = Path(sys.executable).with_name("wds2idx")
    shard = manifest.shards[0]
    assert shard.index is not None
    theirs = tmp_path / "theirs.idx"
    subprocess.run([tool, out / shard.path, theirs], check=True, capture_output=True)

    def entries(path: Path) -> list[list[str]]:
        return [line.split() for line in path.read_text().splitlines()]

    ours = entries(out / shard.index.path)
    assert ours[0] == entries(theirs)[0]
    # Components may be listed in another order, and the names are optional.
    for mine, its in zip(ours[1:], entries(theirs)[1:], strict=True):
        assert {tuple(mine[i : i + 3]) for i in range(0, len(mine), 4)} <= {
            tuple(its[i : i + 3]) for i in range(0, len(its), 4)
        }


READ_WITH_FFCV = """
import sys
import numpy as np
from ffcv.loader import Loader, OrderOption
from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder

for number, path in enumerate(sys.argv[2:]):
    loader = Loader(path, batch_size=16, num_workers=1, order=OrderOption.SEQUENTIAL, drop_last=False,
                    pipelines={"image": [SimpleRGBImageDecoder()], "label": [IntDecoder()], "id": [IntDecoder()],
                               "domain": [IntDecoder()]})
    image, label, ident, domain = (np.concatenate(column) for column in zip(*[
        [np.array(part) for part in batch] for batch in loader]))
    np.savez(f"{sys.argv[1]}/{number}.npz", image=image, label=label.ravel(), id=ident.ravel(), domain=domain.ravel())
"""


def test_ffcvs_own_loader(tmp_path: Path) -> None:
    backend("ffcv")
    out = tmp_path / "out"
    prep_ok("build", SPEC, "--scenario", "joint", "--out", out, "--formats", "ffcv", "--resize", "none")
    manifest = load_manifest(out)
    table = load_table(manifest, out)
    wanted = originals()
    command = [sys.executable, "-W", "ignore", "-c", READ_WITH_FFCV, tmp_path]
    subprocess.run(
        [*command, *(out / shard.path for shard in manifest.shards)], check=True, timeout=200, capture_output=True
    )
    for number in range(len(manifest.shards)):
        rows = table[table["ffcv_shard"] == number]
        rows = rows[np.argsort(rows["ffcv_place"])]
        with np.load(tmp_path / f"{number}.npz") as read:
            assert read["id"].tolist() == rows["id"].tolist()
            assert read["label"].tolist() == rows["label"].tolist()
            assert read["domain"].tolist() == rows["domain"].tolist()
            for i, image in enumerate(read["image"]):
                difference = np.abs(image.astype(int) - decoded(wanted[int(read["id"][i])][1]))
                assert difference.max() <= 12 and difference.mean() < 2  # FFCV decodes with the fast transform
