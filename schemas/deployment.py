"""ModelDeployment: a model that the fleet keeps serving; and Revision: an earlier version of one, to roll back to."""

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal, Self, cast

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from schemas.autoscaling import Autoscaling, LoadForecast
from schemas.guesses import GUESS_FIELDS, MtpGuesses, NgramGuesses
from schemas.kv_cache import KvCache
from schemas.memory import EngineMemory
from schemas.meta import ApiModel, ApiObject, ModelPath, ObjectName, Status
from schemas.objectives import Objectives
from schemas.placement import Placement
from schemas.prefixes import PinnedPrefix, check_prefixes
from schemas.quantity import Amount, Concurrency, PositiveQuantity
from schemas.rollout import Rollout
from schemas.routing import Routing
from schemas.sampling import Performance, Sampling, UnknownParameters
from schemas.vision import Vision, check_alone

ServedName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", max_length=200)
]


class DraftModel(ApiModel):
    """A small model that proposes the next tokens, which the model verifies in one step (speculative decoding)."""

    path: ModelPath
    """Its folder on the node, as model.path. It must have the model's tokenizer."""
    tokens: Annotated[int, Field(ge=1, le=16)] = 3
    """Tokens that it proposes at once, while a single request runs. The output does not depend on it."""


AdapterName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=63)
]


class NamedAdapter(ApiModel):
    """A LoRA adapter that requests choose by the model's name."""

    name: AdapterName
    """Requests choose it as the model DEPLOYMENT:NAME."""
    path: ModelPath
    """Its folder on the node, as `mlx_lm.lora` or PEFT writes it; resolved like model.path."""

    @field_validator("name")
    @classmethod
    def _not_latest(cls, name: str) -> str:
        if name == "latest":
            raise ValueError("is Ollama's word for the model itself; write another name")
        return name


# As on Hugging Face: an organisation and a name, which become one folder's name on a Mac.
HUB_REPO_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}$"
HUB_COMMIT_PATTERN: Final = r"[0-9a-f]{40}"


def _unambiguous(repo: str) -> str:
    if ".." in repo or "--" in repo:
        raise ValueError("must not contain '..' or '--'; expected ORGANISATION/NAME")
    return repo


HubRepo = Annotated[
    str,
    StringConstraints(pattern=HUB_REPO_PATTERN, max_length=193),
    AfterValidator(_unambiguous),
]
HubEndpoint = Annotated[
    str, StringConstraints(pattern=r"^https?://[^\s/?#@]+(/[^\s?#@]*)?$", max_length=300)
]
HubFilePattern = Annotated[
    str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$")
]


HubRevision = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=200)
]
HubSource = Literal["huggingface", "modelscope"]
_MODELSCOPE_HOSTS: Final = r"https?://(www\.)?modelscope\.(cn|ai)(:\d+)?(/.*)?"
DEFAULT_BRANCHES: Final[Mapping[HubSource, str]] = {"huggingface": "main", "modelscope": "master"}


def _source_of(found: Mapping[str, object]) -> HubSource:
    is_modelscope = re.fullmatch(_MODELSCOPE_HOSTS, str(found.get("endpoint") or ""))
    return "modelscope" if is_modelscope else "huggingface"


def _default_branch(found: Mapping[str, object]) -> str:
    return DEFAULT_BRANCHES[cast("HubSource", found.get("source", "huggingface"))]


FLEET_ORGANISATION: Final = "fleet"
"""The organisation of models that no hub has: the Macs of the fleet made them, and give them to each other."""


def is_fleet_repo(repo: str) -> bool:
    """Return whether a repository is one of the fleet's own, such as `fleet/Qwen3-8B-1f2e3d4c5b6a-4bit-g64`."""
    return repo.partition("/")[0].casefold() == FLEET_ORGANISATION


