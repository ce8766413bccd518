"""Event: something that happened to an object, kept for an hour."""

from datetime import datetime
from typing import Literal

from schemas.meta import ApiModel, ApiObject


class ObjectReference(ApiModel):
    """The object that an event is about."""

    kind: str
    name: str
    uid: str = ""


class EventSpec(ApiModel):
    """The content of an event."""

    about: ObjectReference
    type: Literal["Normal", "Warning"]
    reason: str
    """One CamelCase word for machines."""
    message: str
    """One sentence for people."""
    source: str
    """The component that recorded it: reconciler, or the name of a node."""
    count: int = 1
    """Number of times it was recorded."""
    first_seen: datetime
    last_seen: datetime


class Event(ApiObject):
    """Something that happened to an object."""

    kind: Literal["Event"] = "Event"
    spec: EventSpec
