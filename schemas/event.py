"""Event: something that happened to an object, kept for an hour for people to read."""

from datetime import datetime
from typing import Literal

from schemas.meta import ApiModel, ApiObject


class ObjectReference(ApiModel):
    """Which object an event is about."""

    kind: str
    name: str
    uid: str = ""


class EventSpec(ApiModel):
    """What happened."""

    about: ObjectReference
    type: Literal["Normal", "Warning"]
    reason: str
    """One CamelCase word for machines."""
    message: str
    """One sentence for people."""
    source: str
    """Who saw it: reconciler, or the name of a node."""
    count: int = 1
    """How often it was seen."""
    first_seen: datetime
    last_seen: datetime


class Event(ApiObject):
    """Something that happened to an object."""

    kind: Literal["Event"] = "Event"
    spec: EventSpec
