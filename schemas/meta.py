"""The parts that every API object has: metadata, owner references, conditions. Names no kind."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import override

from schemas.field_docstrings import field_docstrings

ApiVersion = Literal["fleet/v1alpha1"]
API_VERSION: ApiVersion = "fleet/v1alpha1"

# RFC 1123 subdomain, as in Kubernetes; shorter, because names become parts of file names and of other names.
NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
ObjectName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=128)]
LabelKey = Annotated[
    str, StringConstraints(pattern=r"^([a-z0-9.-]+/)?[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)
]
LabelValue = Annotated[
    str, StringConstraints(pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$", max_length=63)
]
Labels = dict[LabelKey, LabelValue]


def object_name(text: str, fallback: str) -> str:
    """Return a valid object name: `mlx-community/Qwen3-8B-4bit` becomes `qwen3-8b-4bit`."""
    last = text.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9.]+", "-", last.lower()).strip("-.")[:100] or fallback


# The slots of a model: setting one directly takes a third of `object.__setattr__`.
_SET_VALUES, _SET_FIELDS, _SET_EXTRA, _SET_PRIVATE = (
    vars(BaseModel)[slot].__set__
    for slot in (
        "__dict__",
        "__pydantic_fields_set__",
        "__pydantic_extra__",
        "__pydantic_private__",
    )
)


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


class ApiModel(BaseModel):
    """Base of every API type: frozen, strict, camelCase in JSON, unknown fields refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        # `model` is the users' word for what they deploy; pydantic's `model_` guard would warn.
        protected_namespaces=(),
    )

    @classmethod
    @override
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> JsonSchemaValue:
        """Return the JSON Schema with the docstrings of the fields as their descriptions.

        pydantic's `use_attribute_docstrings` does the same when a class is made, and reads its source for it: a third
        of the time that every process takes to import these types.
        """
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        texts = field_docstrings(cls)
        for name, field in cls.model_fields.items():
            described, text = properties.get(field.alias or name), texts.get(name)
            if described is not None and text:
                described.setdefault("description", text)
        return schema

    @override
    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values; values are not checked.

        The base's takes twice as long: it prepares for private attributes and further fields, which no API type has.
        """
        if deep:
            return super().model_copy(update=update, deep=True)
        kind = type(self)
        made = kind.__new__(kind)
        given = {} if update is None else {**update}
        _SET_VALUES(made, self.__dict__ | given)
        # Sets of names are shared by models: nothing changes them.
        fields = self.__pydantic_fields_set__
        _SET_FIELDS(made, fields if given.keys() <= fields else fields | given.keys())
        _SET_EXTRA(made, None)
        _SET_PRIVATE(made, None)
        return made


class Examples(NamedTuple):
    """Valid values of a type with a validator: for documentation, and for tests that generate objects."""

    values: tuple[str, ...]


class ObjectKey(NamedTuple):
    """Kind and name of an object: what work queues carry."""

    kind: str
    name: str

    @override
    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


class OwnerReference(ApiModel):
    """The object that created this one; this one is deleted with it."""

    kind: str
    name: ObjectName
    uid: str


class ManagedFieldsEntry(ApiModel):
    """The fields of an object that one writer owns in one way of writing (see manifests/ownership.py)."""

    manager: str
    """The writer: `fleetctl`, `fleetctl-scale`, `gitsource/<name>`."""
    operation: Literal["Apply", "Update"]
    """Apply: it declared the object by a manifest. Update: it changed single fields."""
    time: datetime
    """Time of its last write."""
    fields: tuple[str, ...] = ()
    """Of an Update: the fields it wrote last, as in `spec.replicas` or `metadata.labels.team`."""
    applied: str = ""
    """Of an Apply: the applied fields (labels, annotations, spec) as JSON; the base of the next three-way merge."""


class ObjectMeta(ApiModel):
    """Identity of an object, and the metadata that the fleet maintains."""

    name: ObjectName
    """Unique among objects of its kind: lower-case letters, digits, '-' and '.'."""
    labels: Labels = Field(default_factory=dict)
    """Identifying key/value pairs that selectors match."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Notes for people and tools; selectors ignore them."""
    uid: str = ""
    """Set by the fleet: distinguishes this object from an earlier one of the same name."""
    generation: int = 0
    """Set by the fleet: counts changes of the spec."""
    resource_version: str = ""
    """Set by the fleet: the version that was read; opaque, compared for equality only."""
    creation_timestamp: datetime | None = None
    """Set by the fleet: when the object was first written."""
    deletion_timestamp: datetime | None = None
    """Set by the fleet: when deletion was requested; the object is deleted once its finalizers are gone."""
    finalizers: tuple[str, ...] = ()
    """Set by the fleet: the components that must clean up before the object is deleted."""
    owner_references: tuple[OwnerReference, ...] = ()
    """Set by the fleet: the objects that created this one."""
    managed_fields: tuple[ManagedFieldsEntry, ...] = ()
    """Set by the fleet: the fields of each writer."""


