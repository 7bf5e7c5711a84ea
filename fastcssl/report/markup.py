"""Builds HTML safely: text is escaped unless it is already Html."""

import re
from html import escape


class Html(str):
    """A string that is already markup."""

    __slots__ = ()


_VOID = ("meta", "br", "hr")
_FLAG = re.compile(r"(?<!\S)--[a-z][a-z0-9.-]*[a-z0-9]")


def el(name: str, /, *children: "str | Html | None", **attributes: str | None) -> Html:
    """Returns an element. Children and attributes that are None are left out; `class_` loses its underscore."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: "str | Html | None") -> Html:
    """Returns the children one after the other, with text escaped."""
    return Html("".join(c if isinstance(c, Html) else _escaped(c) for c in children if c is not None))


def _escaped(text: str) -> str:
    """Returns text as markup. A browser would break a line after the hyphens of a flag such as --out."""
    return _FLAG.sub(r'<span class="flag">\g<0></span>', escape(text, quote=False))


def table(head: list["str | Html"], rows: list[list["str | Html"]], *, classes: list[str | None] | None = None) -> Html:
    """Returns a table in a box that scrolls. The first cell of a row is its heading. `classes`: one per column."""
    kinds = classes or [None] * len(head)
    top = el("tr", *(el("th", cell, scope="col", class_=kind) for cell, kind in zip(head, kinds, strict=True)))
    body = [
        el(
            "tr",
            el("th", row[0], scope="row"),
            *(cell if _is_cell(cell) else el("td", cell, class_=kind) for cell, kind in _pairs(row, kinds)),
        )
        for row in rows
    ]
    return el("div", el("table", el("thead", top), el("tbody", *body)), class_="scroll")


def _pairs(row: list["str | Html"], kinds: list[str | None]) -> "list[tuple[str | Html, str | None]]":
    return list(zip(row[1:], kinds[1:], strict=True))


def _is_cell(cell: "str | Html") -> bool:
    return isinstance(cell, Html) and cell.startswith("<td")
