"""Building: killed anywhere it goes on, nothing whole is lost, and every bad input is a sentence with status 2."""

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import backend, decoded, folder_bytes, jpeg_of, picture, prep, prep_ok, prep_refused
from PIL import Image

from dataprep.manifest import load_manifest
from dataprep.table import load_table
from dataprep.writers.beton import BetonFile

Tree = Callable[..., Path]


def start(*args: object) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "dataprep.cli", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def big_tree(root: Path, classes: int = 4, images: int = 30) -> Path:
    """Large enough for a build to take a moment and several parts."""
    for split, count in (("train", images), ("val", 4)):
        for c in range(classes):
            folder = root / split / f"class{c}"
            folder.mkdir(parents=True)
            for i in range(count):
                noise = np.random.default_rng(1000 * c + i).integers(0, 256, (220, 260, 3), dtype=np.uint8)
                (folder / f"{split}{i:03d}.jpg").write_bytes(jpeg_of(noise))
    return root


def size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


@pytest.mark.parametrize("formats", ["tar", "array", "tar,array"])
def test_killed_at_random_points_the_result_is_the_same(formats: str, tmp_path: Path) -> None:
    root = big_tree(tmp_path / "source")
    args = ("build", f"folder:{root}", "--scenario", "class", "--tasks", 2, "--shard-mb", 1, "--formats", formats)
    args += ("--resize", "square:200", "--workers", 2)
    prep_ok(*args, "--out", tmp_path / "whole")
    total = size_of(tmp_path / "whole")
    dice = random.Random(formats)
    out = tmp_path / "killed"
    kills = 0
    for fraction in sorted(dice.uniform(0, 0.95) for _ in range(5)):
        process = start(*args, "--out", out)
        while process.poll() is None and size_of(out) < fraction * total:
            time.sleep(dice.uniform(0, 0.004))
        kills += process.poll() is None
        process.kill()
        process.wait()
    prep_ok(*args, "--out", out)
    assert kills >= 3
    assert folder_bytes(out) == folder_bytes(tmp_path / "whole")
    assert not (out / ".build").exists()
    assert prep("verify", out).returncode == 0


def test_a_killed_build_goes_on_after_the_last_whole_part(tmp_path: Path) -> None:
    root = big_tree(tmp_path / "source")
    out = tmp_path / "out"
    args = ("build", f"folder:{root}", "--scenario", "joint", "--shard-mb", 1, "--resize", "none", "--out", out)
    process = start(*args, "--workers", 1)
    journal = out / ".build" / "journal"
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    done = [json.loads(line) for line in journal.read_bytes().splitlines() if line.endswith(b"}")]
    before = {file["path"]: (out / file["path"]).stat().st_mtime_ns for part in done for file in part["files"]}
    assert before
    text = prep_ok(*args)
    assert "Resumed after" in text
    assert {path: (out / path).stat().st_mtime_ns for path in before} == before  # not written again


def test_a_journal_line_cut_in_half_is_made_again(tmp_path: Path) -> None:
    root = big_tree(tmp_path / "source", classes=2, images=20)
    args = ("build", f"folder:{root}", "--scenario", "class", "--tasks", 2, "--shard-mb", 1, "--resize", "none")
    prep_ok(*args, "--out", tmp_path / "whole")
    out = tmp_path / "cut"
    process = start(*args, "--out", out)
    journal = out / ".build" / "journal"
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= 1):
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    journal.write_bytes(journal.read_bytes()[:-20])
    (out / "task-00" / "rubbish.tar.part").write_bytes(b"left over")
    prep_ok(*args, "--out", out)
    assert folder_bytes(out) == folder_bytes(tmp_path / "whole")


def test_a_killed_ffcv_build_holds_the_same_samples(tmp_path: Path) -> None:
    backend("ffcv")
    root = big_tree(tmp_path / "source", classes=2, images=20)
    args = ("build", f"folder:{root}", "--scenario", "class", "--tasks", 2, "--formats", "ffcv", "--resize", "none")
    prep_ok(*args, "--out", tmp_path / "whole")
    out = tmp_path / "killed"
    process = start(*args, "--out", out)
    while not list(out.glob("task-*/*.part")):  # FFCV's writer has begun
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    prep_ok(*args, "--out", out, "--workers", 1)
    assert not (out / ".build").exists()  # nor the spooled tar parts
    betons = sorted(p.relative_to(out) for p in out.rglob("*.beton"))
    assert len(betons) == 4
    for path in betons:
        assert list(BetonFile(out / path)) == list(BetonFile(tmp_path / "whole" / path))
    assert prep("verify", out).returncode == 0


