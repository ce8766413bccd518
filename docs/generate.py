"""Generates the parts of the documentation that follow from the code.

These are the JSON Schemas, a page for each kind, the reference of fleetctl, the gateway's OpenAPI document, the
tables of reasons and of model sizes, the picture of the layers and the tables of life cycles.
`tests/test_docs.py` compares the committed files with what this generates.
"""

import configparser
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from docs import fleetctl_reference, gateway_openapi, kind_pages, model_sizes, reason_tables
from engine import lifecycle
from nodeagent.replicas import engine_tracker
from reconciler.groups import epochs
from schemas.json_schema import json_schema, user_kinds

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
END = "<!-- end -->"


def generated() -> dict[Path, str]:
    """Return every generated file with its content."""
    files = {
        DOCS / "reference" / "schemas" / f"{kind.name}.json": json.dumps(
            json_schema(kind), indent=2
        )
        + "\n"
        for kind in user_kinds()
    }
    files |= {
        DOCS / "reference" / "kinds" / name: page for name, page in kind_pages.pages().items()
    }
    for page, (name, content) in sections().items():
        files[DOCS / page] = with_section((DOCS / page).read_text(), name, content)
    files[DOCS / "reference" / "fleetctl.md"] = fleetctl_reference.page()
    files[DOCS / "api" / "openapi.json"] = gateway_openapi.text()
    files[ROOT / "fleetctl" / "cli" / "summaries.py"] = fleetctl_reference.summaries()
    return files


def sections() -> dict[str, tuple[str, str]]:
    """Return the generated section of each page that is otherwise written by hand: its name and its content."""
    return {
        "architecture.md": ("layers", picture(layers())),
        "internals/lifecycles.md": ("lifecycles", lifecycles()),
        "models.md": ("sizes", model_sizes.table()),
        "reference/http-api.md": ("routes", gateway_openapi.table()),
        "troubleshooting.md": ("reasons", reason_tables.tables()),
    }


def layers() -> list[str]:
    """Return the layers that import-linter enforces, uppermost first."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    return contracts["importlinter:contract:layers"]["layers"].strip().splitlines()


def picture(rows: list[str]) -> str:
    """Return a picture of boxes, one above the other."""
    width = max(len(row) for row in rows) + 4
    rule = "+" + "-" * width + "+"
    boxes = [rule, *(line for row in rows for line in (f"|{row.strip().center(width)}|", rule))]
    return "\n".join(["```", *boxes, "```"])


def lifecycles() -> str:
    """Return the tables of states, drawn from the transition tables that the code uses."""
    engine = [(old, event, new) for (old, event), new in lifecycle.TRANSITIONS.items()]
    process = [
        (old, event, new)
        for old, events in engine_tracker.TRANSITIONS.items()
        for event, new in events.items()
    ]
    return "\n\n".join(
        (
            "## An engine, as it reports itself (`engine/lifecycle.py`)\n\n" + table(engine),
            "## An engine process, as its agent knows it (`nodeagent/replicas/engine_tracker.py`)\n\n"
            + table(process),
            "## An epoch of a shard group (`reconciler/groups/epochs.py`)\n\n"
            + table(epochs.TRANSITIONS),
        )
    )


def table(transitions: Iterable[tuple[str, str, str]]) -> str:
    """Return a table with a row for each state, a column for each event, and the next states in its cells."""
    cells: dict[tuple[str, str], list[str]] = {}
    states: dict[str, None] = {}
    events: dict[str, None] = {}
    for old, event, new in transitions:
        cells.setdefault((str(old), str(event)), []).append(str(new))
        states.update({str(old): None})
        events.update({str(event): None})
    head = ["state", *events]
    rows = [[state, *(" or ".join(cells.get((state, e), [])) for e in events)] for state in states]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def with_section(text: str, name: str, content: str) -> str:
    """Return the page with the content between its marks."""
    begin = f"<!-- generated: {name} -->"
    head, found, rest = text.partition(begin)
    assert found, f"no mark {begin}"
    _, _, tail = rest.partition(END)
    return f"{head}{begin}\n{content}\n{END}{tail}"


def main() -> None:
    """Write all generated files, until they do not change: fleetctl reads its own summaries."""
    is_changed = False
    for path, content in generated().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != content:
            path.write_text(content)
            is_changed = True
    if is_changed:
        subprocess.run([sys.executable, "-m", "docs.generate"], check=True)


if __name__ == "__main__":
    main()