class HubReference(ApiModel):
    """A repository of a model hub, or of the fleet itself. The Macs that run the model fetch it."""

    repo: HubRepo
    """The repository as ORGANISATION/NAME, such as "mlx-community/Qwen3-8B-4bit". The organisation `fleet` is that of
    models which a Mac of the fleet made (`fleetctl models quantize`)."""
    endpoint: HubEndpoint | None = None
    """The address of the hub or a mirror, such as "https://hf-mirror.com". Default: that of the
    reconciler (HF_ENDPOINT or MODELSCOPE_ENDPOINT, otherwise the public hub)."""
    source: HubSource = Field(default_factory=_source_of)
    """The kind of hub. Default: "modelscope" for an endpoint of modelscope.cn or modelscope.ai, otherwise
    "huggingface"."""
    revision: HubRevision = Field(default_factory=_default_branch)
    """A branch, a tag or a whole commit; default: "main", and "master" of "modelscope". A branch is resolved once to a
    commit: a later move of the branch changes nothing until `fleetctl rollout refresh`."""
    branch: HubRevision | None = None
    """The branch or tag that the commit was read from, which the reconciler writes for "modelscope": that hub gives
    files by branch only."""
    files: Annotated[tuple[HubFilePattern, ...], Field(max_length=100)] = ()
    """Patterns of the files to fetch, such as "*.safetensors". Default: weights, configs, tokenizer and templates;
    never code."""

    @model_validator(mode="after")
    def _branch_of_a_commit(self) -> Self:
        if self.branch is not None and (self.source != "modelscope" or not self.is_pinned):
            raise ValueError(
                "branch is only for a commit of source: modelscope; write the branch as revision"
            )
        return self

    @property
    def is_of_fleet(self) -> bool:
        """Return whether the Macs of the fleet give the files to each other, and no hub has them."""
        return is_fleet_repo(self.repo)

    @model_validator(mode="after")
    def _fleet_has_no_endpoint(self) -> Self:
        if self.is_of_fleet and self.endpoint is not None:
            raise ValueError(
                f"{self.repo} is a model of this fleet, which its Macs give to each other; remove endpoint"
            )
        return self

    @property
    def is_pinned(self) -> bool:
        """Return whether the revision is a whole commit, which never moves."""
        return re.fullmatch(HUB_COMMIT_PATTERN, self.revision) is not None

    @property
    def folder(self) -> str:
        """Return the name of the folder, below the models folder, that holds the commit; "" for a branch."""
        return f"{self.repo.replace('/', '--')}@{self.revision[:12]}" if self.is_pinned else ""

    def pinned_to(self, commit: str, endpoint: str | None) -> Self:
        """Return the reference with the commit in the place of the branch, and the hub that has it."""
        changes: dict[str, str | None] = {"revision": commit, "endpoint": self.endpoint or endpoint}
        if self.source == "modelscope" and not self.is_pinned:
            changes["branch"] = self.revision
        return self.model_copy(update=changes)


