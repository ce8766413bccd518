"""Fetches the files of a model into the store: resumable, verified, and each file once at a time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from machinery.clock import Clock
from models.hub.file_selection import DEFAULT_PATTERNS
from models.hub.model_hub import ModelHub
from models.hub.progress import FetchMonitor
from models.model_store.store import ModelStore, StoredModel

PIECE_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """The files to fetch: those of one commit that match the patterns."""

    repo: str
    commit: str
    """Whole commit; `ModelHub.resolve` turns a branch into one."""
    patterns: tuple[str, ...] = DEFAULT_PATTERNS


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Limits of a fetcher."""

    parallel_files: int = 4
    """Files that one fetch reads at a time."""
    piece_bytes: int = PIECE_BYTES
    """Bytes after which a file is flushed to disk and recorded: what a kill costs at most for each file."""
    bytes_per_s: float | None = None
    """Bytes a second of all fetches together; None for no limit."""
    attempts: int = 8
    """Consecutive failures of one file without a new byte before the fetch ends with the last error."""
    rate_limit_wait_s: float = 1800.0
    """Seconds that one fetch waits for a hub's rate limits in all before it ends with HubRateLimitedError."""


@dataclass(kw_only=True)
class ModelFetcher:
    """Fetches models into one store. Cancel the task of a fetch to stop it: what is on the disk stays."""

    store: ModelStore
    clock: Clock
    limits: FetchLimits = field(default_factory=FetchLimits)
    collectable_bytes: Callable[[], int] = field(default=lambda: 0)
    """Bytes that a collection of the store would free, for the message of a full disk."""

    async def fetch(
        self, hub: ModelHub, request: FetchRequest, *, monitor: FetchMonitor | None = None
    ) -> StoredModel:
        """Return the model of the store, after what is missing of it has been fetched and verified.

        A model that is present is returned without a request to the hub.

        Raises:
            ModelFetchError: one of `models.hub.errors`; nothing that is not verified has been published.
            OSError: the disk failed.
            ValueError: the repository, the commit or a pattern is malformed.

        """
        raise NotImplementedError
