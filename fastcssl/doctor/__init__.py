"""The checks of fastcssl-doctor. A check is a function that returns one or more findings, each with a status:

ok       everything is as it should be
note     nothing is wrong, but something is missing or could be better; the remedy says how to get it
failed   something is broken; the remedy says how to fix it
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

FindingStatus = Literal["ok", "note", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check. A failure must have a remedy."""

    name: str
    status: FindingStatus
    text: str  # a sentence, or a few words
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status == "failed" and not self.remedy:
            raise ValueError(f"the failure of {self.name!r} has no remedy. Say how to fix it.")


@dataclass(frozen=True, slots=True)
class Section:
    """The findings about one subject, under a title."""

    title: str
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        return {"section": self.title, "findings": [asdict(finding) for finding in self.findings]}


def ok(name: str, text: str) -> Finding:
    return Finding(name, "ok", text)


def note(name: str, text: str, remedy: str = "") -> Finding:
    return Finding(name, "note", text, remedy)


def failed(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, "failed", text, remedy)


REINSTALL = (
    "Reinstall with a C++ compiler and libjpeg-dev: pip install --no-build-isolation --force-reinstall fastcssl."
)
REPORT_IT = "This should not happen. Please report it with the output of fastcssl-doctor --json."


def run_checks(title: str, checks: Iterable[tuple[str, Callable[[], Finding | Iterable[Finding]]]]) -> Section:
    """Runs checks and returns their findings. A check that raises counts as failed; the others still run."""
    findings: list[Finding] = []
    for name, function in checks:
        try:
            found = function()
            findings += [found] if isinstance(found, Finding) else list(found)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or "no message"
            findings.append(failed(name, f"this check raised {type(error).__name__}: {reason}", REPORT_IT))
    return Section(title, tuple(findings))
