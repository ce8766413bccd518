"""The bundle as a file: a compressed tar that is redacted as it is written, and does not grow beyond its limit."""

import io
import tarfile
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO

import orjson

from fleetctl.support_bundle import redact
from schemas import quantity

# Of one log, the end of it: what went wrong last is there.
LOG_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file of the bundle."""

    name: str
    size: int
    note: str = ""


class Archive:
    """Takes what was gathered; `finish` writes the table of contents."""

    def __init__(self, file: BinaryIO, folder: str, now: datetime, limit_bytes: int) -> None:
        """Write to the file, everything below the folder; `limit_bytes` counts before compression."""
        self._tar = tarfile.open(fileobj=file, mode="w:gz")  # noqa: SIM115 - closed by finish
        self._folder = folder
        self._now = now
        self._left = limit_bytes
        self.entries: list[Entry] = []
        self.missing: list[str] = []
        """What could not be had, and why."""

    def add_tree(self, name: str, found: Any) -> None:
        """Add JSON, redacted."""
        self._add(name, orjson.dumps(redact.tree(found), option=orjson.OPT_INDENT_2) + b"\n")

    def add_text(self, name: str, found: str) -> None:
        """Add text, redacted."""
        self._add(name, redact.text(found).encode())

    def add_log(self, name: str, raw: bytes) -> None:
        """Add the end of a log, redacted."""
        cut = len(raw) > LOG_BYTES
        if cut:
            # From a whole line on: half of one may be half of a secret.
            raw = raw[-LOG_BYTES:].partition(b"\n")[2]
        clean = redact.log(raw.decode("utf-8", "replace")).encode()
        self._add(name, clean, note=f"the last {quantity.show(LOG_BYTES)}" if cut else "")

    def miss(self, what: str, why: str) -> None:
        """Remember what could not be had."""
        self.missing.append(redact.text(f"{what}: {why}"))

    def _add(self, name: str, raw: bytes, note: str = "") -> None:
        if len(raw) > self._left:
            self.missing.append(f"{name}: left out, for the bundle would be larger than --max-size")
            return
        self._left -= len(raw)
        self._write(name, raw)
        self.entries.append(Entry(name=name, size=len(raw), note=note))

    def _write(self, name: str, raw: bytes) -> None:
        info = tarfile.TarInfo(f"{self._folder}/{name}")
        info.size, info.mode = len(raw), 0o600
        info.mtime = int(self._now.timestamp())
        self._tar.addfile(info, io.BytesIO(raw))

    def finish(self) -> None:
        """Write what is in it, and end the file."""
        self._write("README.txt", _readme(self).encode())
        self._tar.close()


_HEAD = """A support bundle of an mlx-fleet, for somebody who helps to find out what is wrong.

Taken out, where it stood: passwords, tokens, API keys, private keys and other secrets; users' names in addresses; what
was asked of models and answered; home folders (~) and mail addresses. It never had API keys' hashes, passwords of etcd,
requests' journals or models.
Still in it: names of machines, nodes, models, deployments and GitSources, addresses, versions, labels, figures and logs.
Look through it before you give it to anybody.
"""


def _readme(archive: Archive) -> str:
    lines = [_HEAD, "What is in it, in bytes:"]
    lines += [f"{e.size:>10}  {e.name}{f'  ({e.note})' if e.note else ''}" for e in archive.entries]
    lines += [
        "",
        "What is not in it:" if archive.missing else "Nothing that was looked for is missing.",
    ]
    lines += [f"  {line}" for line in archive.missing]
    return "\n".join(lines) + "\n"
