"""What git says of the checkout that code runs from."""

import subprocess
from functools import cache
from pathlib import Path


def git(folder: Path, *words: str) -> str | None:
    """What it prints there; None where there is no repository, or no git."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def commit() -> str | None:
    """Of this package, as the process began with it."""
    return git(Path(__file__).parent, "rev-parse", "HEAD")
