"""The results of a campaign: FOLDER/faults.jsonl with one line per fault, FOLDER/campaign.json, and their table."""

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """One line of faults.jsonl."""

    experiment: str
    kind: str
    name: str
    held: bool
    injected: bool
    broken: tuple[str, ...]
    seen: str
    seconds: float


@dataclass(frozen=True)
class KindCount:
    """A row of the table: how many faults of a kind were injected, how many broke something, and the time they took."""

    experiment: str
    kind: str
    num_faults: int
    num_broken: int
    seconds: float


def read_records(out: Path) -> list[Record]:
    """Return the records of a campaign. A last line that was cut off by a kill is left out."""
    path = out / "faults.jsonl"
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            content = json.loads(line)
        except ValueError:
            continue
        records.append(Record(**{**content, "broken": tuple(content["broken"])}))
    return records


def counts_of(records: Iterable[Record]) -> list[KindCount]:
    """Return one row per experiment and kind. A fault whose moment never came is left out unless it broke something."""
    rows: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.injected or not record.held:
            rows.setdefault((record.experiment, record.kind), []).append(record)
    return [
        KindCount(*key, len(found), sum(not one.held for one in found), sum(one.seconds for one in found))
        for key, found in sorted(rows.items())
    ]


def write_facts(out: Path, seed: int, skipped: dict[str, str], machine: dict[str, Any]) -> None:
    """Write campaign.json. A campaign that is continued keeps its seed, because the seed decides the names."""
    path = out / "campaign.json"
    if path.exists() and (before := json.loads(path.read_text())["seed"]) != seed:
        raise SystemExit(
            f"{out} holds a campaign with seed {before}. Continue it with --seed {before}, or use another --out."
        )
    path.write_text(json.dumps({"seed": seed, "skipped": skipped, "machine": machine}, indent=1) + "\n")


def facts_of_this_machine() -> dict[str, Any]:
    """Return what matters for the number of faults per hour."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(pages * page / 1e9),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def markdown(out: Path) -> str:
    """Return the table of a campaign as a page."""
    records, facts = read_records(out), json.loads((out / "campaign.json").read_text())
    counts = counts_of(records)
    num_faults, num_broken = sum(row.num_faults for row in counts), sum(row.num_broken for row in counts)
    machine = facts["machine"]
    lines = [
        "# Injected faults",
        "",
        f"`make chaos` injected {num_faults:,} faults of {len({row.kind for row in counts})} kinds in "
        f"{sum(row.seconds for row in counts) / 3600:.2f} hours of its workers' time; {num_broken} broke an invariant. "
        f"Seed {facts['seed']}; {machine['cores']} cores, {machine['memory_gb']} GB of memory, {machine['system']}, "
        f"Python {machine['python']}, torch {machine['torch']}.",
        "",
        "| experiment | kind of fault | faults | broken | seconds |",
        "|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row.experiment} | {row.kind} | {row.num_faults:,} | {row.num_broken} | {row.seconds:,.0f} |"
        for row in counts
    ]
    lines.append(f"| all | | {num_faults:,} | {num_broken} | {sum(row.seconds for row in counts):,.0f} |")
    if facts["skipped"]:
        lines += ["", "Experiments that could not run there:", ""]
        lines += [f"- {name}: {reason}" for name, reason in sorted(facts["skipped"].items())]
    if broken := [record for record in records if not record.held]:
        lines += ["", "Faults that broke an invariant:", ""]
        lines += [f"- {record.experiment}, {record.name}: {'; '.join(record.broken)}" for record in broken]
    return "\n".join(lines) + "\n"
