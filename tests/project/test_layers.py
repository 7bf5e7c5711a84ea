"""Imports between the folders of fastcssl point one way: a stage may use the stages below it, never those above."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = (  # lowest first; folders of one layer do not import each other
    ("dataprep", "errors", "plugins"),
    ("ops", "distributed", "runs"),
    ("data",),
    ("learn",),
    ("config",),
    ("evaluate",),
    ("train",),
    ("report",),
    ("study",),
    ("api",),
    ("doctor",),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Kept apart from its layer: these few are allowed, each for the reason given.
ALLOWED = {
    ("plugins", "errors"),  # what a user's package did wrong is a user's error
    ("errors", "dataprep"),  # one family of errors
    ("plugins", "dataprep"),  # the nearest name
    ("dataprep", "data"),  # inspect --views draws what the loader makes
}


def room(module: str) -> str | None:
    """Returns the folder, or the top-level module, that a dotted name belongs to."""
    first, _, rest = module.partition(".")
    return "dataprep" if first == "dataprep" else rest.partition(".")[0] or None if first == "fastcssl" else None


def imported(tree: ast.AST) -> set[str]:
    """Returns the rooms that a module imports from, at its top or inside its functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the room"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in map(room, names) if name in LEVEL}


FILES = sorted(path for top in ("dataprep", "fastcssl") for path in (ROOT / top).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_down(path: Path) -> None:
    own = room(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if own is None or own == "__init__":
        return  # fastcssl/__init__.py hands on names from everywhere
    assert own in LEVEL, f"{own} belongs to no layer; add it to LAYERS"
    wrong = {
        other
        for other in imported(ast.parse(path.read_text()))
        if other != own and LEVEL[other] >= LEVEL[own] and (own, other) not in ALLOWED
    }
    assert not wrong, f"{path.relative_to(ROOT)} is in {own} and imports from {', '.join(sorted(wrong))}, not below it"


def test_few_modules_at_the_top() -> None:
    assert len(list((ROOT / "fastcssl").glob("*.py"))) <= 6


def test_a_type_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                name = node.name.lstrip("_")
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id.lstrip("_")
                if name.isupper() or not name[:1].isupper():
                    continue  # a constant or a value, not a type
            else:
                continue
            homes.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}