# fleetctl's verbs and the fleet write annotations below this prefix; applying a manifest keeps them.
FLEET_ANNOTATIONS = "fleet/"
RESTARTED_AT = "fleet/restarted-at"
"""The time of the last `fleetctl rollout restart`; part of what engines are started with."""
HUB_REFRESHED_AT = "fleet/hub-refreshed-at"
"""The time of the last `fleetctl rollout refresh`: a new value resolves the branch of a hub model again."""
CANARY_DECISION = "fleet/canary-decision"
"""A person's decision about the canary of one generation; its form is in `schemas.rollout`."""
ENDED_BECAUSE = "fleet/ended-because"
"""The cause of a drain: the reason in one word, then a message."""
APPLY_SET = "fleet/apply-set"
"""The apply set that an object belongs to (schemas/records.py); only that set prunes it."""
CHANGE_CAUSE = "kubernetes.io/change-cause"
"""The cause of a change, as in kubectl; kept with the revision."""

# Finalizers of a deployment that is being deleted: its replicas end first, or are left running.
FOREGROUND = "fleet/foreground"
ORPHAN = "fleet/orphan"

# Metadata that the fleet maintains; a manifest that sets it is refused.
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
    """The three values of a condition's status, as in Kubernetes."""

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
    """The generation of the spec that was observed."""
    last_transition_time: datetime | None = None
    """Time of the last change of the status (not of the last check)."""


def with_condition(old: Sequence[Condition], new: Condition) -> tuple[Condition, ...]:
    """Return the conditions with `new` in place of the one of its type; the time changes only with the status."""
    previous = find_condition(old, new.type)
    if previous is not None and previous.status == new.status:
        new = new.model_copy(update={"last_transition_time": previous.last_transition_time})
    return tuple(sorted([*(c for c in old if c.type != new.type), new], key=lambda c: c.type))


def find_condition(conditions: Sequence[Condition], type_: str) -> Condition | None:
    """Return the condition of that type; None means unknown."""
    for (
        condition
    ) in conditions:  # a generator would cost twice as much, and a plan asks a hundred times
        if condition.type == type_:
            return condition
    return None


def is_true(conditions: Sequence[Condition], type_: str) -> bool:
    """Return whether the condition is present and true."""
    condition = find_condition(conditions, type_)
    return condition is not None and condition.status == ConditionStatus.TRUE


class Status(ApiModel):
    """The parts that every status has."""

    observed_generation: int = 0
    """The generation of the spec that this status was computed from."""
    conditions: tuple[Condition, ...] = ()


def make_condition(type_: str, reason: str, message: str = "", *, holds: bool) -> Condition:
    """Return a condition; `stamp_conditions` adds generation and time."""
    truth = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
    return Condition(type=type_, status=truth, reason=reason, message=message)


def stamp_conditions(
    old: Status | None, new: Sequence[Condition], *, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """Return the conditions as they are written: a time changes only if the truth of its condition changes."""
    before = {condition.type: condition for condition in old.conditions} if old is not None else {}
    stamped = []
    for condition in new:
        previous, time = before.get(condition.type), now
        if previous is not None and previous.status == condition.status:
            known = previous.reason, previous.message, previous.observed_generation
            if known == (condition.reason, condition.message, generation):
                stamped.append(previous)
                continue
            time = previous.last_transition_time or now
        update = {"observed_generation": generation, "last_transition_time": time}
        stamped.append(condition.model_copy(update=update))
    return tuple(sorted(stamped, key=lambda condition: condition.type))


class ApiObject(ApiModel):
    """The parts that every object has; each kind narrows `kind`, `spec` and `status`."""

    api_version: ApiVersion = API_VERSION
    """The version of the API; only fleet/v1alpha1 exists."""
    kind: str
    """The kind of the object."""
    metadata: ObjectMeta = Field(...)
    """Name, labels, and the metadata that the fleet maintains."""

    @property
    def name(self) -> str:
        return self.metadata.name


def has_reason(status: Status | None, type_: str, reason: str) -> bool:
    """Return whether the condition of that type in a status has the reason."""
    condition = None if status is None else find_condition(status.conditions, type_)
    return condition is not None and condition.reason == reason
