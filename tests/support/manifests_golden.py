"""Golden files of what is said about manifests: each text, and below it the messages about it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.manifests_texts import complaints

FOLDER = Path(__file__).parent.parent / "golden" / "manifests"


@dataclass(frozen=True, slots=True)
class Golden:
    """Compares messages with their golden files, or writes these anew."""

    is_update: bool

    def check(
        self,
        name: str,
        cases: Mapping[str, Sequence[str]],
        messages: Callable[[str], Sequence[str]] = complaints,
    ) -> None:
        parts = []
        for title, texts in cases.items():
            parts.append(f"## {title}\n\n")
            for text in texts:
                lines = [*_shown(text).splitlines(), *(f"! {line}" for line in messages(text))]
                parts.append("".join(f"{line}\n" for line in (*lines, "")))
        printed, path = "".join(parts), FOLDER / name
        if self.is_update:
            path.parent.mkdir(exist_ok=True)
            path.write_text(printed)
        assert printed == path.read_text(), "if this is right: pytest --update-golden"


_HEAD = re.compile(
    r"^apiVersion: fleet/v1alpha1\n|^kind: ModelDeployment\nmetadata:\n  name: qwen\n", re.MULTILINE
)


def _shown(text: str) -> str:
    """Return the text without what most manifests have, and shortened where it repeats itself."""
    lines = _HEAD.sub("", text.removeprefix("---\n")).replace("\0", "\\0").split("\n")
    short = [line if len(line) <= 160 else f"{line[:100]} ... {line[-20:]}" for line in lines]
    return "\n".join(line.rstrip() for line in short)
