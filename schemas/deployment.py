"""ModelDeployment: which model should run, how often, and where it may go.

Revision: what a deployment's replicas ran once, kept to go back to.
"""

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
    """Refuse paths that would step out of an agent's models folder."""
    if ".." in path.split("/"):
        raise ValueError(
            "must not contain '..'; give an absolute path or one below the models folder"
        )
    return path


ModelPath = Annotated[
    str,
    StringConstraints(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f]+$"),
    AfterValidator(_within),
]


class DraftModel(ApiModel):
    """A small model that guesses the next tokens, which the model then checks all at once."""

    path: ModelPath
    """Its folder on the node, as model.path. It must know the same tokens."""
    tokens: Annotated[int, Field(ge=1, le=16)] = 3
    """How many tokens it guesses at once, while a single request runs. What is answered does not depend on it."""


class ModelSource(ApiModel):
    """Where the weights come from."""

    path: ModelPath
    """A folder in MLX format on the node: absolute, or below the agent's models folder."""
    adapter: ModelPath | None = None
    """A folder with a LoRA adapter for the model, as `mlx_lm.lora` writes it; found as model.path is."""
    draft: DraftModel | None = None
    """A small model that guesses tokens, so that one request is answered faster."""

    @model_validator(mode="after")
    def _folders_differ(self) -> Self:
        own = PurePosixPath(self.path)
        if self.adapter is not None and PurePosixPath(self.adapter) == own:
            raise ValueError(
                "adapter is the model's own folder; name the folder that holds adapters.safetensors"
            )
        if self.draft is not None and PurePosixPath(self.draft.path) == own:
            raise ValueError(
                "draft.path is the model itself, which guesses no faster than it answers; name a smaller model"
            )
        return self


class KvCache(ApiModel):
    """How the keys and values of the tokens read so far are kept."""

    bits: Literal[4, 8] | None = None
    """Bits of a number in the cache; left out, numbers stay as the model computes them (16 bits on a Mac)."""
    window: Annotated[int, Field(ge=16, le=16_777_216)] | None = None
    """How many tokens back the model sees at most; older ones are forgotten. Left out, it sees all of them."""
    prefix_bytes: Quantity | None = None
    """Memory for prompts that were read before, such as "4Gi", on top of what requests need; "0" keeps none.
    Left out, prompts are kept in what the requests under way leave of their share."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.bits is not None and self.window is not None:
            raise ValueError(
                "has bits and window, and a cache that forgets cannot be quantized; remove one of them"
            )
        return self


# The golden question and its answer, in the words of any tokenizer (models/golden_question.py).
LEAST_SPLIT_CONTEXT = 256
# The words cannot be names, which have no capital letters.
Sharding = Literal["Never", "Auto"] | ObjectName


def _none_if_empty(kept: KvCache | None) -> KvCache | None:
    """Return None for what says nothing: `kvCache: {}` must not be another version of a deployment."""
    return None if kept == KvCache() else kept


class Resources(ApiModel):
    """What one replica may take, where the fleet should not work it out itself."""

    memory: PositiveQuantity
    """Memory of one replica, such as "20Gi", in place of the memory proof's sum. A replica that needs more
    than its owner says here may bring its Mac down."""


class ModelDeploymentSpec(ApiModel):
    """What should run."""

    model: ModelSource
    """Where the weights come from."""
    served_names: tuple[ServedName, ...] = ()
    """Names that clients may use in "model" besides the deployment's own: other names, tiers."""
    replicas: Annotated[int, Field(ge=0, le=10_000)] = 1
    """How many complete copies of the model should serve; with autoscaling, how many to begin with."""
    context_length: Annotated[int, Field(ge=16, le=16_777_216)] = 4096
    """Longest prompt plus answer of one request, in tokens."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 4
    """How many requests one replica works on at once."""
    queue_depth: Annotated[int, Field(ge=0, le=65_536)] | None = None
    """How many more may wait there before clients are told to come back; left out, 4 x concurrency."""
    kv_cache: Annotated[KvCache | None, AfterValidator(_none_if_empty)] = None
    """How the tokens that requests have read are kept."""
    placement: Placement = Placement()
    """Where replicas may go."""
    sharding: Sharding = "Never"
    """Never: each replica has one Mac. Auto: where no single Mac has room for one, the smallest ShardGroup that
    has. A name: that ShardGroup."""
    resources: Resources | None = None
    """What one replica takes, if the fleet's own sum is not to count."""
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] = 0
    """Replicas of a higher priority may displace those of a lower one where there is no room for both."""
    min_available: Amount = 0
    """How many replicas must go on answering while nodes are drained or withheld by their pools, or a percentage
    of the wanted number (rounded up)."""
    rollout: Rollout = Rollout()
    """How replicas are replaced when what they run changes."""
    autoscaling: Autoscaling | None = None
    """Bounds for the number of replicas, where load decides; left out, `replicas` says it."""
    routing: Routing = Routing()
    """How gateways share out requests over the replicas."""

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
                "has kvCache.window and model.draft, and what was guessed wrong cannot be taken back from a "
                "cache that forgets; remove one of them"
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
    """Why one node cannot take a replica."""

    node: ObjectName
    reason: str
    message: str


