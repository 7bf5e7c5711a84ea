"""Looks up a package's public names when they are first used, so that importing the package costs almost nothing."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def homes(by_module: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the module of each name, given the names of each module: {"api": ("build_data", ...)}."""
    return {name: module for module, names in by_module.items() for name in names}


def on_demand(package: dict[str, Any], home: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the package's `__getattr__` and `__dir__`. `package` is the package's globals()."""
    own = package["__name__"]

    def __getattr__(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {own!r} has no attribute {name!r}")
        found = package[name] = getattr(importlib.import_module(f"{own}.{home[name]}"), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*package, *package["__all__"]})

    return __getattr__, __dir__
