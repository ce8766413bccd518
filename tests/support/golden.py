"""Golden files: commands against one fleet in memory, each followed by what it prints.

A file holds `$ fleetctl ...` lines, with standard input up to END after `<<END`; `##` begins a comment. Below each command
are its output, its errors after `! `, and its exit code if it is not 0. `pytest --update-golden` writes them anew.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.fleetctl_manifests import join_node
from tests.support.fleetctl_runner import MemoryFleet

FOLDER = Path(__file__).parent.parent / "golden"
_STDIN = " <<END"
_MASKS = (
    (re.compile(r'"?\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"?'), "UID"),
    (re.compile(r"\b20\d\d-\d\d-\d\dT[0-9:.]+Z"), "TIME"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenCommand:
    """One command of a golden file."""

    head: str
    """The lines of the file that give it: comments, the command, standard input."""
    words: tuple[str, ...]
    stdin: bytes


def commands_in(text: str) -> Iterator[GoldenCommand]:
    """Yield the commands of a golden file, without what they printed."""
    lines, comments = iter(text.splitlines()), list[str]()
    for line in lines:
        if line.startswith("##"):
            comments.append(line)
        if not line.startswith("$ "):
            continue
        head, given = [*comments, line], list[str]()
        if line.endswith(_STDIN):
            for inner in lines:
                head.append(inner)
                if inner == "END":
                    break
                given.append(inner)
        words = shlex.split(line.removeprefix("$ ").removesuffix(_STDIN))
        assert words[0] == "fleetctl", line
        stdin = "".join(f"{inner}\n" for inner in given).encode()
        yield GoldenCommand(head="\n".join(head), words=tuple(words[1:]), stdin=stdin)
        comments = []


async def golden_text(text: str) -> str:
    """Return the golden file with what its commands print, one after the other, in a fresh world.

    The world has the objects of `world.yaml`, and the nodes mac-1 (site=berlin) and mac-2.
    """
    fleet = MemoryFleet()
    await join_node(fleet.store, "mac-1", labels={"site": "berlin"})
    await join_node(fleet.store, "mac-2")
    await fleet.applied((FOLDER / "world.yaml").read_text())
    parts = []
    for command in commands_in(text):
        done = await fleet.ctl(*command.words, stdin=command.stdin)
        # The usage above an error is the same for each command.
        err = re.sub(r"\AUsage: .*?^(?=Error: )", "", done.err, flags=re.DOTALL | re.MULTILINE)
        out = done.out if done.out.endswith("\n") or not done.out else f"{done.out}\n"
        errors = "".join(f"! {line}\n" for line in err.splitlines())
        printed = f"{out}{errors}" + (f"[exit {done.code}]\n" if done.code else "")
        for pattern, mask in _MASKS:
            printed = pattern.sub(mask, printed)
        parts.append(f"{command.head}\n{printed}")
    return "\n".join(parts)
