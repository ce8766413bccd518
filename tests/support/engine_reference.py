"""Tables of docs/reference/openai.md, for tests that compare them with the code."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "openai.md"


def paths() -> dict[str, tuple[set[str], set[str]]]:
    """Return the parameters of vLLM's paths: those that are honoured, and labels."""
    lines = re.findall(r"^\| `(/[\w/]+)` \| (.+?) \|(.*?)\|", PAGE.read_text(), re.MULTILINE)
    return {
        path: (set(re.findall(r"`(\w+)`", honoured)), set(re.findall(r"`(\w+)`", labels)))
        for path, honoured, labels in lines
    }


def rows(heading: str) -> dict[str, str]:
    """Return the second column of the first table below a heading, by parameter; chats' where it refers to them."""
    section = PAGE.read_text().split(f"\n{heading}")[1].split("\n## ")[0]
    table = section.split("|---|---|---|\n")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+?) \|", table, re.MULTILINE)
    assert len(cells) == len(table.splitlines()), "a row does not name parameters"
    named = [(re.findall(r"\w+", names), text) for names, text in cells]
    assert [names for names, _ in named] == sorted(names for names, _ in named)
    verdicts = {name: text for names, text in named for name in names}
    shared = re.search(r"^As in chats: (.+?)\.$", section, re.MULTILINE | re.DOTALL)
    if shared is not None:
        chat = rows("## Chat")
        verdicts |= {name: chat[name] for name in re.findall(r"`(\w+)`", shared[1])}
    return verdicts
