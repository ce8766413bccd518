"""The parts every API object has: metadata, owner references, conditions. Knows no kind."""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel
from typing_extensions import override

ApiVersion = Literal["fleet/v1alpha1"]
API_VERSION: ApiVersion = "fleet/v1alpha1"

# RFC 1123 subdomain, as in Kubernetes; shorter, because names become file names and derived names.
NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
ObjectName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=128)]
LabelKey = Annotated[
    str, StringConstraints(pattern=r"^([a-z0-9.-]+/)?[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)
]
LabelValue = Annotated[
    str, StringConstraints(pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$", max_length=63)
]
Labels = dict[LabelKey, LabelValue]


class ApiModel(BaseModel):
    """Base of every API type: frozen, strict, camelCase in JSON, unknown fields refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
        # `model` is the word users know for what they deploy; pydantic's `model_` guard would warn.
        protected_namespaces=(),
    )


class Examples(NamedTuple):
    """Values that a type with rules of its own takes: for documentation, and for tests that make values."""

    values: tuple[str, ...]


class ObjectKey(NamedTuple):
    """Which object: what work queues carry."""

    kind: str
    name: str

    @override
    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


class OwnerReference(ApiModel):
    """Who created this object; when the owner goes, it goes."""

    kind: str
    name: ObjectName
    uid: str


class ManagedFieldsEntry(ApiModel):
    """Who says what of an object: one entry for each writer and way of writing (see manifests/ownership.py)."""

    manager: str
    """The writer: `fleetctl`, `fleetctl-scale`, `gitsource/<name>`."""
    operation: Literal["Apply", "Update"]
    """Whether it declared the object by a manifest, or changed fields of it."""
    time: datetime
    """When it last did."""
    fields: tuple[str, ...] = ()
    """Of an Update: the fields it wrote last, as in `spec.replicas` or `metadata.labels.team`."""
    applied: str = ""
    """Of an Apply: what the manifest said (labels, annotations, spec), as JSON; the base of the next three-way merge."""


class ObjectMeta(ApiModel):
    """What identifies an object and what the fleet keeps about it."""

    name: ObjectName
    """Unique among objects of its kind: lower-case letters, digits, '-' and '.'."""
    labels: Labels = Field(default_factory=dict)
    """Identifying key/value pairs that selectors match."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Notes for people and tools; nothing selects on them."""
    uid: str = ""
    """Set by the fleet: tells this object from an earlier one of the same name."""
    generation: int = 0
    """Set by the fleet: counts changes of the spec."""
    resource_version: str = ""
    """Set by the fleet: the version that was read; opaque, compared for equality only."""
    creation_timestamp: datetime | None = None
    """Set by the fleet: when the object was first written."""
    deletion_timestamp: datetime | None = None
    """Set by the fleet: deletion was asked for; finalizers are being worked off."""
    finalizers: tuple[str, ...] = ()
    """Set by the fleet: who must clean up before the object may go."""
    owner_references: tuple[OwnerReference, ...] = ()
    """Set by the fleet: who created this object."""
    managed_fields: tuple[ManagedFieldsEntry, ...] = ()
    """Set by the fleet: who says what of the object."""


# Annotations below this prefix are written by fleetctl's verbs and by the fleet; applying a manifest leaves them alone.
FLEET_ANNOTATIONS = "fleet/"
RESTARTED_AT = "fleet/restarted-at"
"""When `fleetctl rollout restart` was last asked for: part of what engines are started with."""
ENDED_BECAUSE = "fleet/ended-because"
"""Why a replica drains: the reason in one word, then what people should know."""
APPLY_SET = "fleet/apply-set"
"""The set of manifests that an object belongs to (schemas/records.py); only that set prunes it."""
CHANGE_CAUSE = "kubernetes.io/change-cause"
"""Why a deployment was changed, as kubectl knows it; kept with the revision."""

# Finalizers of a deployment that is being deleted: its replicas end first, or are left running.
FOREGROUND = "fleet/foreground"
ORPHAN = "fleet/orphan"

# What the fleet keeps; a manifest that sets them is refused.
FLEET_OWNED = (
    "uid",
    "generation",
    "resource_version",
    "creation_timestamp",
    "deletion_timestamp",
    "finalizers",
    "owner_references",
    "managed_fields",
)


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """One observation about an object, in the form of Kubernetes' conditions."""

    type: str
    """An adjective or participle: Available, Placed, Ready."""
    status: ConditionStatus
    reason: str
    """One CamelCase word for machines."""
    message: str = ""
    """One sentence for people."""
    observed_generation: int = 0
    """The generation of the spec that this speaks of."""
    last_transition_time: datetime | None = None
    """When the status last changed (not when it was last looked at)."""


def with_condition(old: Sequence[Condition], new: Condition) -> tuple[Condition, ...]:
    """Return `old` with `new` in it; the time moves only when the truth moves."""
    previous = find_condition(old, new.type)
    if previous is not None and previous.status == new.status:
        new = new.model_copy(update={"last_transition_time": previous.last_transition_time})
    return tuple(sorted([*(c for c in old if c.type != new.type), new], key=lambda c: c.type))


def find_condition(conditions: Sequence[Condition], type_: str) -> Condition | None:
    """Return the condition of that type; None means unknown."""
    return next((c for c in conditions if c.type == type_), None)


def is_true(conditions: Sequence[Condition], type_: str) -> bool:
    """Return whether the condition is there and true."""
    found = find_condition(conditions, type_)
    return found is not None and found.status == ConditionStatus.TRUE


class Status(ApiModel):
    """What every status has."""

    observed_generation: int = 0
    """The generation of the spec that this status was computed from."""
    conditions: tuple[Condition, ...] = ()


class ApiObject(ApiModel):
    """What every object has; each kind narrows `kind`, `spec` and `status`."""

    api_version: ApiVersion = API_VERSION
    """The version of the API; only fleet/v1alpha1 exists."""
    kind: str
    """The kind of the object."""
    metadata: ObjectMeta = Field(...)
    """Name, labels and what the fleet keeps about the object."""

    @property
    def name(self) -> str:
        return self.metadata.name
