"""The messages between the leader and the fetch process: lines of JSON. Pure; imports no Git.

One line is the request; one line is the response, followed by one line for each document of the commit. Documents
travel parsed, with the places of their fields: the leader never parses foreign YAML, and still names the line of an
error.
"""

import json
from functools import partial
from typing import Any, Literal, TypeAlias

from manifests.documents import Document
from manifests.yaml.nodes import MappingEntry, Mark, YamlNode
from schemas.gitsource import GitCommit
from schemas.meta import ApiModel

FailureReason: TypeAlias = Literal[
    # Temporary: retried by itself.
    "Unreachable",
    "TimedOut",
    "NoSpace",
    "FetchingFailed",
    # A person must fix it.
    "AuthenticationFailed",
    "HostKeyRefused",
    "CertificateRefused",
    "CredentialsMissing",
    "CredentialsRefused",
    "RepositoryRefused",
    "RepositoryNotFound",
    "ReferenceNotFound",
    "PathNotFound",
    "TooLarge",
    # A commit must fix it.
    "BrokenManifests",
]
_PASSING: tuple[FailureReason, ...] = ("Unreachable", "TimedOut", "NoSpace", "FetchingFailed")


class FetchCredentials(ApiModel):
    """Credentials for the Git server; the files are absolute paths."""

    username: str = ""
    password_file: str | None = None
    ssh_key_file: str | None = None
    known_hosts_file: str | None = None
    ca_file: str | None = None


class FetchRequest(ApiModel):
    """The commit to fetch, and where."""

    repository: str
    branch: str | None = None
    tag: str | None = None
    commit: str | None = None
    path: str = ""
    """Folder in the repository."""
    cache: str
    """Folder for fetched commits."""
    credentials: FetchCredentials = FetchCredentials()
    trusted_host: str | None = None
    """Set for a source that comes out of Git: the only host that may have a private address, "" if none may."""
    known: str | None = None
    """Commit whose documents the leader has: if it is still the newest, they are not sent."""
    offline: bool = False
    """True to read only commits that were fetched before."""
    timeout_s: float


class FetchFailure(ApiModel):
    """The reason why there are no documents."""

    reason: FailureReason
    message: str
    """Message with problem, place and remedy."""

    @property
    def passes(self) -> bool:
        """Return whether a retry may succeed without a fix."""
        return self.reason in _PASSING


class FetchResponse(ApiModel):
    """The response of the fetch process."""

    revision: str = ""
    """The commit; empty if it is not known."""
    commit: GitCommit | None = None
    """Author and subject of the commit, if it was read."""
    failure: FetchFailure | None = None
    documents: int = 0
    """Number of lines that follow."""
    files: int = 0
    """Number of files that they come from."""


def line_of(document: Document) -> str:
    """Encode a document as one line: its file, its value, and the places of everything in it."""
    places = _encoded(_packed(document.root))
    return _encoded([document.source, document.tree, places])


def document_of(line: bytes) -> Document:
    """Decode the document of a line. Places are decoded on first use: they are as large as ten values.

    Raises:
        ValueError: the line is not a document.

    """
    try:
        source, tree, places = json.loads(line)
        return Document(source=str(source), root=partial(_root, str(places)), tree=tree)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not a document: {error}") from error


def _encoded(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _root(places: str) -> YamlNode:
    """Return the document with its places; without them if they are broken, for they only serve messages."""
    try:
        return _unpacked(json.loads(places))
    except (ValueError, TypeError, RecursionError):
        return YamlNode(mark=Mark(line=1, column=1), content={})


def _packed(node: YamlNode) -> list[Any]:
    """Return line, column, other file, original text and content."""
    mark, content = node.mark, node.content
    value: Any = content
    if isinstance(content, dict):
        value = {
            key: [entry.mark.line, entry.mark.column, entry.mark.source, _packed(entry.node)]
            for key, entry in content.items()
        }
    elif isinstance(content, list):
        value = [_packed(item) for item in content]
    return [mark.line, mark.column, mark.source, node.text, value]


def _unpacked(packed: list[Any]) -> YamlNode:
    line, column, source, text, value = packed
    content: Any = value
    if isinstance(value, dict):
        content = {
            key: MappingEntry(mark=Mark(line=at, column=col, source=file), node=_unpacked(node))
            for key, (at, col, file, node) in value.items()
        }
    elif isinstance(value, list):
        content = [_unpacked(item) for item in value]
    return YamlNode(mark=Mark(line=line, column=column, source=source), content=content, text=text)
