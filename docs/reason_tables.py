"""Generates the tables of reasons for the troubleshooting page."""

from collections.abc import Iterator

from schemas.reasons import SECTIONS
from schemas.reasons.reason import ReasonSection


def tables() -> str:
    """Return one section for each place where reasons appear."""
    return "\n\n".join(_section(section) for section in SECTIONS)


def _section(section: ReasonSection) -> str:
    return "\n".join(
        (f"### {section.title}", "", f"Shown by `{section.shown_by}`.", "", *_rows(section))
    )


def _rows(section: ReasonSection) -> Iterator[str]:
    problems = [one for one in section.reasons if one.cure]
    fine = [one for one in section.reasons if not one.cure]
    yield "| reason | meaning | what to do |"
    yield "|---|---|---|"
    for one in problems:
        yield f"| `{one.name}` | {_cell(one.meaning)} | {_cell(one.cure)} |"
    if fine:
        yield ""
        yield "These need no action:"
        yield ""
        yield "| reason | meaning |"
        yield "|---|---|"
    for one in fine:
        yield f"| `{one.name}` | {_cell(one.meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
