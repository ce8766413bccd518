"""Secrets that are looked for in everything that a fleet shows."""

import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from store.archive import ArchiveReader


def leaks(secrets: Mapping[str, str], channels: Iterable[tuple[str, str]]) -> list[str]:
    """Return which secret is in which channel."""
    return [
        f"{name} in {channel}"
        for channel, text in channels
        for name, value in secrets.items()
        if value in text
    ]


def parts_of(bundle: Path, backup: Path) -> Iterator[tuple[str, str]]:
    """Yield the texts in a support bundle and in a backup."""
    with tarfile.open(bundle) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            yield f"bundle: {member.name}", file.read().decode()
    with backup.open("rb") as raw:
        for entry in ArchiveReader(raw).entries():
            yield f"backup: {entry.key}", entry.value.decode(errors="replace")
