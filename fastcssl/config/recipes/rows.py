"""The rows that tables of numbers consist of, and the names of their sources."""

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
    """Values from one source, by dotted key, and the runs they apply to.

    Each field after `values` restricts the row to the words it lists, separated by spaces; "" does not restrict it.
    """

    source: str
    values: Mapping[str, Any]
    recipe: str = ""
    data: str = ""  # its name in fastcssl-prep
    scenario: str = ""
    family: str = ""
    method: str = ""
    strategy: str = ""
    authors: str = ""  # whose way of training it is
    settings: str = ""

    def holds(self, where: Mapping[str, str]) -> bool:
        """Returns whether the values apply to this recipe, data, method and so on."""
        return all(not getattr(self, key) or word in getattr(self, key).split() for key, word in where.items())


RowTable = tuple[Row, ...]


def row(source: str, values: Mapping[str, Any], **where: str) -> Row:
    """Returns a row of a table."""
    return Row(source=source, values=values, **where)
