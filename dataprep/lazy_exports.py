"""A package's public names, looked up when they are first used: importing the package costs nothing."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def homes(by_module: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Of {"api": ("build_data", ...)}: the module of each name."""
    return {name: module for module, names in by_module.items() for name in names}


def on_demand(package: dict[str, Any], home: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The package's `__getattr__` and `__dir__`. `package` is its globals()."""
    own = package["__name__"]

    def __getattr__(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {own!r} has no attribute {name!r}")
        found = package[name] = getattr(importlib.import_module(f"{own}.{home[name]}"), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*package, *package["__all__"]})

    return __getattr__, __dir__
