"""What a check says: how things are, and what to do about it."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List

from gpumesh.model.records import NamedTuple

OK = "ok"
NOTE = "note"  # Good to know; nothing is wrong.
WARNING = "warning"  # Works, and may be less than somebody wants.
FAULT = "fault"  # Does not work.

HERE = "here"
MESH = "mesh"  # Over there, or on the way: nothing that this machine could mend.


class Finding(NamedTuple):
    """The outcome of one check."""

    check: str  # Its name, the same each time: "python", "tcp".
    state: str  # OK, NOTE, WARNING or FAULT.
    text: str  # One clause that says how it is.
    advice: str = ""  # What to do, as one clause; "" if there is nothing.
    place: str = HERE  # Whose matter it is: HERE or MESH.

    def as_dict(self) -> Dict[str, Any]:
        """For JSON."""
        return {
            "check": self.check,
            "state": self.state,
            "place": self.place,
            "text": self.text,
            "advice": self.advice,
        }


def ok(check: str, text: str, *, place: str = HERE) -> Finding:
    """All is well."""
    return Finding(check, OK, text, place=place)


def note(check: str, text: str, advice: str = "", *, place: str = HERE) -> Finding:
    """Nothing is wrong, and somebody may want to know."""
    return Finding(check, NOTE, text, advice, place)


def warning(check: str, text: str, advice: str = "", *, place: str = HERE) -> Finding:
    """It works, but less well than it could."""
    return Finding(check, WARNING, text, advice, place)


def fault(check: str, text: str, advice: str = "", *, place: str = HERE) -> Finding:
    """It does not work."""
    return Finding(check, FAULT, text, advice, place)


def is_at_fault(findings: Iterable[Finding]) -> bool:
    """Whether something does not work that this machine can mend."""
    return any(finding.state == FAULT and finding.place == HERE for finding in findings)


def as_report(findings: List[Finding]) -> Dict[str, Any]:
    """For JSON: whether this machine is at fault, and all findings in their order."""
    return {"ok": not is_at_fault(findings), "findings": [finding.as_dict() for finding in findings]}
