"""All checks of the doctor, in order."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fastcssl.doctor import REINSTALL, Section, failed, machine, packages


def diagnose(data: Path | str | None = None, *, full: bool = False) -> list[Section]:
    """Checks machine, build, packages and GPUs like `fastcssl-doctor`, and returns the findings. It does not raise.

    data: a folder whose reading speed is measured. full: also run tests/gpu, which takes minutes and needs a clone of
    the repository.
    """
    return [check() for _, check in checks(None if data is None else Path(data), full=full)]


def checks(data: Path | None = None, *, full: bool = False) -> Iterator[tuple[str, Callable[[], Section]]]:
    """Yields a title for progress and the function that runs the check."""
    yield "machine", lambda: machine.machine(data)
    try:
        from fastcssl import ops
        from fastcssl.doctor import build, gpus, operators, races, timings
    except (ImportError, OSError) as error:  # importing these loads the compiled libraries
        reason = str(error).partition("\n")[0]
        broken = failed("operators", f"fastcssl's compiled part does not load: {reason}", REINSTALL)
        yield "build", lambda: Section("Build", (broken,))
        return
    yield "build", build.build
    yield "packages", packages.packages
    yield "GPUs", gpus.gpus
    yield "operators on the CPU", lambda: operators.operators("cpu")
    if torch.cuda.is_available():
        yield "operators on the GPU", lambda: operators.operators("cuda")
        if ops.missing("cuda") is None:
            yield "races", races.races
            yield "speed", timings.timings
    if full:
        from fastcssl.doctor import suite

        yield "tests/gpu", suite.suite
