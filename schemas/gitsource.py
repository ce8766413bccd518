"""GitSource: manifests in a Git repository that the fleet keeps itself to."""

import re
from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from schemas.duration import PositiveDuration
from schemas.meta import ApiModel, ApiObject, Examples, ObjectName, Status

SYNC_REQUESTED = "fleet/sync-requested"
"""Which `fleetctl sync` is to be carried out: another word each time."""
_SCHEMES = ("https", "http", "ssh", "git", "file")
_SCP = re.compile(r"[A-Za-z0-9._-]+@[A-Za-z0-9._-]+:[^\s:][^\s]*")


def _repository(text: str) -> str:
    scheme, colon, rest = text.partition("://")
    if colon and scheme in _SCHEMES and rest.strip("/") and not re.search(r"[\s\x00-\x1f]", text):
        if re.match(r"[^/@]*:[^/@]*@", rest):
            raise ValueError("must not have a password in it; write credentials.passwordFile")
        if rest.startswith("-"):
            raise ValueError("must not begin its host with a dash")
        return text
    if _SCP.fullmatch(text) and not text.startswith("-"):
        return text
    raise ValueError(
        "is no address of a repository; write https://HOST/PATH, ssh://USER@HOST/PATH, USER@HOST:PATH, "
        "git://HOST/PATH or file:///PATH"
    )


def _inside(text: str) -> str:
    if text.startswith("/") or ".." in text.split("/") or "\\" in text:
        raise ValueError("must stay inside of the repository; write a folder such as sites/berlin")
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
# No slash: a manifest must not make the reconciler read, and send away, any file it likes.
SecretFile = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=128)
]
RefName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._/+@-]*$", max_length=250),
    Examples(("main", "v1.2")),
]


class GitReference(ApiModel):
    """Which commit; one of the three."""

    branch: RefName | None = None
    """The newest commit of a branch."""
    tag: RefName | None = None
    """The commit of a tag."""
    commit: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")] | None = None
    """One commit, by its full hash."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(one is not None for one in (self.branch, self.tag, self.commit)) != 1:
            raise ValueError("needs one of branch, tag and commit")
        return self


class GitCredentials(ApiModel):
    """Who the reconciler is to the repository; files lie in its --git-credentials folder, on each Mac that may lead."""

    username: Annotated[str, StringConstraints(max_length=250)] = ""
    """User over https; over ssh the address says it."""
    password_file: SecretFile | None = None
    """File with a password or token, for https."""
    ssh_key_file: SecretFile | None = None
    """File with a private key, for ssh."""
    known_hosts_file: SecretFile | None = None
    """File with the hosts' keys, for ssh; a host that is not in it is refused."""
    ca_file: SecretFile | None = None
    """File with the certificates (PEM) that vouch for the host, for https."""


class HealthCheck(ApiModel):
    """An object that must be well before the source is Ready."""

    kind: Literal["ModelDeployment", "ModelRoute", "NodePool", "ShardGroup"]
    name: ObjectName


class GitSourceSpec(ApiModel):
    """Which manifests, from where, and what happens with them."""

    repository: Repository
    """Where the repository is."""
    reference: GitReference = GitReference(branch="main")
    """Which commit of it."""
    path: Folder = ""
    """The folder with the manifests, with all below it; left out, the whole repository."""
    interval: PositiveDuration = "1m"
    """How often to look for a new commit, and for drift."""
    timeout: PositiveDuration = "60s"
    """How long looking may take."""
    prune: bool = False
    """Whether what the manifests said once and say no more is deleted."""
    suspend: bool = False
    """Whether to leave everything as it is."""
    drift_policy: Literal["Correct", "Warn"] = "Correct"
    """What happens when somebody changed what the manifests say: it is put back, or only shown."""
    force: bool = False
    """Whether the manifests win where another writer has changed the same fields."""
    credentials: GitCredentials | None = None
    """Who the reconciler is to the repository; left out, nobody."""
    depends_on: Annotated[tuple[ObjectName, ...], Field(max_length=50)] = ()
    """GitSources that must be Ready first."""
    health_checks: Annotated[tuple[HealthCheck, ...], Field(max_length=100)] = ()
    """Objects that must be well before this one is Ready: Available, Accepted or Ready, as their kind calls it."""
    health_timeout: PositiveDuration = "10m"
    """How long they may take, before this one is Stalled."""


class InventoryEntry(ApiModel):
    """An object that came from the repository."""

    kind: str
    name: ObjectName


class Drift(ApiModel):
    """An object that is not as the manifests say."""

    kind: str
    name: ObjectName
    fields: tuple[str, ...]
    """Which fields differ, or none if the object is gone."""
    managers: tuple[str, ...] = ()
    """Who wrote them."""


class GitSourceStatus(Status):
    """What became of the manifests. Conditions: Ready, Reconciling, Stalled."""

    observed_revision: str = ""
    """The newest commit that was seen, as `main@9f1c...`."""
    applied_revision: str = ""
    """The commit whose manifests are in the store, all of them."""
    applied_at: datetime | None = None
    """When they were first all there."""
    inventory: tuple[InventoryEntry, ...] = ()
    """What came from it."""
    drift: tuple[Drift, ...] = ()
    """What is not as it says, where driftPolicy is Warn."""
    last_sync: str = ""
    """The last `fleetctl sync` that was carried out."""


class GitSource(ApiObject):
    """A Git repository whose manifests the fleet applies by itself."""

    kind: Literal["GitSource"] = "GitSource"
    spec: GitSourceSpec
    """Which manifests, from where, and what happens with them."""
    status: GitSourceStatus | None = None
    """What became of them; written by the reconciler."""
