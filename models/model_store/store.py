"""The models on this machine's disk: files by digest, and a folder of links for each commit of a repository."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from machinery.clock import Clock
from models.hub.digests import BlobDigest


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a stored model."""

    path: str
    size: int
    sha256: str
    """Name of the content in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """One commit of a repository that is whole and verified on this disk."""

    repo: str
    commit: str
    folder: Path
    """Folder that `inspect_model` and the engine read."""
    files: tuple[StoredFile, ...]
    fetched_at: datetime
    loaded_at: datetime | None
    """Last load by an engine, as far as `record_load` was told."""
    is_pinned: bool

    @property
    def name(self) -> str:
        """Return the folder's name, `<organisation>--<name>@<first 12 digits>`."""
        return self.folder.name

    @property
    def size_bytes(self) -> int:
        """Return the sum of its files; a file that another model has too counts for both."""
        return sum(file.size for file in self.files)


class ModelStore:
    """The store below one folder, which may hold other folders as well: it touches only its own.

    `blobs/sha256/<hex>` has the contents; `<organisation>--<name>@<commit>` is a folder of relative links to them.
    All methods block on the disk; those that read whole files say so.
    """

    def __init__(self, root: Path, clock: Clock, *, reserve_bytes: int = 0) -> None:
        """`reserve_bytes` of the disk stay free in any case; nothing is created before the first write."""
        self.root = root
        self.clock = clock
        self.reserve_bytes = reserve_bytes

    def models(self) -> tuple[StoredModel, ...]:
        """Return all whole models, sorted by name."""
        raise NotImplementedError

    def find(self, repo: str, commit: str) -> StoredModel | None:
        """Return the model of a commit; None if it is not whole here."""
        raise NotImplementedError

    def has_blob(self, digest: BlobDigest) -> bool:
        """Return whether the content is here, whole and verified when it came."""
        raise NotImplementedError

    def blob_path(self, digest: BlobDigest) -> Path:
        """Return the file that has, or would have, this content."""
        raise NotImplementedError

    def publish(self, repo: str, commit: str, files: Mapping[str, BlobDigest]) -> StoredModel:
        """Make the folder of a commit appear in one step; all contents must be in the store."""
        raise NotImplementedError

    def record_load(self, model: StoredModel) -> None:
        """Remember that an engine loads the model now; a collection keeps it for an hour at least."""
        raise NotImplementedError

    def pin(self, model: StoredModel) -> None:
        """Protect the model from collection."""
        raise NotImplementedError

    def unpin(self, model: StoredModel) -> None:
        """Allow collection again."""
        raise NotImplementedError

    def remove(self, model: StoredModel) -> int:
        """Remove the model; return the bytes that the disk got back. Contents of other models stay."""
        raise NotImplementedError
