"""Writes what of the documentation follows from the code: JSON Schemas, and the picture of the layers.

`tests/test_docs.py` compares what is committed with what this would write.
"""

import configparser
import json
from pathlib import Path

from docs import fleetctl_reference
from schemas.json_schema import json_schema, user_kinds

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- generated: layers -->", "<!-- end -->"


def generated() -> dict[Path, str]:
    """Return every generated file with its content."""
    files = {
        ROOT / "docs" / "reference" / "schemas" / f"{kind.name}.json": json.dumps(
            json_schema(kind), indent=2
        )
        + "\n"
        for kind in user_kinds()
    }
    architecture = ROOT / "docs" / "architecture.md"
    files[architecture] = with_picture(architecture.read_text(), layers())
    files[ROOT / "docs" / "reference" / "fleetctl.md"] = fleetctl_reference.page()
    files[ROOT / "fleetctl" / "cli" / "summaries.py"] = fleetctl_reference.summaries()
    return files


def layers() -> list[str]:
    """Return the layers that import-linter enforces, uppermost first."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    return contracts["importlinter:contract:layers"]["layers"].strip().splitlines()


def with_picture(text: str, rows: list[str]) -> str:
    """Return the page with the picture of the layers put between its marks."""
    width = max(len(row) for row in rows) + 4
    rule = "+" + "-" * width + "+"
    picture = "\n".join(
        [rule, *(line for row in rows for line in (f"|{row.strip().center(width)}|", rule))]
    )
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n```\n{picture}\n```\n{END}{tail}"


def main() -> None:
    """Write all generated files."""
    for path, content in generated().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


if __name__ == "__main__":
    main()
