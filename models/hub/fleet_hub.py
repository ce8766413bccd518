"""The fleet as a hub: models that no hub has, such as those that a Mac quantized. Other Macs list them and give their bytes.

A commit is computed from the files, so that a listing proves itself, whichever Mac wrote it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from models.hub.digests import BlobDigest
from models.hub.errors import HubUnreachableError, ListingRefusedError, ModelMissingError
from models.hub.model_hub import RemoteFile, contents_version, is_commit
from schemas.blob_share import ModelListing

_MAIN: Final = "main"


async def _know_none(repo: str) -> Sequence[ModelListing]:
    raise HubUnreachableError(
        f"{repo} is a model of a fleet, whose agents and reconciler know it; this command asks hubs only"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetListings:
    """The way to the listings that the Macs of a fleet offer."""

    read: Callable[[str], Awaitable[Sequence[ModelListing]]] = _know_none
    """Returns those of one repository, from any Mac."""
    errors: tuple[type[Exception], ...] = ()
    """Errors of `read` which mean that nothing can be known now."""


@dataclass(frozen=True, slots=True)
class FleetHub:
    """The hub of the fleet's own models (`ModelHub`). It has no bytes: other Macs are the only source of files."""

    listings: FleetListings

    @property
    def name(self) -> str:
        """The source, for messages and progress."""
        return "the other Macs"

    async def resolve(self, repo: str, revision: str) -> str:
        """Return the commit of a repository that has one.

        Raises:
            ModelMissingError: no Mac offers the repository, or the revision is neither `main` nor a commit.
            ListingRefusedError: Macs offer several commits.
            HubUnreachableError: the store does not answer.

        """
        if is_commit(revision):
            return revision
        if revision != _MAIN:
            raise ModelMissingError(
                f"{repo} has no revision {revision}: a model of the fleet has no branches; remove the revision, or "
                "write a commit"
            )
        commits = sorted({listing.commit for listing in await self._read(repo)})
        if not commits:
            raise ModelMissingError(
                f"no Mac offers {repo}. `fleetctl models list` shows which Mac has it: Macs without a certificate "
                "offer nothing, and there spec.model.path can name its folder"
            )
        if len(commits) > 1:
            raise ListingRefusedError(
                f"{repo} has {len(commits)} commits on the Macs of the fleet; write the revision that is meant: "
                + ", ".join(commits[:5])
            )
        return commits[0]

    async def files(self, repo: str, commit: str) -> tuple[RemoteFile, ...]:
        """Return all files of a commit. Raises HubUnreachableError while no Mac offers it."""
        listing = await self.listing(repo, commit)
        return tuple(
            RemoteFile(
                path=file.path, size=file.size_bytes, digest=BlobDigest("sha256", file.sha256)
            )
            for file in listing.files
        )

    async def listing(self, repo: str, commit: str) -> ModelListing:
        """Return the listing of a commit. Raises HubUnreachableError while no Mac offers it."""
        model_listing = next((one for one in await self._read(repo) if one.commit == commit), None)
        if model_listing is None:
            raise HubUnreachableError(
                f"no Mac that is reachable offers {repo}@{commit[:12]}; start a Mac that has it"
            )
        return model_listing

    async def _read(self, repo: str) -> list[ModelListing]:
        """Return the listings that prove themselves."""
        try:
            listings = await self.listings.read(repo)
        except self.listings.errors as error:
            raise HubUnreachableError(f"the store does not tell who has {repo}: {error}") from error
        return [listing for listing in listings if listing.repo == repo and _is_proven(listing)]

    def read(
        self, repo: str, commit: str, file: RemoteFile, *, start: int = 0
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Return a stream that raises HubUnreachableError: the other Macs were asked before the hub, and gave nothing."""
        message = f"no Mac gives byte {start} of {file.path} of {repo}@{commit[:12]}; start a Mac that has the model"
        return nullcontext(_NoBytes(message))


class _NoBytes(AsyncIterator[bytes]):
    """A stream that fails at its first byte."""

    def __init__(self, message: str) -> None:
        self._message = message

    @override
    async def __anext__(self) -> bytes:
        raise HubUnreachableError(self._message)


def _is_proven(listing: ModelListing) -> bool:
    digests = {file.path: BlobDigest("sha256", file.sha256) for file in listing.files}
    return len(digests) == len(listing.files) and contents_version(digests) == listing.commit
