"""Gives mutated image files of every format to fastcssl-prep: each is stored or quarantined, at a bounded cost.

One fault is a folder of a hundred mutants, which one build reads and one verification checks.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from chaos import specimens
from chaos.experiment import Fault, Outcome
from chaos.nursery import Errand, nursery

NUM_MUTANTS = 100
_QUICK = ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")
_ROUNDS = 20
_CPU_SECONDS = 60
_MORE_BYTES = 1 << 30


class Images:
    name = "images"

    def missing(self) -> str | None:
        return None

    def faults(self, seed: int) -> Iterable[Fault]:
        every = [name for name in (*_QUICK, *specimens.SUPPORTED, *specimens.STRANGE) if specimens.can_make(name)]
        for number in range(_ROUNDS):
            for format in dict.fromkeys(every):
                kind = f"mutated {format}" if format in specimens.SUPPORTED else "mutated image of a strange format"
                is_quick = number == 0 and format in _QUICK
                yield Fault(kind=kind, name=f"{format} {seed}.{number}", is_quick=is_quick)

    def prepare(self, folder: Path) -> None:
        del folder  # there is nothing to compare with: a mutant may be stored or not

    def inject(self, fault: Fault, folder: Path, scratch: Path) -> Outcome:
        del folder
        format = fault.name.split()[0]
        _write_mutants(scratch / "source", format, random.Random(fault.name))
        out = scratch / "prepared"
        errand = Errand(
            target="chaos.experiments.images:build_and_verify",
            arguments={"source": str(scratch / "source"), "out": str(out)},
            cpu_seconds=2 * _CPU_SECONDS,
        )
        ended = nursery().run(errand, scratch / "printed.txt")
        broken = ended.broken(cpu_seconds=_CPU_SECONDS, more_bytes=_MORE_BYTES)
        statuses = ended.value or []
        if ended.value is not None and statuses != [0, 0]:
            broken.append(f"build and verify ended with {statuses}: {ended.last_line}")
        if not broken:
            broken += _miscounted(out)
        quarantined = _quarantined(out)
        return Outcome(tuple(broken), f"{NUM_MUTANTS} mutants, {quarantined} quarantined, statuses {statuses}")


def build_and_verify(source: str, out: str) -> list[int]:
    """Returns the exit statuses of both commands; this runs in a child."""
    from dataprep import cli

    encode = ["--resize", "max:64", "--formats", "tar", "--workers", "1", "--max-corrupt", "1"]
    built = cli.main(["build", f"folder:{source}", "--scenario", "joint", *encode, "--out", out])
    return [built, cli.main(["verify", out, "--workers", "1"])] if built == 0 else [built]


def _write_mutants(source: Path, format: str, rng: random.Random) -> None:
    files = specimens.files_of(format)
    suffix = "pgm" if format == "PGM" else specimens.SUFFIX.get(format, "jpg")
    folder = source / "class"
    folder.mkdir(parents=True)
    Image.new("RGB", (32, 32), (200, 30, 60)).save(folder / "whole.png")  # a build needs one that can be decoded
    for number in range(NUM_MUTANTS):
        (folder / f"{number:03d}.{suffix}").write_bytes(specimens.mutant(files, rng))


def _quarantined(out: Path) -> int | str:
    path = out / "manifest.json"
    return len(json.loads(path.read_text())["quarantine"]) if path.is_file() else "unknown"


def _miscounted(out: Path) -> list[str]:
    """Returns a sentence if the manifest does not account for every file."""
    manifest = json.loads((out / "manifest.json").read_text())
    stored = sum(shard["count"] for shard in manifest["shards"])
    quarantined = len(manifest["quarantine"])
    if stored + quarantined == NUM_MUTANTS + 1:
        return []
    return [f"{NUM_MUTANTS + 1} files became {stored} stored and {quarantined} quarantined samples"]


EXPERIMENT = Images()
