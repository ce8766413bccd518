"""What the leader asks the fetching process, and what that answers: lines of JSON. Pure; knows no Git.

One line asks; one answers, followed by a line for each document that the commit holds. Documents travel parsed, with the
places of their fields, so that the leader never scans a stranger's YAML and still says at which line a field is wrong.
"""

import json
from typing import Any, Literal, TypeAlias

from manifests.overlay import SourceDocument
from manifests.yaml.nodes import MappingEntry, Mark, YamlNode
from schemas.meta import ApiModel

FailureReason: TypeAlias = Literal[
    # Nobody answers, or nobody answers in time: it may pass.
    "Unreachable",
    "TimedOut",
    "NoSpace",
    "FetchingFailed",
    # A person has to mend it.
    "AuthenticationFailed",
    "HostKeyRefused",
    "CertificateRefused",
    "CredentialsMissing",
    "RepositoryNotFound",
    "ReferenceNotFound",
    "PathNotFound",
    "TooLarge",
    # A commit has to mend it.
    "BrokenManifests",
]
_PASSING: tuple[FailureReason, ...] = ("Unreachable", "TimedOut", "NoSpace", "FetchingFailed")


class FetchCredentials(ApiModel):
    """Who we are; the files are whole paths."""

    username: str = ""
    password_file: str | None = None
    ssh_key_file: str | None = None
    known_hosts_file: str | None = None
    ca_file: str | None = None


class FetchRequest(ApiModel):
    """Which commit is wanted."""

    repository: str
    branch: str | None = None
    tag: str | None = None
    commit: str | None = None
    path: str = ""
    """The folder in it."""
    cache: str
    """Where what was fetched is kept."""
    credentials: FetchCredentials = FetchCredentials()
    known: str | None = None
    """A commit whose documents we have: if it is still the one, they are not sent."""
    offline: bool = False
    """Whether to look only at what was fetched before."""
    timeout_s: float


class FetchFailure(ApiModel):
    """Why there are no documents."""

    reason: FailureReason
    message: str
    """For people: what is wrong, where, and what to do."""

    @property
    def passes(self) -> bool:
        """Return whether it may be gone by itself the next time."""
        return self.reason in _PASSING


class FetchResponse(ApiModel):
    """What was found."""

    revision: str = ""
    """The commit, as far as it is known."""
    failure: FetchFailure | None = None
    documents: int = 0
    """How many lines follow."""
    files: int = 0
    """From how many files they are."""


def line_of(document: SourceDocument) -> str:
    """Return a document as one line."""
    return json.dumps([document.source, _packed(document.root)], separators=(",", ":"))


def document_of(line: bytes) -> SourceDocument:
    """Return the document of a line.

    Raises:
        ValueError: it is no such line.

    """
    try:
        source, root = json.loads(line)
        return SourceDocument(source=str(source), root=_unpacked(root))
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"no document: {error}") from error


def _packed(node: YamlNode) -> list[Any]:
    """Return line, column, other file, spelling and content."""
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
