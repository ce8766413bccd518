"""GitSource: a Git repository whose manifests the fleet applies continuously."""

import re
from datetime import datetime
from typing import Annotated, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from schemas.duration import PositiveDuration, at_least
from schemas.meta import ApiModel, ApiObject, Examples, ObjectName, Status

SYNC_REQUESTED = "fleet/sync-requested"
"""The annotation that requests a sync; `fleetctl sync` writes another value each time."""
DIFF_REQUESTED = "fleet/diff-requested"
"""The annotation that requests a preview: `fleetctl diff gs/NAME` and `fleetctl sync --dry-run`."""
_MANAGER = "gitsource/"
_SCHEMES = ("https", "http", "ssh", "git", "file")
_SCP = re.compile(r"[A-Za-z0-9._-]+@[A-Za-z0-9._-]+:[^\s:][^\s]*")


def manager_of(source: str) -> str:
    """Return the field manager that applies the manifests of a source."""
    return f"{_MANAGER}{source}"


def source_of_manager(manager: str) -> str | None:
    """Return the source of a field manager; None for other managers."""
    name = manager.removeprefix(_MANAGER)
    return name if name and name != manager else None


_HOST = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?|[0-9a-f:.]+:[0-9a-f:.]*")


def _repository(text: str) -> str:
    scheme, colon, rest = text.partition("://")
    if colon and scheme in _SCHEMES and rest.strip("/") and not re.search(r"[\s\x00-\x1f]", text):
        if re.match(r"[^/@]*:[^/@]*@", rest):
            raise ValueError("must not contain a password; use credentials.passwordFile")
        if rest.startswith("-"):
            raise ValueError("must not have a host that begins with a dash")
        return text
    if _SCP.fullmatch(text) and not text.startswith("-"):
        return text
    raise ValueError(
        "is not the address of a repository; write https://HOST/PATH, ssh://USER@HOST/PATH, USER@HOST:PATH, "
        "git://HOST/PATH or file:///PATH"
    )


def _inside(text: str) -> str:
    if text.startswith("/") or ".." in text.split("/") or "\\" in text:
        raise ValueError("must stay inside the repository; write a folder such as sites/berlin")
    return text


Repository = Annotated[
    str,
    StringConstraints(min_length=1, max_length=1000),
    AfterValidator(_repository),
    Examples(("https://git.example.com/fleet.git", "ssh://git@git.example.com/fleet.git")),
]
Folder = Annotated[
    str,
    StringConstraints(max_length=500, pattern=r"^[^\x00-\x1f]*$"),
    AfterValidator(_inside),
    Examples(("sites/berlin",)),
]
# No slash: a manifest must not make the reconciler read and send an arbitrary file.
SecretFile = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=128)
]
RefName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._/+@-]*$", max_length=250),
    Examples(("main", "v1.2")),
]
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]


class RepositoryAddress(NamedTuple):
    """The host and path of a repository, the same for all protocols; without a host it is a path on this machine."""

    host: str
    path: str


def repository_address(text: str) -> RepositoryAddress:
    """Return the host and path of an address; empty where it has none that can be used."""
    scheme, colon, _ = text.partition("://")
    if not colon:
        found = _SCP.fullmatch(text)
        head, _, path = text.partition(":") if found else ("", "", "")
        host = head.rpartition("@")[2]
    elif scheme == "file":
        return RepositoryAddress("", urlsplit(text).path)
    else:
        try:
            parts = urlsplit(text)
            host, path = parts.hostname or "", parts.path
        except ValueError:
            host, path = "", ""
    host = host.lower()
    # The host names a folder, so it must not lead out of the one above.
    is_plain = _HOST.fullmatch(host) is not None
    return RepositoryAddress(host if is_plain else "", path.strip("/").removesuffix(".git").lower())


class GitReference(ApiModel):
    """The commit to apply: a branch, a tag or a hash."""

    branch: RefName | None = None
    """The newest commit of a branch."""
    tag: RefName | None = None
    """The commit of a tag."""
    commit: Commit | None = None
    """One commit, by its full hash."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(one is not None for one in (self.branch, self.tag, self.commit)) != 1:
            raise ValueError("needs exactly one of branch, tag and commit")
        return self


class GitCredentials(ApiModel):
    """Credentials for the repository: files in the host's folder in --git-credentials, on each Mac that may lead."""

    username: Annotated[str, StringConstraints(max_length=250)] = ""
    """User over https; over ssh the address contains it."""
    password_file: SecretFile | None = None
    """File with a password or token, for https."""
    ssh_key_file: SecretFile | None = None
    """File with a private key, for ssh."""
    known_hosts_file: SecretFile | None = None
    """File with the hosts' keys, for ssh; other hosts are refused."""
    ca_file: SecretFile | None = None
    """File with CA certificates (PEM) for the host, for https."""


