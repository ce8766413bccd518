"""Findings of `fleetctl doctor`, and the document in which an agent sends those of its machine.

Everything in the document is bounded: it comes from another machine.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

Level: TypeAlias = Literal["OK", "WARN", "FAIL", "UNKNOWN"]
MAX_FINDINGS = 200
MAX_DOCUMENT_BYTES = 2**18
PATH = "/v1/doctor"
"""The agent's route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: Annotated[str, Field(max_length=64)]
    """Stable name of the check: store, leader, nodes, sleep, ..."""
    level: Level
    """UNKNOWN if the check could not be made: it is neither good nor bad."""
    message: Annotated[str, Field(max_length=2000)]
    """Observation, with the name of the object."""
    advice: Annotated[str, Field(max_length=2000)] = ""
    """Remedy; empty if all is well."""
    node: Annotated[str, Field(max_length=128)] = ""
    """Node on which it was found; empty for the fleet, and for the machine of `--local`."""
    since: datetime | None = None
    """The time since which it is so; None if unknown."""
    fix: Annotated[str, Field(max_length=64)] = ""
    """Name of the safe automatic remedy; empty if there is none."""


_DOCUMENT = TypeAdapter(Annotated[tuple[Finding, ...], Field(max_length=MAX_FINDINGS)])


def encode_findings(findings: tuple[Finding, ...]) -> bytes:
    """Return the document with the findings."""
    return _DOCUMENT.dump_json(findings[:MAX_FINDINGS])


def parse_findings(document: bytes) -> tuple[Finding, ...]:
    """Return the findings in a document.

    Raises:
        ValueError: the document is no list of findings, or is too large.

    """
    if len(document) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"the findings have more than {MAX_DOCUMENT_BYTES >> 10} KiB")
    try:
        return _DOCUMENT.validate_json(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"the findings are malformed at {where!r}: {first['msg']}") from error