def test_interrupt_says_how_to_go_on(tmp_path: Path) -> None:
    args = ("build", "synthetic:size=256,train=40", "--scenario", "joint", "--out", tmp_path / "out")
    command = [sys.executable, "-m", "dataprep.cli", *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out" / ".build" / "journal").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "run the same command again" in stderr and "Traceback" not in stderr


def test_the_same_command_on_a_finished_folder_does_nothing(tree: Tree, tmp_path: Path) -> None:
    args = ("build", f"folder:{tree()}", "--scenario", "class", "--tasks", 2, "--out", tmp_path / "out")
    prep_ok(*args)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert "already complete" in prep_ok(*args)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--tasks", 4), ("--quality", 80), ("--resize", "none"), ("--seed", 3), ("--shard-mb", 7),
        ("--formats", "array"), ("--check", "header"), ("--limit-per-class", 2), ("--scenario", "data"),
    ],
)  # fmt: skip
def test_another_configuration_into_the_same_folder_is_refused(
    option: str, value: object, tree: Tree, tmp_path: Path
) -> None:
    settings: dict[str, object] = {"--scenario": "class", "--tasks": 2, "--out": tmp_path / "out"}
    root = tree(classes=4, images=3)
    prep_ok("build", f"folder:{root}", *(word for pair in settings.items() for word in pair), "--formats", "tar")
    changed = {"--formats": "tar", **settings, option: value}
    named = "order" if option == "--seed" else option
    says = ("another configuration", named)
    prep_refused("build", f"folder:{root}", *(word for pair in changed.items() for word in pair), says=says)


def test_a_changed_source_is_refused(tree: Tree, tmp_path: Path) -> None:
    root = tree()
    args = ("build", f"folder:{root}", "--scenario", "class", "--tasks", 2, "--out", tmp_path / "out")
    prep_ok(*args)
    (root / "train" / "class00" / "new.jpg").write_bytes(jpeg_of(picture(77)))
    prep_refused(*args, says=("source fingerprint",))


def test_two_processes_into_one_folder(tmp_path: Path) -> None:
    args = ("build", "synthetic:size=256,train=8,val=1", "--scenario", "joint", "--out", tmp_path / "out")
    first = start(*args)
    while not (tmp_path / "out" / ".build" / "journal").exists():
        assert first.poll() is None
        time.sleep(0.01)
    prep_refused(*args, says=("Another fastcssl-prep is writing",))
    assert first.wait(timeout=120) == 0
    assert prep("verify", tmp_path / "out").returncode == 0


def test_corrupt_images_are_quarantined_and_listed(tree: Tree, tmp_path: Path) -> None:
    root = tree(images=10)
    bad = root / "train" / "class01" / "003.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    text = prep_ok("build", f"folder:{root}", "--scenario", "class", "--tasks", 2, "--out", tmp_path / "out")
    assert "train/class01/003.jpg" in text and "quarantined" in text
    manifest = load_manifest(tmp_path / "out")
    assert [entry.path for entry in manifest.quarantine] == ["train/class01/003.jpg"]
    assert manifest.quarantine[0].reason
    table = load_table(manifest, tmp_path / "out")
    assert len(table) == 80 and table["is_stored"].sum() == 79
    assert not table["is_stored"][manifest.quarantine[0].id]
    assert sum(task.train.count + task.val.count for task in manifest.tasks) == 79
    assert prep("verify", tmp_path / "out").returncode == 0
    # Another split leaves it out too, without moving the others: the order is drawn over all 80.
    prep_ok("split", tmp_path / "out", "--scenario", "data", "--tasks", 3, "--name", "data3")
    other = load_manifest(tmp_path / "out" / "data3.json")
    assert sum(task.train.count + task.val.count for task in other.tasks) == 79
    assert prep("verify", tmp_path / "out").returncode == 0


def test_too_many_corrupt_images_stop_the_build_and_can_be_allowed(tree: Tree, tmp_path: Path) -> None:
    root = tree(images=10)
    for i in range(2):
        (root / "train" / "class01" / f"00{i}.jpg").write_bytes(b"\xff\xd8\xff broken")
    args = ("build", f"folder:{root}", "--scenario", "class", "--tasks", 2, "--out", tmp_path / "out")
    prep_refused(*args, says=("2 corrupt images found; the last one is", "train/class01/00", "--max-corrupt"))
    prep_ok(*args, "--max-corrupt", 0.05)
    assert len(load_manifest(tmp_path / "out").quarantine) == 2


