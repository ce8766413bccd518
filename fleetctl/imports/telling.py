"""What a comment says of a part of another tool's file that has no counterpart. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleetctl.support_bundle import redact
from manifests.nodes import Node
from manifests.tree import Path

# A comment is read by whoever may read the repository; who holds a secret keeps it elsewhere.
_SECRET = re.compile(
    r"password|passwd|secret|token(?!s)|api_?key|credential|(^|[._])key($|[._])", re.IGNORECASE
)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a part of a file has no counterpart."""

    says: str
    """What is instead of it, or what to do."""
    is_shown: bool = True
    """Whether each value below it is worth a comment of its own."""


def leaves(path: Path, node: Node | None) -> Iterator[tuple[Path, Node]]:
    if node is None:
        return
    if isinstance(node.content, dict):
        for key, entry in node.content.items():
            yield from leaves((*path, key), entry.node)
    elif isinstance(node.content, list):
        for index, item in enumerate(node.content):
            yield from leaves((*path, index), item)
    elif node.content is not None and node.content != "":
        yield path, node


def reason(reasons: Mapping[str, Reason], inner: Sequence[str]) -> Reason | None:
    """Return the reason of the longest path that fits."""
    said = [squeezed(part) for part in inner]
    fitting = [
        (len(names), reason)
        for path, reason in reasons.items()
        if len(names := [squeezed(part) for part in path.split(".")]) <= len(said)
        and all(name in ("*", part) for name, part in zip(names, said, strict=False))
    ]
    return max(fitting, key=lambda one: one[0])[1] if fitting else None


def told(why: str, lines: Sequence[str]) -> list[str]:
    if len(lines) == 1:
        return [f"{lines[0]}: {why}"]
    return [f"{why}{':' if lines else ''}", *(f"  {line}" for line in lines)]


def value(path: Path, node: Node) -> str:
    if any(_SECRET.search(str(part)) for part in path):
        return "(a secret, not copied)"
    text = _USER_IN_URL.sub("", node.text.replace("\n", " "))
    if redact.REDACTED in redact.text(text):
        return "(a secret, not copied)"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def squeezed(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")