class ModelSource(ApiModel):
    """The weights, from a folder or a hub, and optionally an adapter and a draft model."""

    path: ModelPath | None = None
    """A folder in MLX format on the node: absolute, or below the agent's models folder. Give this or `hub`."""
    hub: HubReference | None = None
    """A repository of a model hub, which the Macs fetch. Give this or `path`."""
    adapter: ModelPath | None = None
    """A folder with a LoRA adapter for the model, as `mlx_lm.lora` or PEFT writes it; resolved like model.path."""
    adapters: Annotated[tuple[NamedAdapter, ...], Field(max_length=64)] = ()
    """LoRA adapters that requests choose; all are in memory beside the model. Give these or `adapter`."""
    draft: DraftModel | None = None
    """A draft model for speculative decoding, which makes a single request faster. Give one of `draft`,
    `ngram` and `mtp`."""
    ngram: NgramGuesses | None = None
    """Guesses from earlier text, which make a single request that repeats its prompt faster."""
    mtp: MtpGuesses | None = None
    """Guesses of the checkpoint's own multi-token prediction head, which make a single request faster. The weights must
    have such a head (DeepSeek-V3, GLM-4.5 and later, MiMo)."""
    vision: Vision | None = None
    """Images in requests, and their limits; needs mlx-vlm on the Macs (`mlx-fleet[vision]`). Default: the model reads
    text only."""

    @property
    def guess_tokens(self) -> int:
        """Return how many tokens are guessed at once; 0 without guesses."""
        guesses = self.draft or self.ngram or self.mtp
        return 0 if guesses is None else guesses.tokens

    @property
    def adapter_paths(self) -> tuple[str, ...]:
        """Return the folders of all adapters, each once."""
        named = dict.fromkeys(adapter.path for adapter in self.adapters)
        return tuple(named) if self.adapter is None else (self.adapter, *named)

    @property
    def folder(self) -> str:
        """Return the folder of the weights: absolute, or below the models folder; "" while a branch is not resolved."""
        if self.hub is not None:
            return self.hub.folder
        return self.path or ""

    @property
    def label(self) -> str:
        """Return the source for people: the path, or the repository and its revision."""
        return self.folder if self.hub is None else f"{self.hub.repo}@{self.hub.revision}"

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.path is None and self.hub is None:
            raise ValueError(
                "names no model; write hub: {repo: ORGANISATION/NAME}, or path: FOLDER for a folder on the nodes"
            )
        if self.path is not None and self.hub is not None:
            raise ValueError(
                "has path and hub; remove one of them: hub is fetched into a folder of its own"
            )
        return self

    @model_validator(mode="after")
    def _adapters_differ(self) -> Self:
        if not self.adapters:
            return self
        if self.adapter is not None:
            raise ValueError(
                "has adapter, which all requests use, and adapters, of which they choose; remove one of them"
            )
        names = [adapter.name for adapter in self.adapters]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"has two adapters with the name {twice[0]}; rename one of them")
        return self

    @model_validator(mode="after")
    def _one_source_of_guesses(self) -> Self:
        given = [name for name in GUESS_FIELDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"has {' and '.join(given)}, {len(given)} sources of guesses; keep one of them"
            )
        return self

    @model_validator(mode="after")
    def _folders_differ(self) -> Self:
        # A path costs as much as all the rest.
        if self.adapter is None and not self.adapters and self.draft is None:
            return self
        own = PurePosixPath(self.path or "/")
        if any(PurePosixPath(path) == own for path in self.adapter_paths):
            raise ValueError(
                "adapter is the model's own folder; write the folder that holds adapter_config.json"
            )
        if self.draft is not None and PurePosixPath(self.draft.path) == own:
            raise ValueError(
                "draft.path is the model itself, which proposes tokens no faster; write a smaller model"
            )
        return self


# The golden question and its answer fit into this, with any tokenizer (models/golden_question.py).
LEAST_SPLIT_CONTEXT = 256
# Object names have no capital letters, so the two words cannot be names.
Sharding = Literal["Never", "Auto"] | ObjectName


def _none_if_empty(kept: KvCache | None) -> KvCache | None:
    """Return None for an empty mapping: `kvCache: {}` must not make another version of a deployment."""
    return None if kept == KvCache() else kept


def _none_if_unset(sampling: Sampling | None) -> Sampling | None:
    """Return None for an empty mapping, for the same reason."""
    return None if sampling == Sampling() else sampling


class Resources(ApiModel):
    """Resources of one replica, in place of the fleet's own estimate."""

    memory: PositiveQuantity
    """Memory of one replica, such as "20Gi", in place of the memory proof's sum. A replica that needs more
    than this may take its Mac down."""


