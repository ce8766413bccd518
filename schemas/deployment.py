"""ModelDeployment: a model that the fleet keeps serving; and Revision: an earlier version of one, to roll back to."""

from datetime import datetime
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from schemas.autoscaling import Autoscaling
from schemas.meta import ApiModel, ApiObject, ObjectName, Status
from schemas.placement import Placement
from schemas.quantity import Amount, PositiveQuantity, Quantity
from schemas.rollout import Rollout
from schemas.routing import Routing

ServedName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", max_length=200)
]


def _within(path: str) -> str:
    """Refuse paths that leave an agent's models folder."""
    if ".." in path.split("/"):
        raise ValueError(
            "must not contain '..'; write an absolute path, or one below the models folder"
        )
    return path


ModelPath = Annotated[
    str,
    StringConstraints(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f]+$"),
    AfterValidator(_within),
]


class DraftModel(ApiModel):
    """A small model that proposes the next tokens, which the model verifies in one step (speculative decoding)."""

    path: ModelPath
    """Its folder on the node, as model.path. It must have the model's tokenizer."""
    tokens: Annotated[int, Field(ge=1, le=16)] = 3
    """Tokens that it proposes at once, while a single request runs. The output does not depend on it."""


class ModelSource(ApiModel):
    """The weights, and optionally an adapter and a draft model."""

    path: ModelPath
    """A folder in MLX format on the node: absolute, or below the agent's models folder."""
    adapter: ModelPath | None = None
    """A folder with a LoRA adapter for the model, as `mlx_lm.lora` writes it; resolved like model.path."""
    draft: DraftModel | None = None
    """A draft model for speculative decoding, which makes a single request faster."""

    @model_validator(mode="after")
    def _folders_differ(self) -> Self:
        own = PurePosixPath(self.path)
        if self.adapter is not None and PurePosixPath(self.adapter) == own:
            raise ValueError(
                "adapter is the model's own folder; write the folder that holds adapters.safetensors"
            )
        if self.draft is not None and PurePosixPath(self.draft.path) == own:
            raise ValueError(
                "draft.path is the model itself, which proposes tokens no faster; write a smaller model"
            )
        return self


class KvCache(ApiModel):
    """The cache of keys and values of earlier tokens."""

    bits: Literal[4, 8] | None = None
    """Bits of a number in the cache. Default: as the model computes them (16 bits on a Mac)."""
    window: Annotated[int, Field(ge=16, le=16_777_216)] | None = None
    """Tokens that the model attends to at most; older ones are dropped. Default: all."""
    prefix_bytes: Quantity | None = None
    """Memory for cached prompts, such as "4Gi", on top of what requests need; "0" caches none.
    Default: prompts are cached in the part of the KV cache that running requests do not use."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.bits is not None and self.window is not None:
            raise ValueError(
                "has bits and window, and a sliding cache cannot be quantized; remove one of them"
            )
        return self


# The golden question and its answer fit into this, with any tokenizer (models/golden_question.py).
LEAST_SPLIT_CONTEXT = 256
# Object names have no capital letters, so the two words cannot be names.
Sharding = Literal["Never", "Auto"] | ObjectName


def _none_if_empty(kept: KvCache | None) -> KvCache | None:
    """Return None for an empty mapping: `kvCache: {}` must not make another version of a deployment."""
    return None if kept == KvCache() else kept


class Resources(ApiModel):
    """Resources of one replica, in place of the fleet's own estimate."""

    memory: PositiveQuantity
    """Memory of one replica, such as "20Gi", in place of the memory proof's sum. A replica that needs more
    than this may take its Mac down."""


