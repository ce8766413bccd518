"""ChangeRecord: one write to the store with its author, reason and differences. Its key's revision is that of the write."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from schemas.meta import ApiModel

MAX_REASON = 500


class ChangedField(ApiModel):
    """One field that differs; values are JSON, cut if they are long. Null stands for an absent field."""

    path: str
    """Such as `spec.replicas`."""
    old: str | None = None
    new: str | None = None


class ChangedObject(ApiModel):
    """One object of a write."""

    verb: Literal["create", "update", "delete"]
    kind: str
    name: str
    from_revision: int = 0
    """The revision that the write is based on; 0 for a new object."""
    fields: tuple[ChangedField, ...] = ()
    """Empty for a new or deleted object, and for secrets."""
    more_fields: int = 0
    """Fields that differ besides those."""


class ChangeRecord(ApiModel):
    """One write, in the same transaction as the write itself."""

    time: datetime
    user: str
    """The person or program, such as `anna@studio`, the name of an API key, or `gitsource/prod`."""
    account: str = ""
    """The etcd user; empty in a fleet without passwords."""
    manager: str
    """The process: fleetctl, dashboard, or reconciler."""
    command: str = ""
    """Such as `fleetctl rollout undo`."""
    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    objects: tuple[ChangedObject, ...]
