"""Generates the page of reasons."""

from collections.abc import Iterator

from schemas.reasons import SECTIONS
from schemas.reasons.reason import ReasonSection

_HEAD = """# Reasons

With this page you can look up a reason that a command shows. `fleetctl get -o wide`, `fleetctl describe` and `fleetctl
events` show reasons: one word each, with a message. [Troubleshooting](../troubleshooting.md) starts from symptoms.

```sh
fleetctl describe md/qwen        # conditions and events of one object
fleetctl explain placement qwen  # for each Mac: does the replica fit, and why not
```

`make docs` generates this page from `schemas/reasons/`, and the tests hold it complete.
"""


def page() -> str:
    """Return one section for each place where reasons appear."""
    return "\n".join((_HEAD, "\n\n".join(_section(section) for section in SECTIONS), ""))


def _section(section: ReasonSection) -> str:
    return "\n".join(
        (f"## {section.title}", "", f"Shown by `{section.shown_by}`.", "", *_rows(section))
    )


def _rows(section: ReasonSection) -> Iterator[str]:
    problems = [reason for reason in section.reasons if reason.cure]
    fine = [reason for reason in section.reasons if not reason.cure]
    yield "| reason | meaning | what to do |"
    yield "|---|---|---|"
    for problem in problems:
        yield f"| `{problem.name}` | {_cell(problem.meaning)} | {_cell(problem.cure)} |"
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
