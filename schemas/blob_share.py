"""Documents by which agents share the files of models: what one has to give, and its place in a queue for the hub."""

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, StringConstraints

from schemas.deployment import HUB_COMMIT_PATTERN, HubRepo
from schemas.meta import ApiModel
from schemas.model_snapshot import MAX_CONFIG_CHARACTERS, SnapshotWeights

# About 200 KB: an etcd value may have 1.5 MiB. A model of 700 GB has 150 files.
MAX_LISTED_FILES: Final = 1000


class ListedFile(ApiModel):
    """One file of a model that no hub lists."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=400)]
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class ModelListing(ApiModel):
    """The answer of a hub about a model of the fleet's own: its files, and what the memory proof needs.

    The commit is computed from paths and digests, so that a listing proves itself.
    """

    repo: HubRepo
    commit: Annotated[str, StringConstraints(pattern=rf"^{HUB_COMMIT_PATTERN}$")]
    files: Annotated[tuple[ListedFile, ...], Field(min_length=1, max_length=MAX_LISTED_FILES)]
    config: Annotated[str, StringConstraints(max_length=MAX_CONFIG_CHARACTERS)]
    """The fields of config.json that the memory proof needs, as JSON."""
    weights: SnapshotWeights


LinkMedium: TypeAlias = Literal["Thunderbolt", "Wired", "Wireless"]
_BYTE = r"(\d|[1-9]\d|1\d\d|2[0-4]\d|25[0-5])"


class ModelLink(ApiModel):
    """An address of a node on one of its networks."""

    url: Annotated[str, StringConstraints(pattern=rf"^https://{_BYTE}(\.{_BYTE}){{3}}:\d{{1,5}}$")]
    medium: LinkMedium


class ModelOffer(ApiModel):
    """The value of `share/<node>/have/<folder>`: the node gives the files of a model, under its lease."""

    url: Annotated[str, StringConstraints(pattern=r"^https://[^/?#@\s]{1,255}$")]
    """The address of the agent's API."""
    links: Annotated[tuple[ModelLink, ...], Field(max_length=32)] = ()
    """Its addresses whose networks are known, that of `url` too. A reader on the same network takes the fastest."""
    is_whole: bool = False
    """True if it has all files; otherwise it fetches them, and gives what it has."""
    pieces: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")] = ""
    """The SHA-256 of the list of hashes of its pieces, which the node gives like a file; empty if it has none."""
    listing: ModelListing | None = None
    """The files of a model that no hub has; None for one of a hub, which lists them itself."""


class FetchClaim(ApiModel):
    """The value of `share/<node>/fetch/<digest>`: the node wants the file. The oldest one may ask the hub for it."""

    folder: Annotated[str, StringConstraints(max_length=300)]
    """The model that it fetches, for people."""
