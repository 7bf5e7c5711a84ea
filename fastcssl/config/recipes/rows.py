"""What a table of numbers is made of, and the names of the sources."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Settings = Literal["matched", "published"]
Authors = Literal["cassle", "pnr"]

COMMAND_LINE = "command line"
OURS = "ours"
TRAINING, WEIGHTS, TEXT = "paper table 14", "paper table 15", "paper text"
SCRIPT: dict[Authors, str] = {"cassle": "CaSSLe script", "pnr": "PNR script"}
CODE: dict[Authors, str] = {"cassle": "CaSSLe code", "pnr": "PNR code"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Values of one source by dotted key, and where they hold: everywhere, but for what is named (words by spaces)."""

    source: str
    values: Mapping[str, Any]
    recipe: str = ""
    data: str = ""  # as fastcssl-prep names it
    scenario: str = ""
    family: str = ""
    method: str = ""
    strategy: str = ""
    authors: str = ""  # whose way of training it is
    settings: str = ""

    def holds(self, where: Mapping[str, str]) -> bool:
        """Returns whether the values hold for this recipe, data, method and so on."""
        return all(not getattr(self, key) or word in getattr(self, key).split() for key, word in where.items())


RowTable = tuple[Row, ...]


def row(source: str, values: Mapping[str, Any], **where: str) -> Row:
    """Returns a row of a table."""
    return Row(source=source, values=values, **where)
