"""Asks git about the checkout that the code runs from."""

import subprocess
from functools import cache
from pathlib import Path


def git(folder: Path, *words: str) -> str | None:
    """Returns what a git command prints in a folder, or None if git fails, as it does outside a repository."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def commit() -> str | None:
    """Returns the commit of this package's checkout at the first call, or None if there is none."""
    return git(Path(__file__).parent, "rev-parse", "HEAD")