class HealthCheck(ApiModel):
    """An object that must be healthy before the source is Ready."""

    kind: Literal["ModelDeployment", "ModelRoute", "NodePool", "ShardGroup"]
    name: ObjectName


class GitSourceSpec(ApiModel):
    """The manifests to apply, and how."""

    repository: Repository
    """The address of the repository."""
    reference: GitReference = GitReference(branch="main")
    """The commit to apply."""
    path: Folder = ""
    """The folder with the manifests, including its subfolders. Default: the whole repository."""
    interval: Annotated[
        PositiveDuration, at_least("1s", "each check asks the repository"), Examples(("30s", "10m"))
    ] = "1m"
    """Time between checks for a new commit, and for drift."""
    timeout: PositiveDuration = "60s"
    """Time limit of one check."""
    prune: bool = False
    """Delete objects that the manifests no longer contain."""
    suspend: bool = False
    """Change nothing for now."""
    drift_policy: Literal["Correct", "Warn"] = "Correct"
    """Treatment of fields that others changed. Correct: restore the manifest's value. Warn: only show the drift."""
    force: bool = False
    """Let the manifests win where another writer has changed the same fields."""
    credentials: GitCredentials | None = None
    """Credentials for the repository. Default: anonymous access."""
    depends_on: Annotated[tuple[ObjectName, ...], Field(max_length=50)] = ()
    """GitSources that must be Ready first."""
    health_checks: Annotated[tuple[HealthCheck, ...], Field(max_length=100)] = ()
    """Objects that must be healthy before this source is Ready: Available, Accepted or Ready, depending on the kind."""
    health_timeout: PositiveDuration = "10m"
    """Time that they may take before this source is Stalled."""


class InventoryEntry(ApiModel):
    """An object that came from the repository."""

    kind: str
    name: ObjectName


class DriftedField(ApiModel):
    """One field with two values, each on one line and cut if it is long."""

    path: str
    wanted: str
    """The value in the repository, `unset` without one."""
    actual: str
    """The value in the store."""


class Drift(ApiModel):
    """An object that differs from the manifests."""

    kind: str
    name: ObjectName
    fields: tuple[str, ...]
    """The fields that differ; empty if the object is gone."""
    managers: tuple[str, ...] = ()
    """The field managers that wrote them."""
    values: tuple[DriftedField, ...] = ()
    """The fields with their values, the first ones."""


class GitCommit(ApiModel):
    """The author and subject of a commit; without control characters, and cut if they are long."""

    author: Annotated[str, StringConstraints(max_length=100)] = ""
    """The name of the author."""
    subject: Annotated[str, StringConstraints(max_length=200)] = ""
    """The first line of the message."""


class PreviewedChange(ApiModel):
    """A change that the newest commit would make to one object."""

    kind: str
    name: ObjectName
    action: Literal["created", "configured", "pruned"]
    diff: str = ""
    """Unified diff of the live object and the manifest; cut if it is long."""


class SourcePreview(ApiModel):
    """The changes that the next sync would make, for one request."""

    request: str
    """The value of the annotation that requested it."""
    revision: str = ""
    """The newest commit; empty if it could not be fetched."""
    changes: tuple[PreviewedChange, ...] = ()
    omitted: int = 0
    """The number of further changes, which are left out of a large preview."""
    problem: str = ""
    """The reason why the commit could not be applied; empty if it could."""


class GitSourceStatus(Status):
    """The observed state of a source. Conditions: Ready, Reconciling, Stalled."""

    observed_revision: str = ""
    """The newest commit that was found, as `main@9f1c...`."""
    observed_commit: GitCommit | None = None
    """Author and subject of the newest commit."""
    applied_revision: str = ""
    """The commit whose manifests are all in the store."""
    applied_commit: GitCommit | None = None
    """Author and subject of the applied commit."""
    applied_at: datetime | None = None
    """Time at which all of them were first in the store."""
    inventory: tuple[InventoryEntry, ...] = ()
    """The objects that came from the repository."""
    drift: tuple[Drift, ...] = ()
    """The objects that differ from it, where driftPolicy is Warn."""
    last_sync: str = ""
    """The last `fleetctl sync` that was carried out."""
    preview: SourcePreview | None = None
    """The answer to `fleetctl diff gs/NAME`; removed with the request."""


class GitSource(ApiObject):
    """A Git repository whose manifests the fleet applies continuously."""

    kind: Literal["GitSource"] = "GitSource"
    spec: GitSourceSpec
    """The manifests to apply, and how."""
    status: GitSourceStatus | None = None
    """The observed state; written by the reconciler."""


def with_sync_request(source: GitSource, request_id: str) -> GitSource:
    """Return the source with the request of a sync; each request has another id."""
    annotations = {**source.metadata.annotations, SYNC_REQUESTED: request_id}
    metadata = source.metadata.model_copy(update={"annotations": annotations})
    return source.model_copy(update={"metadata": metadata})
