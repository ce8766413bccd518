"""ModelSnapshot: the commit that a deployment's hub model is pinned to, with what the memory proof needs of it."""

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from schemas.deployment import HUB_COMMIT_PATTERN, HubEndpoint, HubReference, ModelDeployment
from schemas.meta import HUB_REFRESHED_AT, ApiModel, ObjectName

MAX_CONFIG_CHARACTERS = 65_536
MAX_HEADERS_CHARACTERS = 480_000
_Bytes = Annotated[int, Field(ge=0)]


class SnapshotWeights(ApiModel):
    """Sums over the tensors of a snapshot, read from the headers of its weight files."""

    total_bytes: _Bytes
    half_bytes: _Bytes
    """The part that is float16 or bfloat16."""
    replicated_bytes: _Bytes
    """The part that every rank of a split model keeps whole."""
    replicated_half_bytes: _Bytes
    parameters: _Bytes
    has_mtp_head: bool | None = None
    """True if there is a head for multi-token prediction; None in snapshots of older releases."""
    expert_bytes: _Bytes = 0
    """Routed experts, of which a token reads a few; 0 in snapshots of older releases."""
    expert_half_bytes: _Bytes = 0
    looked_up_bytes: _Bytes = 0
    """Tables of which a token reads one row; 0 in snapshots of older releases."""
    looked_up_half_bytes: _Bytes = 0


class LargeFile(ApiModel):
    """A large file of a snapshot: commits that share it need it once."""

    digest: Annotated[
        str, StringConstraints(pattern=r"^(sha256:[0-9a-f]{64}|git-sha1:[0-9a-f]{40})$")
    ]
    size_bytes: _Bytes


class ModelSnapshot(ApiModel):
    """The value of `snapshot/<deployment>`, which the leading reconciler writes."""

    deployment: ObjectName
    uid: str
    """The uid of the deployment: one of the same name that follows it is resolved anew."""
    source: HubReference
    """The reference that was resolved, as the deployment writes it."""
    endpoint: HubEndpoint | None = None
    """The hub that answered; the Macs fetch from the same one."""
    refreshed_at: str = ""
    """The value of the annotation fleet/hub-refreshed-at at that time."""
    commit: Annotated[str, StringConstraints(pattern=rf"^{HUB_COMMIT_PATTERN}$")]
    resolved_at: datetime
    files: Annotated[int, Field(ge=1)]
    size_bytes: _Bytes
    """Bytes of all files that are fetched."""
    large_files: tuple[LargeFile, ...] = ()
    """The files of a MiB and more. Snapshots of older releases have none."""
    config: Annotated[str, StringConstraints(max_length=MAX_CONFIG_CHARACTERS)]
    """The fields of config.json that the memory proof needs, as JSON."""
    weights: SnapshotWeights
    headers: Annotated[str, StringConstraints(max_length=MAX_HEADERS_CHARACTERS)] = ""
    """config.json and the headers of the weight files, packed (models/weight_headers.py); "" if they are too long."""

    @property
    def pinned(self) -> HubReference:
        """Return the reference with the commit in the place of the branch, and the hub that has it."""
        return self.source.pinned_to(self.commit, self.endpoint)

    @property
    def folder(self) -> str:
        """Return the folder that holds the commit, below the models folder."""
        return self.pinned.folder

    def resolves(self, deployment: ModelDeployment) -> bool:
        """Return whether this is the answer to what the deployment asks for now."""
        refreshed_at = deployment.metadata.annotations.get(HUB_REFRESHED_AT, "")
        return (self.uid, self.source, self.refreshed_at) == (
            deployment.metadata.uid,
            deployment.spec.model.hub,
            refreshed_at,
        )


class PreloadAssignment(ApiModel):
    """The value of `preload/<node>/<deployment>`: the node's agent fetches the commit and keeps it, without a replica."""

    deployment: ObjectName
    node: ObjectName
    source: HubReference
    """The commit, and the hub that has it."""


def pinned(deployment: ModelDeployment, snapshot: ModelSnapshot) -> ModelDeployment:
    """Return the deployment with the snapshot's commit; unchanged if the snapshot answers another reference."""
    if not snapshot.resolves(deployment):
        return deployment
    model = deployment.spec.model.model_copy(update={"hub": snapshot.pinned})
    spec = deployment.spec.model_copy(update={"model": model})
    return deployment.model_copy(update={"spec": spec})
