"""The part that experiments with commands have in common: the fork server, and references that they share."""

import zlib
from pathlib import Path
from random import Random

from chaos.shim.plan import NoCompiler, library
from chaos.subjects import Bench


class Laboratory:
    """The base of experiments that run commands through the fork server."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def missing(self) -> str | None:
        try:
            library()
        except NoCompiler as error:
            return str(error)
        return None

    def prepare(self, folder: Path) -> None:
        self._folder = folder
        self.bench(folder).prepare()

    @property
    def is_prepared(self) -> bool:
        return self._folder is not None

    def bench(self, folder: Path | None = None) -> Bench:
        """Return the references. They lie beside `folder`, because the experiments of a campaign share them."""
        found = folder or self._folder
        assert found is not None, "prepare comes first"
        return Bench(found.parent / "commands")


def chance_of(name: str) -> Random:
    """Return random numbers that depend only on the name of a fault."""
    return Random(zlib.crc32(name.encode()))
