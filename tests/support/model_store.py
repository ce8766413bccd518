"""Model stores for tests: models made of a few bytes, and a clock that tests move."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path

from typing_extensions import override

from machinery.clock import SystemClock
from models.hub.digests import BlobDigest, hash_file
from models.model_store.store import ModelStore, StoredModel
from models.partial_model import PartialMark


class ShiftedClock(SystemClock):
    """The machine's clocks, with a wall time that is shifted."""

    def __init__(self) -> None:
        self.shift_s = 0.0

    @override
    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.shift_s)


def add_model(
    store: ModelStore,
    repo: str,
    commit: str,
    files: Mapping[str, bytes],
    *,
    partial: PartialMark | None = None,
) -> StoredModel:
    """Put a model into the store without a hub; `partial` names files that are left out."""
    store.prepare()
    digests: dict[str, BlobDigest] = {}
    for path, content in files.items():
        making = store.incoming / "test.part"
        making.write_bytes(content)
        digests[path] = hash_file(making).sha256
        store.add_blob(making, digests[path], digests[path])
    return store.publish(repo, commit, digests, ("*",), partial=partial)


def stored_contents(store: ModelStore) -> dict[str, int]:
    """Return the sizes of all contents by SHA-256."""
    return {path.name: path.stat().st_size for path in (store.blobs / "sha256").iterdir()}


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder, links followed."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