def test_no_corruption_allowed(tree: Tree, tmp_path: Path) -> None:
    root = tree()
    (root / "train" / "class01" / "000.jpg").write_bytes(b"")
    args = ("build", f"folder:{root}", "--scenario", "joint", "--out", tmp_path / "out", "--max-corrupt", 0)
    prep_refused(*args, says=("1 corrupt image found; the last one is", "empty"))


def test_unreadable_files_are_quarantined(tree: Tree, tmp_path: Path) -> None:
    root = tree()
    broken = root / "train" / "class00" / "002.jpg"
    broken.unlink()
    broken.symlink_to(tmp_path / "nowhere.jpg")
    text = prep_ok("build", f"folder:{root}", "--scenario", "joint", "--out", tmp_path / "out")
    assert "cannot be opened" in text


def test_check_header_trusts_what_it_does_not_decode(tree: Tree, tmp_path: Path) -> None:
    root = tree()
    cut = root / "train" / "class01" / "003.jpg"
    cut.write_bytes(cut.read_bytes()[:-200])
    args = ("build", f"folder:{root}", "--scenario", "joint", "--formats", "tar")
    prep_ok(*args, "--out", tmp_path / "header", "--check", "header")
    assert not load_manifest(tmp_path / "header").quarantine
    done = prep("verify", tmp_path / "header")  # decodes, and so finds it
    assert done.returncode == 1 and "does not decode" in done.stdout and "\n1 problem: " in done.stdout
    prep_ok(*args, "--out", tmp_path / "full")
    assert len(load_manifest(tmp_path / "full").quarantine) == 1


def test_mixed_kinds_of_files(tmp_path: Path) -> None:
    """Grey, CMYK, PNG named .jpg, rotated, 16-bit, transparent: all stored as upright 8-bit RGB JPEGs."""
    folder = tmp_path / "source" / "train" / "things"
    folder.mkdir(parents=True)
    image = Image.fromarray(picture(1))
    image.convert("L").save(folder / "grey.jpg")
    image.convert("CMYK").save(folder / "cmyk.jpg")
    image.save(folder / "really_png.jpg", "PNG")
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(folder / "rotated.jpg", exif=exif.tobytes())
    Image.fromarray((np.arange(48 * 64, dtype=np.uint16) * 21).reshape(48, 64)).save(folder / "deep.png")
    image.convert("RGBA").save(folder / "clear.png")
    image.save(folder / "plain.JPEG", "JPEG")
    out = tmp_path / "out"
    prep_ok("build", f"folder:{tmp_path / 'source'}", "--scenario", "joint", "--out", out, "--formats", "tar")
    manifest = load_manifest(out)
    assert not manifest.quarantine and manifest.encoding.num_passed_through == 2  # grey and plain
    keys = (out / "keys.txt").read_text().splitlines()
    for row in load_table(manifest, out):
        with (out / manifest.shards[int(row["tar_shard"])].path).open("rb") as shard:
            shard.seek(int(row["tar_place"]))
            pixels = decoded(shard.read(int(row["tar_bytes"])))
        name = keys[int(row["id"])].rpartition("/")[2]
        assert pixels.shape == ((64, 48, 3) if name == "rotated.jpg" else (48, 64, 3))
        if name in ("really_png.jpg", "clear.png", "plain.JPEG"):
            assert np.abs(pixels.astype(int) - picture(1)).mean() < 8


def test_an_image_larger_than_a_shard(tmp_path: Path) -> None:
    folder = tmp_path / "source" / "train" / "c"
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 256, (1200, 1400, 3), dtype=np.uint8)
    (folder / "huge.jpg").write_bytes(jpeg_of(noise, quality=95))
    (folder / "small.jpg").write_bytes(jpeg_of(picture(0)))
    args = ("build", f"folder:{tmp_path / 'source'}", "--scenario", "joint", "--resize", "none", "--shard-mb", 1)
    prep_refused(*args, "--out", tmp_path / "out", says=("huge.jpg", "more than a whole shard", "--shard-mb"))


