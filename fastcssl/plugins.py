"""Methods and strategies by name: one module each in a package of ours, or an entry point of someone else's package."""

import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from dataprep.suggest import nearest
from fastcssl.errors import UserError

Plugin = TypeVar("Plugin")


class Plugins(Generic[Plugin]):
    """`what` is "method": each module of `package` holds a class METHOD, and others' are entry points of `group`."""

    def __init__(self, what: str, package: str, group: str) -> None:
        self._what, self._package, self._group = what, package, group

    def _own(self) -> tuple[str, ...]:
        path = importlib.import_module(self._package).__path__
        return tuple(sorted(info.name for info in pkgutil.iter_modules(path)))

    def names(self) -> tuple[str, ...]:
        return tuple(sorted({*self._own(), *(point.name for point in entry_points(group=self._group))}))

    def find(self, name: str) -> type[Plugin]:
        """The class of a module here, or what an entry point names."""
        if name in self._own():
            found: Any = getattr(importlib.import_module(f"{self._package}.{name}"), self._what.upper())
        elif name in self.names():
            point = next(iter(entry_points(group=self._group, name=name)))
            try:
                found = point.load()
            except Exception as error:  # someone else's code
                raise UserError(
                    f"The {self._what} {name!r} ({point.value}) cannot be loaded: {error}. Repair or uninstall its "
                    "package."
                ) from error
        else:
            raise ValueError(f"There is no {self._what} {name!r}. {nearest(name, self.names())}")
        part: type[Plugin] = found
        return part

    def of(self, config: object) -> type[Plugin]:
        """The one that a configuration belongs to."""
        for known in (self._own, self.names):  # the second is slow: it reads what every package says of itself
            for name in known():
                try:
                    found: Any = self.find(name)
                except UserError:  # a plug-in that is not the one asked for
                    continue
                if type(config) is found.Config:
                    part: type[Plugin] = found
                    return part
        raise ValueError(f"{type(config).__name__} belongs to no {self._what}. Known: {', '.join(self.names())}.")
