"""Loads tar shards with the native engine: memory-mapped, read ahead, each JPEG decoded once for all its views."""

from typing import ClassVar

from fastcssl.data.backends import BackendConfig
from fastcssl.data.backends.engine import EngineBackend
from fastcssl.data.prepared import Prepared


class NativeBackend(EngineBackend):
    name: ClassVar[str] = "native"
    formats: ClassVar[tuple[str, ...]] = ("tar",)

    def __init__(self, data: Prepared, config: BackendConfig) -> None:
        super().__init__(data, config, "tar")

    def _map(self, shard: int) -> int:
        return self._live().map(str(self._path(shard)), self._data.manifest.shards[shard].bytes)


BACKEND = NativeBackend