def test_array_wants_one_size(tmp_path: Path) -> None:
    folder = tmp_path / "source" / "train" / "c"
    folder.mkdir(parents=True)
    for i, width in enumerate((64, 64, 60)):
        (folder / f"{i}.jpg").write_bytes(jpeg_of(picture(0, 48, width)))
    args = ("build", f"folder:{tmp_path / 'source'}", "--scenario", "joint", "--formats", "array")
    prep_refused(*args, "--out", tmp_path / "out", says=("array format stores images of one size", "square:N"))


def test_a_full_disk_loses_nothing_whole(tmp_path: Path) -> None:
    """The operating system's limit on file size stands for the disk: its error arrives in the same place."""
    root = big_tree(tmp_path / "source", classes=2)
    out = tmp_path / "out"
    args = ("build", f"folder:{root}", "--scenario", "joint", "--shard-mb", 1, "--resize", "none", "--out", out)
    command = [sys.executable, "-m", "dataprep.cli", *map(str, args)]

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (900_000, resource.RLIM_INFINITY))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=120)
    assert (
        done.returncode == 2 and "is full" in done.stderr and "run the same command" in done.stderr.replace("\n", " ")
    )
    assert "Traceback" not in done.stderr
    assert not list(out.rglob("*.part"))
    prep_ok(*args)
    assert prep("verify", out).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounting needs root")
def test_a_really_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        root = big_tree(tmp_path / "source", classes=2)
        args = ("build", f"folder:{root}", "--scenario", "joint", "--shard-mb", 1, "--resize", "none")
        prep_refused(*args, "--out", disk / "out", says=("is full", os.strerror(errno.ENOSPC)))
        sealed = [json.loads(line) for line in (disk / "out" / ".build" / "journal").read_text().splitlines()]
        assert sealed and all((disk / "out" / part["files"][0]["path"]).exists() for part in sealed)
        subprocess.run(["mount", "-o", "remount,size=60m", disk], check=True)
        assert "Resumed after" in prep_ok(*args, "--out", disk / "out")
        assert prep("verify", disk / "out").returncode == 0
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_an_output_that_cannot_be_written(tree: Tree, tmp_path: Path) -> None:
    args = ("build", f"folder:{tree()}", "--scenario", "joint", "--out")
    if os.geteuid() == 0:  # root may write anywhere, but not there
        prep_refused(*args, "/sys/fastcssl", says=("Cannot write into", "--out"))
    else:
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o555)
        prep_refused(*args, locked / "out", says=("Cannot write into", "--out"))
    in_the_way = tmp_path / "file"
    in_the_way.write_text("x")
    prep_refused(*args, in_the_way, says=("Writing into",))


def test_an_output_inside_the_source(tree: Tree) -> None:
    root = tree()
    prep_refused("build", f"folder:{root}", "--scenario", "joint", "--out", root / "out", says=("lies inside",))
    assert not (root / "out").exists()


def test_file_names_of_any_bytes(tree: Tree, tmp_path: Path) -> None:
    root = tree(images=3)
    os.rename(root / "train" / "class00" / "000.jpg", os.fsencode(root / "train" / "class00") + b"/[bold]\xff.jpg")
    broken = os.fsencode(root / "train" / "class01") + b"/[red]\xfe.jpg"
    Path(os.fsdecode(broken)).write_bytes(b"\xff\xd8\xff")
    text = prep_ok("build", f"folder:{root}", "--scenario", "joint", "--out", tmp_path / "out")
    assert "[red]" in text
    manifest = load_manifest(tmp_path / "out")
    assert manifest.quarantine[0].path == "train/class01/[red]\udcfe.jpg"
    assert prep("verify", tmp_path / "out").returncode == 0


def test_killed_while_tidying_up_it_is_complete(tree: Tree, tmp_path: Path) -> None:
    args = ("build", f"folder:{tree()}", "--scenario", "joint", "--out", tmp_path / "out")
    prep_ok(*args)
    (tmp_path / "out" / ".build" / "rows").mkdir(parents=True)  # what a kill in the middle of it leaves
    assert "already complete" in prep_ok(*args)


def test_a_folder_with_other_files_is_not_written_into(tree: Tree, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("do not touch")
    prep_refused("build", f"folder:{tree()}", "--scenario", "joint", "--out", out, says=("thesis.txt", "empty folder"))
    assert [p.name for p in out.iterdir() if p.name != ".lock"] == ["thesis.txt"]
