"""Golden files: commands against one fleet in memory, each followed by what it prints.

A file holds `$ fleetctl ...` lines, with standard input up to END after `<<END`; `##` begins a comment. Below each command
are its output, its errors after `! `, and its exit code if it is not 0. `pytest --update-golden` writes them anew.

`% fleetctl ...` runs without the fleet's address; `$ put KEY <<END` writes what an agent or the reconciler would write, as
YAML, and `$ remove KEY` deletes it; `$ write FILE <<END` writes a file below $DIR and
`$ show FILE` prints it. `AGO(5h)` stands for a time. A file that
begins with `## empty` starts without the objects of `world.yaml`. Files below `worlds` run in the world of a test, which
gives names to what differs from run to run, such as $HUB for a URL.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import pytest

from machinery.clock import SystemClock
from manifests.yaml.parser import parse_values
from store import keys
from store.port import Delete, Put
from tests.support.fleetctl_manifests import join_node
from tests.support.fleetctl_runner import MemoryFleet, run_fleetctl

Programs: TypeAlias = Mapping[str, Callable[[list[str], str], object]]
"""Programs of a test: each gets its words and its standard input."""

FOLDER = Path(__file__).parent.parent / "golden"
_STDIN = " <<END"
_MASKS = (
    (re.compile(r'"?\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"?'), "UID"),
    (re.compile(r"\b20\d\d-\d\d-\d\dT[0-9:.]+(Z|\+00:00)"), "TIME"),
    (re.compile(r"\b20\d\d-\d\d-\d\d \d\d:\d\d UTC"), "TIME"),
    (re.compile(r"http://memory-\d+\.invalid:2379"), "ETCD"),
    (re.compile(r'"diskBytes": [1-9]\d+,\s+"freeBytes": \d+'), '"diskBytes": DISK'),
    (re.compile(r"\bmain@[0-9a-f]{12,40}\b"), "main@COMMIT"),
    (re.compile(r"\bsk-fleet-[\w-]{20,}"), "SECRET"),
    # Ages of what the file itself has made.
    (re.compile(r"(?<=   )\ds(?= |$)", re.MULTILINE), "0s"),
)
_AGO = re.compile(r"AGO\((\d+)([smhd])\)")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenCommand:
    """One command of a golden file."""

    head: str
    """The lines of the file that give it: comments, the command, standard input."""
    prompt: str
    words: tuple[str, ...]
    stdin: str


def matches_golden(request: pytest.FixtureRequest, name: str, text: str) -> None:
    """Compare a text with a golden file, or write the file anew."""
    path = FOLDER / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "if this is right: pytest --update-golden"


def commands_in(text: str, names: Mapping[str, str]) -> Iterator[GoldenCommand]:
    """Yield the commands of a golden file, without what they printed."""
    lines, comments = iter(text.splitlines()), list[str]()
    for line in lines:
        if line.startswith("##"):
            comments.append(line)
        if not line.startswith(("$ ", "% ")):
            continue
        head, given = [*comments, line], list[str]()
        if line.endswith(_STDIN):
            for inner in lines:
                head.append(inner)
                if inner == "END":
                    break
                given.append(inner)
        words = shlex.split(_named(line[2:].removesuffix(_STDIN), names))
        stdin = _named("".join(f"{inner}\n" for inner in given), names)
        yield GoldenCommand(
            head="\n".join(head),
            prompt=line[0],
            words=tuple(words),
            stdin=_AGO.sub(_time_ago, stdin),
        )
        comments = []


def _named(text: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(f"${name}", value)
    return text


def _time_ago(match: re.Match[str]) -> str:
    """Return a time before now; two seconds more, so that its age in words is the one that is given."""
    ago = timedelta(**{_UNITS[match[2]]: int(match[1])}, seconds=2)
    return (SystemClock().now() - ago).isoformat().replace("+00:00", "Z")


async def golden_text(
    text: str, fleet: MemoryFleet, names: Mapping[str, str], programs: Programs
) -> str:
    """Return the golden file with what its commands print, one after the other."""
    parts = []
    for command in commands_in(text, names):
        printed = await _printed(fleet, command, Path(names["DIR"]), programs)
        for name, value in names.items():
            printed = printed.replace(value, f"${name}")
        for pattern, mask in _MASKS:
            printed = pattern.sub(mask, printed)
        parts.append(f"{command.head}\n{printed}")
    return "\n".join(parts)


async def golden_fleet(text: str) -> MemoryFleet:
    """Return a fresh world: the objects of `world.yaml`, and the nodes mac-1 (site=berlin) and mac-2."""
    fleet = MemoryFleet()
    if not text.startswith("## empty"):
        await join_node(fleet.store, "mac-1", labels={"site": "berlin"})
        await join_node(fleet.store, "mac-2")
        await fleet.applied((FOLDER / "world.yaml").read_text())
    return fleet


async def _printed(
    fleet: MemoryFleet, command: GoldenCommand, folder: Path, programs: Programs
) -> str:
    program, *words = command.words
    if program in programs:
        programs[program](words, command.stdin)
        return ""
    if program == "put":
        trees = parse_values(command.stdin)
        value = json.dumps(trees[0]) if trees else command.stdin.strip()
        put = Put(key=f"{keys.ROOT}/{words[0]}", value=value.encode())
        await fleet.store.commit([], [put])
        return ""
    if program == "remove":
        await fleet.store.commit([], [Delete(key=f"{keys.ROOT}/{words[0]}")])
        return ""
    if program == "write":
        (folder / words[0]).parent.mkdir(parents=True, exist_ok=True)
        (folder / words[0]).write_text(command.stdin)
        (folder / words[0]).chmod(0o600)
        return ""
    if program == "show":
        return (folder / words[0]).read_text()
    assert program == "fleetctl", command.head
    run = fleet.ctl if command.prompt == "$" else run_fleetctl
    done = await run(*words, stdin=command.stdin.encode())
    # The usage above an error is the same for each command.
    err = re.sub(r"\AUsage: .*?^(?=Error: )", "", done.err, flags=re.DOTALL | re.MULTILINE)
    out = done.out if done.out.endswith("\n") or not done.out else f"{done.out}\n"
    errors = "".join(f"! {line}\n" for line in err.splitlines())
    return f"{out}{errors}" + (f"[exit {done.code}]\n" if done.code else "")
