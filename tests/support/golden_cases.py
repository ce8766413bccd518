"""Golden files of messages: each case, and below it after `! ` what is said about it. `pytest --update-golden` writes them."""

import fcntl
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "golden"
Cases = Iterable[tuple[str, Sequence[str]]]
_REMEDY = "if this is right: pytest --update-golden"
_HEAD = re.compile(
    r"^apiVersion: fleet/v1alpha1\n|^kind: ModelDeployment\nmetadata:\n  name: qwen\n", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Golden:
    """Compares messages with their golden files, or writes these anew."""

    is_update: bool

    def check(self, name: str, sections: Mapping[str, Cases]) -> None:
        """Check the file `name` below tests/golden: a heading for each section, its cases with their messages."""
        parts = []
        for title, cases in sections.items():
            parts.append(f"## {title}\n\n")
            for text, messages in cases:
                lines = [*_shown(text).splitlines(), *(f"! {line}" for line in messages)]
                parts.append("".join(f"{line}\n" for line in (*lines, "")))
        self.check_text(name, "".join(parts))

    def check_text(self, name: str | Path, text: str) -> None:
        """Check that the file `name` below tests/golden, or at that path, has this text."""
        path = FOLDER / name
        if self.is_update:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), _REMEDY

    def check_row(self, name: str, row: str, cells: Mapping[str, str]) -> None:
        """Check these cells of a row of the table `name` below tests/golden; other tests check its other cells."""
        with (FOLDER / name).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # tests of other processes write other rows
            table = json.load(file)
            recorded = table.setdefault(row, {})
            if self.is_update:
                recorded.update(cells)
                file.seek(0)
                file.truncate()
                file.write(json.dumps(table, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        assert {column: recorded.get(column) for column in cells} == cells, _REMEDY


def _shown(text: str) -> str:
    """Return a text without what most manifests have, and shortened where it repeats itself."""
    lines = _HEAD.sub("", text.removeprefix("---\n")).replace("\0", "\\0").split("\n")
    short = [line if len(line) <= 160 else f"{line[:100]} ... {line[-20:]}" for line in lines]
    return "\n".join(line.rstrip() for line in short)