class Preload(ApiModel):
    """Files of the model on nodes before replicas need them."""

    nodes: Amount = "100%"
    """Nodes that have the files, those with replicas included: a number, or a percentage of the nodes that may run a
    replica (rounded up)."""
    pools: tuple[ObjectName, ...] = ()
    """NodePools whose nodes are chosen; empty means every node that may run a replica."""


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
    concurrency: Concurrency = "Auto"
    """Requests that one replica works on at once. Auto: as many as keep ten tokens per second each by the Mac's memory
    bandwidth and GPU cores and fit into half of its memory; 4 if they do not, on unknown hardware and on ShardGroups."""
    queue_depth: Annotated[int, Field(ge=0, le=65_536)] | None = None
    """Requests that may wait at a replica before clients are told to come back. Default: 4 x concurrency."""
    kv_cache: Annotated[KvCache | None, AfterValidator(_none_if_empty)] = None
    """The cache of keys and values of earlier tokens."""
    prefixes: Annotated[tuple[PinnedPrefix, ...], Field(max_length=16)] = ()
    """Beginnings of prompts that engines read once after their start, beside requests, and never evict; the condition
    PrefixesPinned of a replica says how far that is. Prompts find them whatever their API key."""
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
    preload: Preload | None = None
    """Nodes that fetch a hub's model before they get a replica. A change of it restarts nothing. Default: a node fetches
    the model when it gets a replica."""
    rollout: Rollout = Rollout()
    """The replacement of replicas when the template changes."""
    autoscaling: Autoscaling | None = None
    """Bounds for the number of replicas, which load decides. Default: `replicas` is the number."""
    objectives: Objectives | None = None
    """Times and availability that clients are promised. The recorder measures them and reports what is missed; a change
    of it restarts nothing."""
    routing: Routing = Routing()
    """The distribution of requests over the replicas by gateways."""
    memory: EngineMemory | None = None
    """The memory of its engines, whatever the pools of a Mac say. Default: as the pools say."""
    sampling: Annotated[Sampling | None, AfterValidator(_none_if_unset)] = None
    """Values for requests that leave them out, such as maxTokens and temperature."""
    unknown_parameters: UnknownParameters = "Warn"
    """Parameters of requests that other servers have and engines do not: Warn leaves them out, with a `warning` header;
    Refuse answers 400. A name that no server has is always refused, and so is a parameter without which the answer
    would be another one than was asked for."""
    performance: Performance = "OnRequest"
    """The member `performance` of answers, with tokens per second and times: OnRequest for requests with
    "include_performance"; Always for all chats and completions, in streams in a last chunk without choices."""

    @model_validator(mode="after")
    def _longest_request_has_memory(self) -> Self:
        tokens = self.kv_cache.tokens if self.kv_cache is not None else None
        if tokens is not None and tokens < self.context_length:
            raise ValueError(
                f"kvCache.tokens is {tokens}, and one request may have contextLength, {self.context_length}; "
                "raise it, or lower contextLength"
            )
        return self

    @model_validator(mode="after")
    def _window_makes_sense(self) -> Self:
        window = self.kv_cache.window if self.kv_cache is not None else None
        if window is not None and window >= self.context_length:
            raise ValueError(
                f"kvCache.window is {window}, and no request is longer than contextLength, "
                f"{self.context_length}; leave the window out, or make it smaller"
            )
        return self

    @model_validator(mode="after")
    def _fits_its_model(self) -> Self:
        check_alone(self.model.vision, self.model, self.kv_cache)
        check_prefixes(self.prefixes, self.kv_cache, self.sharding, self.context_length)
        if self.preload is not None and self.model.hub is None:
            raise ValueError(
                "has preload and model.path, a folder that agents do not fetch; write model.hub, or remove preload"
            )
        return self

    @model_validator(mode="after")
    def _can_be_split(self) -> Self:
        if self.sharding == "Never":
            return self
        of_one_rank = ("adapter", "adapters", *GUESS_FIELDS, "vision")
        kept = next((name for name in of_one_rank if getattr(self.model, name)), "")
        if kept:
            raise ValueError(
                f"has sharding: {self.sharding} and model.{kept}, which engines of several ranks cannot use; "
                "remove one of them"
            )
        if self.kv_cache is not None and self.kv_cache.disk_bytes is not None:
            raise ValueError(
                f"has sharding: {self.sharding} and kvCache.diskBytes, and ranks of a group keep no prompts on disk; "
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


class PreloadStatus(ApiModel):
    """The nodes that were chosen by spec.preload."""

    desired: int = 0
    """Nodes that should have the files."""
    present: int = 0
    """Nodes of these that have all of them."""
    missing_bytes: int = 0
    """Bytes that the others still lack, in coarse steps."""
    nodes: tuple[ObjectName, ...] = ()
    """The chosen nodes, at most 100 of them."""


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
    concurrency: int = 0
    """Requests that one replica works on at once, the fewest of all replicas; 0 while none is placed."""
    concurrency_limit: str = ""
    """With concurrency: Auto, what keeps that number from being higher, as in the memory proof of a replica."""
    loading: LoadForecast | None = None
    """The expected wait for the first replica; None if one serves, none is wanted, or the wait is not known."""
    preload: PreloadStatus | None = None
    """The nodes of spec.preload; None without it."""
    refusals: tuple[NodeRefusal, ...] = ()
    """The reasons why nodes cannot take the missing replicas (at most 20 nodes)."""
    node_priorities: dict[ObjectName, int] = Field(default_factory=dict)
    """The priority of the pools of each node that has a replica, if it is not 0; the strategy HardwareAware adds a fifth
    of it to the points of a Mac."""


class ModelDeployment(ApiObject):
    """A model that the fleet keeps serving."""

    kind: Literal["ModelDeployment"] = "ModelDeployment"
    spec: ModelDeploymentSpec
    """The model to serve, and how."""
    status: ModelDeploymentStatus | None = None
    """The observed state; written by the reconciler."""


def served_names(deployment: ModelDeployment) -> tuple[str, ...]:
    """Return every name that clients may use for the deployment, its own first, without repeats."""
    names = base_names(deployment)
    return tuple(dict.fromkeys((*names, *adapter_names(names, deployment.spec.model))))


def base_names(deployment: ModelDeployment) -> tuple[str, ...]:
    """Return the names of the model without an adapter, the deployment's own first, without repeats."""
    spec = deployment.spec
    names = (deployment.metadata.name, *spec.served_names, *hub_names(spec.model))
    return tuple(dict.fromkeys(names))


def adapter_names(names: Iterable[str], source: ModelSource) -> dict[str, NamedAdapter]:
    """Return the names by which requests choose adapters, for each name of the model."""
    return {f"{name}:{adapter.name}": adapter for name in names for adapter in source.adapters}


def hub_names(source: ModelSource) -> tuple[ServedName, ...]:
    """Return the repository of a model from a hub: clients may use it as the model's name."""
    return () if source.hub is None else (source.hub.repo,)


class RevisionTemplate(ApiModel):
    """The part of a deployment's spec that an engine is started with: a change of it starts a rollout."""

    model: ModelSource
    served_names: tuple[ServedName, ...] = ()
    context_length: int
    concurrency: Concurrency
    queue_depth: int | None = None
    kv_cache: KvCache | None = None
    prefixes: tuple[PinnedPrefix, ...] = ()
    memory: EngineMemory | None = None
    sampling: Sampling | None = None
    unknown_parameters: UnknownParameters = "Warn"
    performance: Performance = "OnRequest"
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


def with_content(deployment: ModelDeployment, content: RevisionTemplate) -> ModelDeployment:
    """Return the deployment with the version `content` in its spec."""
    names = RevisionTemplate.model_fields.keys() & ModelDeploymentSpec.model_fields.keys()
    fields = {name: getattr(content, name) for name in names}
    return deployment.model_copy(update={"spec": deployment.spec.model_copy(update=fields)})


def last_version(deployment: ModelDeployment, revisions: Iterable[Revision]) -> ModelDeployment:
    """Return the deployment with the version of its newest revision; unchanged if it has none."""
    uid = deployment.metadata.uid
    owned = [
        revision
        for revision in revisions
        if any(o.uid == uid for o in revision.metadata.owner_references)
    ]
    newest = max(owned, key=lambda one: one.spec.revision, default=None)
    return deployment if newest is None else with_content(deployment, newest.spec.content)
