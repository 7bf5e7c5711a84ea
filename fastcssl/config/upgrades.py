"""Finds the values that an older checkpoint implies for settings that did not exist when it was written."""

import dataclasses
from typing import Any

from fastcssl.config.config import plain


def implied(config: Any, path: str = "") -> dict[str, Any]:
    """Returns, by dotted key, the value that reproduces how runs behaved before the setting existed.

    This is the field's default, unless the field names another value: `field(default=..., metadata={"before": value})`.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        key, value = f"{path}{field.name}", getattr(config, field.name)
        if "before" in field.metadata:
            before = field.metadata["before"]
        elif field.default is not dataclasses.MISSING:
            before = field.default
        elif field.default_factory is not dataclasses.MISSING:
            before = field.default_factory()
        else:
            before = dataclasses.MISSING
        if dataclasses.is_dataclass(value):
            # Look at the class in use, not at the default's class: strategies have different settings.
            found |= implied(value, f"{key}.")
        elif before is not dataclasses.MISSING:
            found[key] = plain(before)
    return found
