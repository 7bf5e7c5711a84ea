"""Gives mutated JPEGs, tar shards and array shards to the ordinary build of the codec and the loader.

One fault is a hundred mutants, which a child reads. They are made from whole files and the fuzzers' dictionaries.
Unlike the fuzzers, this needs no clang, and it includes the .npy headers, which Python parses.
"""

import hashlib
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from chaos import fuzzers, specimens
from chaos.experiment import Fault, Outcome
from chaos.nursery import Errand, nursery
from chaos.once import once

_ROUNDS = 60
NUM_MUTANTS = 100
_NUM_QUICK_MUTANTS = 30
_CPU_SECONDS = 60
_MORE_BYTES = 1 << 30
_TITLES = {"jpeg": "JPEG", "tar": "tar shard", "npy": "array shard"}


class Mutants:
    name = "mutants"

    def missing(self) -> str | None:
        return None

    def faults(self, seed: int) -> Iterable[Fault]:
        for number in range(_ROUNDS):
            for what, title in _TITLES.items():
                yield Fault(f"mutated {title} through codec or loader", f"{what} {seed}.{number}", number == 0)

    def prepare(self, folder: Path) -> None:
        once(folder / "prepared", _prepare)

    def inject(self, fault: Fault, folder: Path, scratch: Path) -> Outcome:
        count = _NUM_QUICK_MUTANTS if fault.is_quick else NUM_MUTANTS
        errand = Errand(
            target="chaos.experiments.mutants:read_mutants",
            arguments={
                "what": fault.name.split()[0],
                "seed": fault.name,
                "count": count,
                "prepared": str(folder / "prepared"),
                "scratch": str(scratch / "data"),
            },
            cpu_seconds=2 * _CPU_SECONDS,
        )
        ended = nursery().run(errand, scratch / "printed.txt")
        broken = ended.broken(cpu_seconds=_CPU_SECONDS, more_bytes=_MORE_BYTES)
        if broken:
            broken[0] += f" (while reading {ended.last_line})"
        value = ended.value or {"broken": [], "seen": "no result"}
        return Outcome((*broken, *value["broken"]), f"{count} mutants: {value['seen']}")


def _prepare(folder: Path) -> None:
    from dataprep import build_data

    source = "synthetic:classes=20,train=1,val=1"
    build_data(source, folder, scenario="joint", formats=("tar", "array"), num_workers=1)


# ---- In a child ------------------------------------------------------------------------------------------------------


def read_mutants(what: str, seed: str, count: int, prepared: str, scratch: str) -> dict[str, Any]:
    """Reads mutants and returns what was broken and a count of the results. Prints the one that is being read."""
    rng = random.Random(seed)
    results: dict[str, int] = {}
    broken: list[str] = []
    read, files = _reader(what, Path(prepared), Path(scratch))
    words = fuzzers.tokens(what)
    for number in range(count):
        content = files[number] if number < len(files) else specimens.mutant(files, rng)
        if rng.random() < 0.5 and number >= len(files):
            content = fuzzers.with_token(rng.choice(files), rng.choice(words), rng)
        sys.stdout.write(f"mutant {number} of {seed}\n")
        sys.stdout.flush()
        result = read(content)
        results[result] = results.get(result, 0) + 1
        if result.startswith("raised"):
            broken.append(f"mutant {number} of {seed} {result}")
    return {"broken": broken[:5], "seen": ", ".join(f"{n} x {result}" for result, n in sorted(results.items()))}


def _reader(what: str, prepared: Path, scratch: Path) -> tuple[Callable[[bytes], str], list[bytes]]:
    """Returns a function that reads one mutant, and the whole files to mutate."""
    if what == "jpeg":
        return _store, specimens.jpegs()
    shutil.copytree(prepared, scratch)
    suffix = ".tar" if what == "tar" else ".npy"
    manifest = json.loads((prepared / "manifest.json").read_text())
    shard = next(shard for shard in manifest["shards"] if shard["path"].endswith(suffix) and shard["split"] == "train")
    whole = (prepared / shard["path"]).read_bytes()

    def read(content: bytes) -> str:
        (scratch / shard["path"]).write_bytes(content)
        # The manifest vouches for the mutant, so that only what reads the shard can refuse it.
        shard["bytes"], shard["sha256"] = len(content), hashlib.sha256(content).hexdigest()
        (scratch / "manifest.json").write_text(json.dumps(manifest))
        return _load(scratch, "native" if what == "tar" else "resident")

    # Half of the changes are in the header.
    return read, [whole]


def _store(content: bytes) -> str:
    """Returns how the codec takes a file, in each of its ways."""
    from dataprep._codec import Transcoder

    results = []
    for fit, size, want_jpeg in (("none", 0, True), ("square", 16, False), ("max", 9, True)):
        codec = Transcoder(
            fit=fit,
            size=size,
            quality=80,
            check_in_full=True,
            want_jpeg=want_jpeg,
            want_pixels=not want_jpeg,
            num_threads=1,
        )
        codec.submit_file(content)
        try:
            results.append(codec.pop(10.0).status.name)
        except Exception as error:
            return f"raised {type(error).__name__}: {error}"
    return "/".join(sorted(set(results)))


def _load(folder: Path, backend: str) -> str:
    """Returns how the loader takes a folder: it reads an epoch of every task."""
    from dataprep.errors import UserError
    from fastcssl.data.loader import Loader, LoaderConfig
    from fastcssl.data.policies import policy
    from fastcssl.data.prepared import Prepared, Selection
    from fastcssl.data.views import with_size
    from fastcssl.distributed.world import World

    views = with_size(policy("pnr-simclr-cifar"), 8)
    try:
        data = Prepared.open(folder)
        config = LoaderConfig(policy=views, batch_size=4, num_threads=1, loader=backend, max_corrupt=0.5)
        with Loader(data, config, World()) as loader:
            stream = loader.open(Selection(tasks=(0,)))
            for _ in stream.epoch(0):
                pass
            return "read, some replaced" if stream.num_replaced else "read"
    except UserError:
        return "refused"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"


EXPERIMENT = Mutants()