class ModelDeploymentSpec(ApiModel):
    """The model to serve, and how."""

    model: ModelSource
    """The weights, and optionally an adapter and a draft model."""
    served_names: tuple[ServedName, ...] = ()
    """Names besides the deployment's own that clients may use in "model": other names, tiers."""
    replicas: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Complete copies of the model to serve; with autoscaling, the number to start with."""
    context_length: Annotated[int, Field(ge=16, le=16_777_216)] = 4096
    """Longest prompt plus output of one request, in tokens."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 4
    """Requests that one replica works on at once."""
    queue_depth: Annotated[int, Field(ge=0, le=65_536)] | None = None
    """Requests that may wait at a replica before clients are told to come back. Default: 4 x concurrency."""
    kv_cache: Annotated[KvCache | None, AfterValidator(_none_if_empty)] = None
    """The cache of keys and values of earlier tokens."""
    placement: Placement = Placement()
    """Nodes that may run replicas, and preferences among them."""
    sharding: Sharding = "Never"
    """Never: each replica has one Mac. Auto: the smallest ShardGroup with room, where no single Mac has room.
    A name: that ShardGroup."""
    resources: Resources | None = None
    """Resources of one replica, in place of the fleet's own estimate."""
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] = 0
    """Replicas of a higher priority may displace those of a lower one where there is not room for both."""
    min_available: Amount = 0
    """Replicas that must stay available while nodes are drained or withheld by their pools, or a percentage
    of the wanted number (rounded up)."""
    rollout: Rollout = Rollout()
    """The replacement of replicas when the template changes."""
    autoscaling: Autoscaling | None = None
    """Bounds for the number of replicas, which load decides. Default: `replicas` is the number."""
    routing: Routing = Routing()
    """The distribution of requests over the replicas by gateways."""

    @model_validator(mode="after")
    def _window_makes_sense(self) -> Self:
        window = self.kv_cache.window if self.kv_cache is not None else None
        if window is not None and window >= self.context_length:
            raise ValueError(
                f"kvCache.window is {window}, and no request is longer than contextLength, "
                f"{self.context_length}; leave the window out, or make it smaller"
            )
        if window is not None and self.model.draft is not None:
            raise ValueError(
                "has kvCache.window and model.draft, and rejected draft tokens cannot be removed from a "
                "sliding cache; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _can_be_split(self) -> Self:
        if self.sharding == "Never":
            return self
        kept = "adapter" if self.model.adapter is not None else "draft" if self.model.draft else ""
        if kept:
            raise ValueError(
                f"has sharding: {self.sharding} and model.{kept}, which engines of several ranks cannot use; "
                "remove one of them"
            )
        if self.context_length < LEAST_SPLIT_CONTEXT:
            raise ValueError(
                f"has sharding: {self.sharding} and contextLength {self.context_length}; a group is checked with a "
                f"question before it serves, which needs {LEAST_SPLIT_CONTEXT}"
            )
        return self


class NodeRefusal(ApiModel):
    """The reason why one node cannot take a replica."""

    node: ObjectName
    reason: str
    message: str


class CanaryStatus(ApiModel):
    """Progress of the trial of a new version."""

    template: str
    """The hash of the new version."""
    step: int = 0
    """The step of rollout.canary.steps in progress, from 0; the number of steps when all have passed."""
    weight: int = 0
    """Percent of the requests that go to the new version."""
    since: datetime
    """Start of the step."""
    outcome: Literal["Running", "Passed", "Failed"] = "Running"
    message: str = ""
    """The measurements, for people."""


class ModelDeploymentStatus(Status):
    """The observed state of a deployment."""

    replicas: int = 0
    """Replicas that are placed."""
    desired_replicas: int = 0
    """Replicas wanted now: spec.replicas, or the number from autoscaling."""
    updated_replicas: int = 0
    """Replicas that run the newest revision."""
    revision: int = 0
    """The number of the newest revision."""
    template: str = ""
    """The newest revision's hash, as replicas and endpoints carry it."""
    stable_template: str = ""
    """The hash of the last revision whose rollout was completed: a failed canary rolls back to it."""
    canary: CanaryStatus | None = None
    """Progress of the trial of the newest revision, if there is one."""
    progressed_at: datetime | None = None
    """Time of the last progress of the rollout; the progress deadline runs from there."""
    ready_replicas: int = 0
    """Replicas that answer."""
    refusals: tuple[NodeRefusal, ...] = ()
    """The reasons why nodes cannot take the missing replicas (at most 20 nodes)."""


class ModelDeployment(ApiObject):
    """A model that the fleet keeps serving."""

    kind: Literal["ModelDeployment"] = "ModelDeployment"
    spec: ModelDeploymentSpec
    """The model to serve, and how."""
    status: ModelDeploymentStatus | None = None
    """The observed state; written by the reconciler."""


def served_names(deployment: ModelDeployment) -> tuple[str, ...]:
    """Return every name that clients may use for the deployment, its own first, without repeats."""
    return tuple(dict.fromkeys((deployment.metadata.name, *deployment.spec.served_names)))


class RevisionTemplate(ApiModel):
    """The part of a deployment's spec that an engine is started with: a change of it starts a rollout."""

    model: ModelSource
    served_names: tuple[ServedName, ...] = ()
    context_length: int
    concurrency: int
    queue_depth: int | None = None
    kv_cache: KvCache | None = None
    resources: Resources | None = None
    sharding: Sharding = "Never"
    restarted_at: str = ""
    """The time of the last `fleetctl rollout restart`: a new value restarts the engines."""


class RevisionSpec(ApiModel):
    """One version of a deployment."""

    deployment: ObjectName
    template: str
    """Hash of the template."""
    revision: Annotated[int, Field(ge=1)]
    """Counts up; a revision that is rolled back to becomes the newest again."""
    content: RevisionTemplate
    """The template that its replicas run."""
    change_cause: str = ""
    """The annotation kubernetes.io/change-cause if it was new, or else the revision that it returned to, or the changed
    fields."""


class Revision(ApiObject):
    """A version of a deployment that ran, kept for rollback."""

    kind: Literal["Revision"] = "Revision"
    spec: RevisionSpec
