"""The Markdown pages of the documentation: their links, anchors and code blocks."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)")
_MARK = re.compile(r"^<!-- (.+) -->$")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeBlock:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    mark: str
    """Comment on the line before it, such as `stays: mac-1`; empty if there is none."""

    @property
    def place(self) -> str:
        """Return where it is, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def pages() -> tuple[Path, ...]:
    """Return every Markdown page of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return tuple(sorted(path for name in listed if (path := ROOT / name).exists()))


def code_blocks(page: Path) -> Iterator[CodeBlock]:
    """Yield the fenced blocks of a page, without their indentation."""
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        opened = _FENCE.match(lines[number])
        if opened is None:
            number += 1
            continue
        indent, start = len(opened["indent"]), number
        number += 1
        while number < len(lines) and lines[number].strip() != "```":
            number += 1
        mark = _MARK.match(lines[start - 1].strip()) if start else None
        yield CodeBlock(
            page=page,
            line=start + 1,
            language=opened["language"],
            text="".join(f"{line[indent:]}\n" for line in lines[start + 1 : number]),
            mark=mark[1] if mark else "",
        )
        number += 1


def prose(page: Path) -> str:
    """Return the text of a page outside of fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> Iterator[str]:
    """Yield the targets of a page's relative links."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and MkDocs make of a page's headings."""
    return {slug(title) for title in re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)}


def slug(title: str) -> str:
    """Return the anchor of a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
    return re.sub(r" ", "-", re.sub(r"[^\w\- ]", "", plain.strip().lower()))


def command_lines(text: str) -> Iterator[str]:
    """Yield the command lines of a shell block or a transcript, with continued lines joined."""
    joined = re.sub(r"\\\n *", " ", text)
    is_transcript = re.search(r"^\$ ", joined, re.MULTILINE) is not None
    for line in joined.splitlines():
        if not is_transcript:
            yield line.strip()
        elif line.startswith("$ "):
            yield line.removeprefix("$ ").strip()
