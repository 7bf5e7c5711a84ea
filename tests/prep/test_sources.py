"""Every source on a small copy of its real layout, and every way in which such a layout can be wrong."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Pixels, jpeg_of, picture
from PIL import Image

from dataprep.errors import PrepError
from dataprep.sources import Source, families, open_source
from dataprep.sources.imagenet import CMC_CLASSES
from dataprep.sources.plain_pickle import PlainPickleError, read_plain_pickle

Tree = Callable[..., Path]


def counts(source: Source) -> tuple[int, int]:
    num_val = int(source.samples.is_val_S.sum())
    return len(source.samples) - num_val, num_val


def assert_well_formed(source: Source) -> None:
    """The contract of every source."""
    samples = source.samples
    assert (np.diff(samples.id_S) > 0).all()
    assert samples.label_S.min() >= 0 and samples.label_S.max() < len(source.classes)
    assert samples.domain_S.max() < max(len(source.domains), 1)
    assert (samples.domain_S == -1).all() == (not source.domains)
    assert (np.diff(samples.is_val_S.astype(int)) >= 0).all()  # training samples first
    assert len({sample.key for sample in samples}) == len(samples)
    for row in (0, len(samples) - 1):
        content = source.payload(samples[row])
        assert Path(content).is_file() if isinstance(content, str) else len(content)


def make_imagenet(root: Path, classes: tuple[str, ...], splits: tuple[str, ...] = ("train", "val")) -> Path:
    content = jpeg_of(picture(0, 16, 16))
    for split in splits:
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(2):
                (folder / f"{name}_{i}.JPEG").write_bytes(content)
    return root


def test_every_family_is_found() -> None:
    assert set(families()) == {
        *("imagenet", "imagenet100", "domainnet", "cifar10", "cifar100", "stl10", "folder", "synthetic")
    }


def test_imagenet(tmp_path: Path) -> None:
    source = open_source(f"imagenet:{make_imagenet(tmp_path, ('n02', 'n01', 'n10'))}")
    assert_well_formed(source)
    assert source.classes == ("n01", "n02", "n10") and counts(source) == (6, 6)
    assert source.samples[0].key == "train/n01/n01_0.JPEG"


def test_imagenet100_takes_the_cmc_classes_of_a_larger_tree(tmp_path: Path) -> None:
    assert len(CMC_CLASSES) == len(set(CMC_CLASSES)) == 100 and list(CMC_CLASSES) == sorted(CMC_CLASSES)
    root = make_imagenet(tmp_path, (*CMC_CLASSES, "n00000001", "n99999999"))
    source = open_source(f"imagenet100:{root}")
    assert_well_formed(source)
    assert source.classes == CMC_CLASSES and counts(source) == (200, 200)


def test_imagenet100_with_a_list_of_ones_own(tmp_path: Path) -> None:
    root = make_imagenet(tmp_path / "data", ("n01", "n02", "n03"))
    listed = tmp_path / "classes.txt"
    listed.write_text("n03 a name\n# comment\n\nn01\n")
    assert open_source(f"imagenet100:{root}", classes_file=listed).classes == ("n01", "n03")
    listed.write_text("n03\nn77\n")
    with pytest.raises(PrepError, match=r"lacks 1 of the 2 classes .* n77"):
        open_source(f"imagenet100:{root}", classes_file=listed)
    listed.write_text("n03\nn03\n")
    with pytest.raises(PrepError, match="twice"):
        open_source(f"imagenet100:{root}", classes_file=listed)
    listed.write_text("\n")
    with pytest.raises(PrepError, match="names no class"):
        open_source(f"imagenet100:{root}", classes_file=listed)
    with pytest.raises(PrepError, match="cannot be read"):
        open_source(f"imagenet100:{root}", classes_file=tmp_path / "gone.txt")


def test_imagenet_layout_faults(tmp_path: Path) -> None:
    with pytest.raises(PrepError, match="does not exist"):
        open_source(f"imagenet:{tmp_path / 'nowhere'}")
    with pytest.raises(PrepError, match="no folder 'train'"):
        open_source(f"imagenet:{tmp_path}")
    with pytest.raises(PrepError, match="needs a folder"):
        open_source("imagenet")
    root = make_imagenet(tmp_path / "a", ("n01", "n02"))
    with pytest.raises(PrepError, match=r"lacks 100 of the 100 classes of ImageNet-100"):
        open_source(f"imagenet100:{root}")
    for image in (root / "train" / "n02").iterdir():
        image.unlink()
    with pytest.raises(PrepError, match=r"train/n02 has no images"):
        open_source(f"imagenet:{root}")


def make_domainnet(root: Path, domains: tuple[str, ...]) -> Path:
    content = jpeg_of(picture(0, 16, 16))
    for domain in domains:
        for split in ("train", "test"):
            lines = []
            for label, name in enumerate(("ant", "bee", "cat")):
                for i in range(2):
                    key = f"{domain}/{name}/{split}_{i}.jpg"
                    (root / key).parent.mkdir(parents=True, exist_ok=True)
                    (root / key).write_bytes(content)
                    lines.append(f"{key} {label}")
            (root / f"{domain}_{split}.txt").write_text("\n".join(lines) + "\n")
    return root


ALL_DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


def test_domainnet(tmp_path: Path) -> None:
    root = make_domainnet(tmp_path, ALL_DOMAINS)
    source = open_source(f"domainnet:{root}")
    assert_well_formed(source)
    assert source.domains == ("real", "quickdraw", "painting", "sketch", "infograph", "clipart")
    assert source.classes == ("ant", "bee", "cat") and counts(source) == (36, 36)
    part = open_source(f"domainnet:{root}", domains=("clipart",))
    assert part.domains == ("clipart",) and counts(part) == (6, 6)


def test_domainnet_faults(tmp_path: Path) -> None:
    root = make_domainnet(tmp_path, ("clipart",))
    with pytest.raises(PrepError, match=r"real_train\.txt is missing"):
        open_source(f"domainnet:{root}")
    with pytest.raises(PrepError, match="Did you mean 'clipart'"):
        open_source(f"domainnet:{root}", domains=("cliparts",))
    listed = root / "clipart_train.txt"
    original = listed.read_text()
    for line, says in (
        ("clipart/ant/gone.jpg 0", r"line 7: .*gone\.jpg does not exist"),
        ("clipart/ant/train_0.jpg", "expected"),
        ("../outside.jpg 0", "leaves the data set's folder"),
        ("clipart/ant/train_0.jpg zero", "expected"),
    ):
        listed.write_text(original + line + "\n")
        with pytest.raises(PrepError, match=says):
            open_source(f"domainnet:{root}", domains=("clipart",))
    listed.write_text("")
    with pytest.raises(PrepError, match="is empty"):
        open_source(f"domainnet:{root}", domains=("clipart",))


def cifar_batch(path: Path, images: list[Pixels], labels: list[int], key: str, protocol: int = 2) -> None:
    data = np.stack([image.transpose(2, 0, 1).reshape(-1) for image in images])
    path.write_bytes(pickle.dumps({b"data": data, key.encode(): labels, b"batch_label": b"x"}, protocol=protocol))


def make_cifar(root: Path, kind: str, protocol: int = 2) -> list[Pixels]:
    images = [picture(i, 32, 32) for i in range(20)]
    labels = [i % 10 for i in range(20)]
    if kind == "cifar10":
        folder = root / "cifar-10-batches-py"
        folder.mkdir(parents=True)
        names: dict[str, object] = {"label_names": [f"c{i}" for i in range(10)]}
        (folder / "batches.meta").write_bytes(pickle.dumps(names, protocol=protocol))
        for i in range(1, 6):
            cifar_batch(folder / f"data_batch_{i}", images, labels, "labels", protocol)
        cifar_batch(folder / "test_batch", images, labels, "labels", protocol)
    else:
        folder = root / "cifar-100-python"
        folder.mkdir(parents=True)
        names = {"fine_label_names": [f"c{i:02d}" for i in range(100)], "coarse_label_names": []}
        (folder / "meta").write_bytes(pickle.dumps(names, protocol=protocol))
        cifar_batch(folder / "train", images, [i * 5 for i in range(20)], "fine_labels", protocol)
        cifar_batch(folder / "test", images[:4], [1, 2, 3, 99], "fine_labels", protocol)
    return images


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_cifar_batches(tmp_path: Path, kind: str, protocol: int) -> None:
    images = make_cifar(tmp_path, kind, protocol)
    source = open_source(f"{kind}:{tmp_path}")
    assert_well_formed(source)
    assert counts(source) == ((100, 20) if kind == "cifar10" else (20, 4))
    assert len(source.classes) == (10 if kind == "cifar10" else 100) and source.one_size == (32, 32)
    for row in range(4):
        pixels = source.payload(source.samples[row])
        assert isinstance(pixels, np.ndarray) and (pixels == images[row]).all()
    assert counts(open_source(f"{kind}:{next(tmp_path.iterdir())}"))  # the inner folder works too


def test_cifar_batches_as_python_2_wrote_them(tmp_path: Path) -> None:
    """The published files: strings instead of bytes, an array by numpy.core, memo numbers that skip."""
    images = make_cifar(tmp_path, "cifar100")
    data = np.stack([image.transpose(2, 0, 1).reshape(-1) for image in images]).tobytes()
    dtype = b"cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"K\x14M\x00\x0c\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05"
    array += b"(K\x01" + shape + dtype + b"\x89T" + len(data).to_bytes(4, "little") + data + b"tb"
    labels = b"]q\x09(" + b"".join(b"K" + bytes([5 * i]) for i in range(20)) + b"e"
    program = b"\x80\x02}q\x01(U\x04dataq\x02" + array + b"U\x0bfine_labelsq\x08" + labels + b"u."
    assert (pickle.loads(program, encoding="bytes")[b"data"][3] == images[3].transpose(2, 0, 1).reshape(-1)).all()
    (tmp_path / "cifar-100-python" / "train").write_bytes(program)
    source = open_source(f"cifar100:{tmp_path}")
    assert [sample.label for sample in source.samples][:20] == [5 * i for i in range(20)]
    assert (np.asarray(source.payload(source.samples[3])) == images[3]).all()


def test_cifar100_as_folders(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for c in range(100):
            folder = tmp_path / split / f"class{c:03d}"
            folder.mkdir(parents=True)
            Image.fromarray(picture(c, 32, 32)).save(folder / "0.png")
    source = open_source(f"cifar100:{tmp_path}")
    assert_well_formed(source)
    assert counts(source) == (100, 100) and source.samples[7].label == 7
    (tmp_path / "train" / "class000" / "0.png").unlink()
    (tmp_path / "train" / "class000").rmdir()
    with pytest.raises(PrepError, match="must have the same 100 class folders"):
        open_source(f"cifar100:{tmp_path}")


class Malicious:
    def __reduce__(self) -> tuple[object, ...]:
        return (eval, ("__import__('pathlib').Path('pwned').write_text('x')",))


def test_pickles_are_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in (0, 2, 4):
        evil = tmp_path / "evil"
        evil.write_bytes(pickle.dumps({b"data": Malicious()}, protocol=protocol))
        with pytest.raises(PlainPickleError, match=r"refused|does not need"):
            read_plain_pickle(evil)
    make_cifar(tmp_path, "cifar100")
    (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps({b"data": Malicious()}))
    with pytest.raises(PrepError, match="is not a CIFAR batch"):
        open_source(f"cifar100:{tmp_path}")
    assert not (tmp_path / "pwned").exists()


def test_damaged_cifar(tmp_path: Path) -> None:
    make_cifar(tmp_path, "cifar100")
    train = tmp_path / "cifar-100-python" / "train"
    whole = train.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"rubbish", pickle.dumps([1, 2]), pickle.dumps({b"data": 3})):
        train.write_bytes(content)
        with pytest.raises(PrepError):
            open_source(f"cifar100:{tmp_path}")
    with pytest.raises(PrepError, match="holds neither"):
        open_source(f"cifar10:{tmp_path}")


def test_stl10(tmp_path: Path) -> None:
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    images = np.stack([picture(i, 96, 96) for i in range(10)])
    for split in ("train", "test"):
        images.transpose(0, 3, 2, 1).tofile(folder / f"{split}_X.bin")
        np.arange(1, 11, dtype=np.uint8).tofile(folder / f"{split}_y.bin")
    source = open_source(f"stl10:{tmp_path}")
    assert_well_formed(source)
    assert counts(source) == (10, 10) and source.classes[0] == "airplane" and source.one_size == (96, 96)
    for row in (0, 9):
        assert (np.asarray(source.payload(source.samples[row])) == images[row]).all()
    (folder / "train_X.bin").write_bytes(b"short")
    with pytest.raises(PrepError, match="has 5 bytes, but its"):
        open_source(f"stl10:{tmp_path}")
    (folder / "train_X.bin").unlink()
    with pytest.raises(PrepError, match="is missing"):
        open_source(f"stl10:{tmp_path}")


def test_folder_with_splits(tree: Tree) -> None:
    source = open_source(f"folder:{tree()}")
    assert_well_formed(source)
    assert counts(source) == (20, 20) and not source.domains and source.one_size == (48, 64)


def test_folder_without_validation_holds_some_out(tree: Tree) -> None:
    root = tree(splits=("train",), images=10)
    source = open_source(f"folder:{root}")
    assert_well_formed(source)
    assert counts(source) == (36, 4) and "held out" in source.notes[0]
    assert sorted(source.samples.label_S[source.samples.is_val_S].tolist()) == [0, 1, 2, 3]
    assert open_source(f"folder:{root}").samples.fingerprint() == source.samples.fingerprint()


def test_folder_of_classes_and_of_domains(tree: Tree) -> None:
    root = tree(splits=("day", "night"), images=10)
    source = open_source(f"folder:{root}")
    assert_well_formed(source)
    assert source.domains == ("day", "night") and counts(source) == (72, 8)
    only = open_source(f"folder:{root}", domains=("night",))
    assert only.domains == ("night",) and counts(only) == (36, 4)
    with pytest.raises(PrepError, match="no domain 'dusk'"):
        open_source(f"folder:{root}", domains=("dusk",))
    plain = open_source(f"folder:{root / 'day'}")
    assert not plain.domains and counts(plain) == (36, 4)


def test_folder_faults(tree: Tree, tmp_path: Path) -> None:
    with pytest.raises(PrepError, match="has no class folders"):
        open_source(f"folder:{tmp_path}")
    root = tree()
    (root / "train" / "empty").mkdir()
    with pytest.raises(PrepError, match="no images for the class empty"):
        open_source(f"folder:{root}")
    (root / "train" / "empty").rmdir()
    (root / "val" / "strange").mkdir()
    with pytest.raises(PrepError, match="such as strange"):
        open_source(f"folder:{root}")
    with pytest.raises(PrepError, match="is a file"):
        open_source(f"folder:{root / 'train' / 'class00' / '000.jpg'}")


def test_folder_names_of_any_kind(tree: Tree) -> None:
    root = tree(classes=2)
    odd = root / "train" / "class00" / "naïve 名前 (1).JPG"
    odd.write_bytes((root / "train" / "class00" / "000.jpg").read_bytes())
    (root / "train" / "class00" / "Thumbs.db").write_bytes(b"x")
    (root / "train" / "class00" / ".hidden.jpg").write_bytes(b"x")
    source = open_source(f"folder:{root}")
    assert counts(source) == (11, 10)
    assert any(sample.key.endswith(odd.name) for sample in source.samples)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("imagnet:/x", "Did you mean 'imagenet"),
        ("zzz:/x", "Known: cifar10"),
        ("synthetic:sise=32", "Did you mean 'size'"),
        ("synthetic:size=16", "use 32 to 256"),
        ("synthetic:classes=7", "use one of"),
        ("synthetic:set=form", "use factors or forms"),
        ("synthetic:set=forms,classes=30", "use one of 10, 15, 20, 25"),
        ("synthetic:train=x", "takes a number"),
        ("synthetic:train=0", "at least one image"),
        ("synthetic:format=png", "use pixels or jpeg"),
    ],
)
def test_wrong_specifications(spec: str, says: str) -> None:
    with pytest.raises(PrepError, match=says):
        open_source(spec)


def test_a_bare_path_is_explained(tmp_path: Path) -> None:
    with pytest.raises(PrepError, match="write folder:"):
        open_source(str(tmp_path))


def test_synthetic_source() -> None:
    source = open_source("synthetic:train=8,val=4")
    assert_well_formed(source)
    assert len(source.classes) == 30 and counts(source) == (240, 120) and len(source.domains) >= 4
    assert (np.bincount(source.samples.domain_S) == 90).all()
    pixels = source.payload(source.samples[0])
    assert isinstance(pixels, np.ndarray) and pixels.shape == (32, 32, 3)
    val = source.payload(source.samples[240])
    assert isinstance(val, np.ndarray) and (val != pixels).any()
    mixed = open_source("synthetic:size=mixed,train=4,val=0")
    contents = [mixed.payload(mixed.samples[row]) for row in range(6)]
    assert all(isinstance(content, bytes) and content[:2] == b"\xff\xd8" for content in contents)
    assert mixed.one_size is None
