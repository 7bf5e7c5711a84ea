"""Checks what must hold after every fault."""

import signal
from collections.abc import Collection
from pathlib import Path

from chaos.commands import Ended
from chaos.comparison import prepared_differs, run_differs
from chaos.subjects import OUT, Bench, Reference, Subject, run_again

FINISHED, MISTAKE, INTERRUPTED, TERMINATED = 0, 2, 130, 143
KILLED = -signal.SIGKILL
_SENTENCE = "error:"
_MORE_MB, _MORE_THREADS, _MORE_FILES = 256, 6, 24  # than the uninterrupted command


def ends_well(ended: Ended, allowed: Collection[int], reference: Reference | None = None) -> list[str]:
    """Return a sentence for each way in which a command ended that is not documented in docs/resuming.md."""
    name = ended.words[0]
    if ended.status is None:
        return [f"{name} did not end within {ended.seconds:.0f} s"]
    broken = []
    if ended.status not in allowed:
        broken.append(f"{name} ended with status {ended.status}, not {_listed(allowed)}: {ended.last_line}")
    if "Traceback" in ended.printed:
        broken.append(f"{name} printed a traceback: {cause(ended.printed)}")
    elif ended.status == MISTAKE and _SENTENCE not in ended.stderr:
        broken.append(f"{name} ended with status 2 and without a sentence: {ended.last_line}")
    if ended.left:
        broken.append(f"{name} left processes behind: {', '.join(ended.left)[:200]}")
    return broken + (_excess(ended, reference) if reference is not None else [])


def cause(printed: str) -> str:
    """Return the last place in our code and the last line of the first traceback in a text."""
    lines = printed[printed.index("Traceback") :].splitlines()
    place, last = "", ""
    for line in lines[1:]:
        if line.startswith("  File"):
            if "fastcssl" in line or "dataprep" in line:
                place = line.strip()
        elif line and not line.startswith(" "):
            last = line
            break
    return f"{last} ({place})"


def _excess(ended: Ended, reference: Reference) -> list[str]:
    used = (
        ("MB of memory", ended.peak_mb, reference.peak_mb + _MORE_MB),
        ("threads", ended.num_threads, reference.num_threads + _MORE_THREADS),
        ("open files", ended.num_files, reference.num_files + _MORE_FILES),
    )
    return [
        f"{ended.words[0]} used {seen:.0f} {what}, more than {most:.0f}" for what, seen, most in used if seen > most
    ]


def _listed(statuses: Collection[int]) -> str:
    return " or ".join(str(int(status)) for status in sorted(statuses))


def recovers(bench: Bench, subject: Subject, scratch: Path) -> tuple[list[str], Ended]:
    """Run the same command again. Return what is broken then, and how it ended."""
    reference = bench.reference(subject)
    again = run_again(bench, subject, scratch)
    broken = [f"run again: {sentence}" for sentence in ends_well(again, (FINISHED,), reference)]
    if again.status == FINISHED:
        broken += differs(subject, reference, scratch)
    return broken, again


def differs(subject: Subject, reference: Reference, scratch: Path) -> list[str]:
    """Return a sentence for each kind of difference from the uninterrupted command."""
    compare = prepared_differs if subject.name.startswith("prep") else run_differs
    return compare(reference.out, scratch / OUT)