class CanaryStatus(ApiModel):
    """How far the trial of a new version is."""

    template: str
    """The new version."""
    step: int = 0
    """Which of rollout.canary.steps is under way, from 0; as many as there are steps: all were passed."""
    weight: int = 0
    """Percent of the requests that go to the new version."""
    since: datetime
    """When the step began."""
    outcome: Literal["Running", "Passed", "Failed"] = "Running"
    message: str = ""
    """What was measured, for people."""


class ModelDeploymentStatus(Status):
    """What is true of a deployment."""

    replicas: int = 0
    """Replicas that are placed."""
    desired_replicas: int = 0
    """Replicas that are wanted now: spec.replicas, or what autoscaling made of it."""
    updated_replicas: int = 0
    """Replicas that run the newest revision."""
    revision: int = 0
    """The number of the newest revision."""
    template: str = ""
    """The newest revision's hash, as replicas and endpoints carry it."""
    stable_template: str = ""
    """The revision whose rollout was completed last: what a failed canary goes back to."""
    canary: CanaryStatus | None = None
    """How far the trial of the newest revision is, if there is one."""
    progressed_at: datetime | None = None
    """When the rollout last moved: from there the progress deadline runs."""
    ready_replicas: int = 0
    """Replicas that answer."""
    refusals: tuple[NodeRefusal, ...] = ()
    """Why nodes could not take the replicas that are missing (at most 20 nodes)."""


class ModelDeployment(ApiObject):
    """A model that the fleet keeps serving."""

    kind: Literal["ModelDeployment"] = "ModelDeployment"
    spec: ModelDeploymentSpec
    """What should run."""
    status: ModelDeploymentStatus | None = None
    """What is true; written by the reconciler."""


def served_names(deployment: ModelDeployment) -> tuple[str, ...]:
    """Return every name that clients may use for it, its own first, without repeats."""
    return tuple(dict.fromkeys((deployment.metadata.name, *deployment.spec.served_names)))


class RevisionTemplate(ApiModel):
    """All of a deployment's spec that an engine is started with: when it changes, replicas roll."""

    model: ModelSource
    served_names: tuple[ServedName, ...] = ()
    context_length: int
    concurrency: int
    queue_depth: int | None = None
    kv_cache: KvCache | None = None
    resources: Resources | None = None
    sharding: Sharding = "Never"
    restarted_at: str = ""
    """What `fleetctl rollout restart` wrote: nothing but a reason to start engines anew."""


class RevisionSpec(ApiModel):
    """One version of a deployment."""

    deployment: ObjectName
    template: str
    """Hash of the template."""
    revision: Annotated[int, Field(ge=1)]
    """Counts up; one that is gone back to becomes the newest again."""
    content: RevisionTemplate
    """What its replicas run."""
    change_cause: str = ""
    """Why there is it: the deployment's annotation kubernetes.io/change-cause when it was new, else what differed."""


class Revision(ApiObject):
    """What a deployment's replicas ran once."""

    kind: Literal["Revision"] = "Revision"
    spec: RevisionSpec
