"""Reads DomainNet by its official lists, {domain}_{train,test}.txt. Each line is "path label"."""

import os
from pathlib import Path

from dataprep.errors import PrepError
from dataprep.samples import Samples
from dataprep.scenario import DOMAINNET_ORDER
from dataprep.sources import Source, SourceRequest
from dataprep.suggest import nearest

KINDS = ("domainnet",)
_MAX_DIGITS = 5  # of a label; there is a name for every number up to the largest


def open_source(request: SourceRequest) -> Source:
    request.refuse(classes=True)
    root = request.root()
    for name in request.domains:
        if name not in DOMAINNET_ORDER:
            raise PrepError(f"'{name}' is not a domain of DomainNet. {nearest(name, DOMAINNET_ORDER)}")
    domains = tuple(name for name in DOMAINNET_ORDER if name in (request.domains or DOMAINNET_ORDER))
    folders = _FolderCache(root)
    class_names: dict[int, str] = {}
    rows: list[tuple[str, int, int, bool]] = []
    for is_val, split in ((False, "train"), (True, "test")):
        for domain, name in enumerate(domains):
            listed = _read_list(root / f"{name}_{split}.txt", folders, class_names)
            rows.extend((key, label, domain, is_val) for key, label in listed)
    num_classes = max(class_names, default=-1) + 1
    return Source(
        kind=request.kind,
        classes=tuple(class_names.get(label, f"class {label}") for label in range(num_classes)),
        domains=domains,
        samples=Samples.collect(rows),
        payload=lambda sample: f"{root}/{sample.key}",
    )


def _read_list(file: Path, folders: "_FolderCache", class_names: dict[int, str]) -> list[tuple[str, int]]:
    """Returns the (path, label) lines of a list, sorted by label and path."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise PrepError(
            f"The list {file} is missing. Put DomainNet's official lists beside the domain folders, "
            "or choose the domains you have with --domains."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PrepError(f"The list {file} cannot be read ({error}). Download it again.") from None
    listed: list[tuple[str, int]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        key, _, label = line.strip().rpartition(" ")
        if not key or not label.isdecimal() or len(label) > _MAX_DIGITS:
            raise PrepError(
                f'{file}, line {number}: expected "path label", found "{line.strip()[:80]}". Correct it, or download '
                "the list again."
            )
        if os.path.isabs(key) or ".." in key.split("/"):
            raise PrepError(f"{file}, line {number}: {key} leaves the data set's folder. Use paths relative to it.")
        if not folders.has(key):
            raise PrepError(
                f"{file}, line {number}: {folders.root / key} does not exist. Unpack that domain again, "
                "or remove the line."
            )
        class_names.setdefault(int(label), Path(key).parent.name)
        listed.append((key, int(label)))
    if not listed:
        raise PrepError(f"The list {file} is empty. Download it again.")
    return sorted(listed, key=lambda row: (row[1], row[0]))


class _FolderCache:
    """Tells which files exist. It lists each folder once, because half a million look-ups are slow on network disks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._names: dict[str, frozenset[str]] = {}

    def has(self, key: str) -> bool:
        folder, _, name = key.rpartition("/")
        if folder not in self._names:
            path = self.root / folder
            self._names[folder] = frozenset(os.listdir(path)) if path.is_dir() else frozenset()
        return name in self._names[folder]
