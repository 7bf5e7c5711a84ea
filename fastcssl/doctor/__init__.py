"""What fastcssl-doctor looks at. Every look is a function that returns findings; it never raises.

ok       it is as it should be
note     nothing is wrong, but something is absent or could be better; the remedy says what to do if it is wanted
failed   something is broken; the remedy says what to do about it
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

FindingStatus = Literal["ok", "note", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    status: FindingStatus
    text: str  # a sentence, or a few words
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status == "failed" and not self.remedy:
            raise ValueError(f"the failure of {self.name!r} has no remedy: say what to do about it.")


@dataclass(frozen=True, slots=True)
class Section:
    """Findings about one thing."""

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
REPORT_IT = "This should not happen: please report it, with the output of fastcssl-doctor --json."


def run_checks(title: str, checks: Iterable[tuple[str, Callable[[], Finding | Iterable[Finding]]]]) -> Section:
    """Returns what the looks found; one that raises is a failure of what it looked at, not of the doctor."""
    findings: list[Finding] = []
    for name, function in checks:
        try:
            found = function()
            findings += [found] if isinstance(found, Finding) else list(found)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or "no message"
            findings.append(failed(name, f"looking at it raised {type(error).__name__}: {reason}", REPORT_IT))
    return Section(title, tuple(findings))
