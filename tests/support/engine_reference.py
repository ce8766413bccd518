"""Tables of docs/reference/openai.md, for tests that compare them with the code."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "openai.md"


def rows(heading: str) -> dict[str, str]:
    """Return the second column of the first table below a heading, by parameter."""
    table = PAGE.read_text().split(f"\n{heading}")[1].split("|---|---|---|\n")[1].split("\n\n")[0]
    found = re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE)
    assert len(found) == len(table.splitlines()), "a row does not name one parameter"
    assert [name for name, _ in found] == sorted(name for name, _ in found)
    return dict(found)
