"""A part: a run of samples that all streamed formats write side by side, and that is then sealed."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dataprep.encode import Encoded
from dataprep.errors import PrepError
from dataprep.journal import SealedFile, SealedPart
from dataprep.manifest import QuarantineEntry, SplitName, entry_of, make_folder, settle, sha256_of
from dataprep.progress import human_bytes
from dataprep.table import save_table, table_dtype
from dataprep.writers import ShardWriter, StreamedFormat

_UNFINISHED = ".part"


class Part:
    """A part that is being written."""

    def __init__(
        self,
        task: int,
        split: SplitName,
        number: int,
        targets: Mapping[StreamedFormat, Path],
        *,
        limit_bytes: int,
    ) -> None:
        self.task, self.split, self.number = task, split, number
        self._targets = dict(targets)
        self._limit_bytes = limit_bytes
        self._writers: dict[StreamedFormat, ShardWriter] = {}
        self._rows: list[tuple[Any, ...]] = []
        self._quarantine: list[QuarantineEntry] = []
        self._num_passed_through = 0
        self._num_warnings = 0
        self._began = time.monotonic()
        for format, path in self._targets.items():
            make_folder(path.parent)
            self._writers[format] = format.open(path.with_name(path.name + _UNFINISHED))

    def overflows(self, encoded: Encoded) -> bool:
        """Returns whether a new part must begin before this sample."""
        largest = max(writer.size_with(encoded) for writer in self._writers.values())
        if largest <= self._limit_bytes:
            return False
        if not self._rows:
            raise PrepError(
                f"{encoded.sample.key} needs {human_bytes(largest)}, more than a whole shard, which may have "
                f"{human_bytes(self._limit_bytes)}. Raise --shard-mb, or shrink images with --resize."
            )
        return True

    def add(self, encoded: Encoded) -> None:
        """Writes a sample in every format."""
        sample = encoded.sample
        places = [number for writer in self._writers.values() for number in (-1, *writer.add(encoded))]
        self._rows.append(
            (sample.id, sample.label, sample.domain, sample.is_val, True, encoded.width, encoded.height, *places)
        )
        self._num_passed_through += encoded.passed_through
        self._num_warnings += encoded.num_warnings > 0

    def quarantine(self, encoded: Encoded) -> None:
        """Records a damaged sample, which is not written."""
        self._quarantine.append(QuarantineEntry(id=encoded.sample.id, path=encoded.sample.key, reason=encoded.fault))

    def seal(self, out: Path, rows_path: Path, should_stop: Callable[[], bool]) -> SealedPart:
        """Completes the files and moves them to their final names. They count once the caller journals the result.

        When this returns, all that the result names outlasts a power loss.
        """
        targets = self._targets.items() if self._rows else ()
        files = [self._seal_file(format, path, out, should_stop) for format, path in targets]
        if not self._rows:
            self.abandon()
        save_table(np.array(self._rows, table_dtype([f.name for f in self._targets])), rows_path)
        return SealedPart(
            task=self.task,
            split=self.split,
            number=self.number,
            num_consumed=len(self._rows) + len(self._quarantine),
            num_passed_through=self._num_passed_through,
            num_warnings=self._num_warnings,
            seconds=time.monotonic() - self._began,
            files=files,
            quarantine=[asdict(entry) for entry in self._quarantine],
            rows=asdict(entry_of(rows_path, out)),
        )

    def _seal_file(self, format: StreamedFormat, path: Path, out: Path, should_stop: Callable[[], bool]) -> SealedFile:
        writer = self._writers[format]
        writer.finish()
        unfinished = path.with_name(path.name + _UNFINISHED)
        digest = sha256_of(unfinished, should_stop)
        index = None
        if writer.index is not None:
            index_path = path.with_name(path.name + ".idx")
            settle(writer.index, index_path)
            index = asdict(entry_of(index_path, out))
        settle(unfinished, path)
        return SealedFile(
            path=path.relative_to(out).as_posix(),
            format=format.name,
            bytes=path.stat().st_size,
            sha256=digest,
            count=len(self._rows),
            index=index,
        )

    def abandon(self) -> None:
        """Closes and removes the unfinished files."""
        for format, writer in self._writers.items():
            with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
                writer.abandon()
            path = self._targets[format]
            path.with_name(path.name + _UNFINISHED).unlink(missing_ok=True)
            if writer.index is not None:
                writer.index.unlink(missing_ok=True)
