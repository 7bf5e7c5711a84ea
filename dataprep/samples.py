"""Stores the samples of a data set in columns.

A million samples take hundreds of megabytes as Python objects and tens as columns, and splitting columns into tasks is
arithmetic on arrays. Row i of every column belongs to the same sample, and rows are sorted by id.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NO_DOMAIN = -1


class Sample(NamedTuple):
    """One sample. Its `id` does not depend on the scenario, format, encoding or --limit-per-class."""

    id: int
    key: str
    label: int
    domain: int
    is_val: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """The samples of a data set, one array per column."""

    id_S: npt.NDArray[np.int64]
    label_S: npt.NDArray[np.int32]
    domain_S: npt.NDArray[np.int32]
    is_val_S: npt.NDArray[np.bool_]
    _keys: bytes = field(repr=False)  # all keys without separators, in UTF-8
    _key_ends_S: npt.NDArray[np.int64] = field(repr=False)

    @classmethod
    def collect(cls, rows: Iterable[tuple[str, int, int, bool]]) -> "Samples":
        """Returns samples from (key, label, domain, is_val) rows. Their order gives the ids."""
        keys, ends, labels, domains, is_val = bytearray(), [], [], [], []
        for key, label, domain, val in rows:
            keys += key.encode("utf-8", "surrogateescape")
            ends.append(len(keys))
            labels.append(label)
            domains.append(domain)
            is_val.append(val)
        return cls(
            id_S=np.arange(len(ends), dtype=np.int64),
            label_S=np.array(labels, np.int32),
            domain_S=np.array(domains, np.int32),
            is_val_S=np.array(is_val, np.bool_),
            _keys=bytes(keys),
            _key_ends_S=np.array(ends, np.int64),
        )

    def __len__(self) -> int:
        return len(self.id_S)

    def __iter__(self) -> Iterator[Sample]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, row: int) -> Sample:
        return Sample(
            int(self.id_S[row]),
            self.key(row),
            int(self.label_S[row]),
            int(self.domain_S[row]),
            bool(self.is_val_S[row]),
        )

    def key(self, row: int) -> str:
        """Returns the source's name of the sample in a row."""
        begin = int(self._key_ends_S[row - 1]) if row else 0
        return self._keys[begin : int(self._key_ends_S[row])].decode("utf-8", "surrogateescape")

    def take(self, rows: npt.NDArray[np.int64]) -> "Samples":
        """Returns the samples of some rows, given in rising order. Their ids do not change."""
        begins_S = np.concatenate([[0], self._key_ends_S[:-1]]) if len(self) else self._key_ends_S
        lengths = (self._key_ends_S - begins_S)[rows]
        return Samples(
            id_S=self.id_S[rows],
            label_S=self.label_S[rows],
            domain_S=self.domain_S[rows],
            is_val_S=self.is_val_S[rows],
            _keys=b"".join(self._keys[begins_S[row] : self._key_ends_S[row]] for row in rows),
            _key_ends_S=np.cumsum(lengths, dtype=np.int64),
        )

    def limited(self, per_class: int) -> "Samples":
        """Returns the first `per_class` samples of every class, in each split and domain."""
        group_S = (self.label_S.astype(np.int64) << 17) | ((self.domain_S.astype(np.int64) + 1) << 1) | self.is_val_S
        order = np.argsort(group_S, kind="stable")
        sorted_S = group_S[order]
        first_S = np.r_[True, sorted_S[1:] != sorted_S[:-1]] if len(self) else np.zeros(0, np.bool_)
        begin_S = np.maximum.accumulate(np.where(first_S, np.arange(len(self)), 0))
        rank_S = np.arange(len(self)) - begin_S
        return self.take(np.sort(order[rank_S < per_class]))

    def fingerprint(self) -> str:
        """Returns a digest of the ids, keys, labels, domains and splits. File contents are not read."""
        digest = hashlib.sha256()
        for column in (self.id_S, self.label_S, self.domain_S, self.is_val_S, self._key_ends_S):
            digest.update(np.ascontiguousarray(column).tobytes())
        digest.update(self._keys)
        return digest.hexdigest()
