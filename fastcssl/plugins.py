"""Finds methods and strategies by name: modules of our own packages, or entry points of other packages."""

import importlib
import pkgutil
from typing import Any, Generic, TypeVar

from dataprep.extensions import extension_names, load_extension
from dataprep.suggest import nearest
from fastcssl.errors import UserError

Plugin = TypeVar("Plugin")


class Plugins(Generic[Plugin]):
    """The plug-ins of one kind. If `what` is "method", each module of `package` holds a class METHOD.

    Plug-ins of other packages are entry points of `group`.
    """

    def __init__(self, what: str, package: str, group: str) -> None:
        self._what, self._package, self._group = what, package, group

    def _own(self) -> tuple[str, ...]:
        path = importlib.import_module(self._package).__path__
        return tuple(sorted(info.name for info in pkgutil.iter_modules(path)))

    def names(self) -> tuple[str, ...]:
        """Returns all names, sorted."""
        return tuple(sorted({*self._own(), *extension_names(self._group)}))

    def find(self, name: str) -> type[Plugin]:
        """Returns the class of one of our own modules, or the class that an entry point names."""
        if name in self._own():
            found: Any = getattr(importlib.import_module(f"{self._package}.{name}"), self._what.upper())
        elif name in self.names():
            found = load_extension(self._what, name, self._group)
        else:
            raise ValueError(f"There is no {self._what} {name!r}. {nearest(name, self.names())}")
        part: type[Plugin] = found
        return part

    def of(self, config: object) -> type[Plugin]:
        """Returns the class that a configuration belongs to."""
        for known in (self._own, self.names):  # the second is slow: it reads the metadata of every installed package
            for name in known():
                try:
                    found: Any = self.find(name)
                except UserError:  # another plug-in, which cannot be loaded
                    continue
                if type(config) is found.Config:
                    part: type[Plugin] = found
                    return part
        raise ValueError(
            f"{type(config).__name__} does not belong to a {self._what}. Known: {', '.join(self.names())}."
        )
