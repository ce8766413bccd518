"""The port to the sources of one file: a hub alone, or a hub and the other Macs of a fleet."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from models.hub.model_hub import ModelHub, RemoteFile


class BlobTransfer(Protocol):
    """The transfer of one file, from the choice of its source until its content is in the store."""

    @property
    def source(self) -> str:
        """The host or the node that the bytes come from now, for messages and progress."""
        ...

    def read(self, start: int) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open the file at byte `start`; the iterator yields and raises as that of `ModelHub.read`."""
        ...

    async def reject(self) -> bool:
        """Take note that the bytes were wrong; return True if another attempt has other sources."""
        ...


class BlobSources(Protocol):
    """The sources of the files of one commit."""

    def order(self, file: RemoteFile) -> str:
        """Return a key by which large files are sorted, so that several Macs begin with different ones."""
        ...

    def transfer(self, file: RemoteFile) -> AbstractAsyncContextManager[BlobTransfer]:
        """Begin a transfer; leave the block when the content is in the store, or cannot be had."""
        ...


@dataclass(frozen=True, slots=True)
class _HubTransfer:
    hub: ModelHub
    repo: str
    commit: str
    file: RemoteFile

    @property
    def source(self) -> str:
        return self.hub.name

    def read(self, start: int) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self.hub.read(self.repo, self.commit, self.file, start=start)

    async def reject(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class HubOnly:
    """The hub as the only source."""

    hub: ModelHub
    repo: str
    commit: str

    def order(self, file: RemoteFile) -> str:  # noqa: ARG002 - one Mac has no need of it
        """Return the same key for all files."""
        return ""

    @asynccontextmanager
    async def transfer(self, file: RemoteFile) -> AsyncIterator[BlobTransfer]:
        """Yield the transfer from the hub."""
        yield _HubTransfer(self.hub, self.repo, self.commit, file)
