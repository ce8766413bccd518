"""ApplySet: what one source of manifests has applied, so that what it says no more can be pruned."""

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from schemas.meta import NAME_PATTERN, ApiModel, ObjectName

# That of a GitSource is its name, which may have 128 characters, behind `gitsource.`.
SetName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=138)]


class Member(ApiModel):
    """One object of a set."""

    kind: str
    name: ObjectName
    uid: str = ""
    """Which object of that name it was: a later one of the name is not the set's to prune."""


class ApplySet(ApiModel):
    """Everything that was applied under one name: by `fleetctl apply --applyset`, or by a GitSource."""

    name: SetName
    manager: str
    """Who applies it: `fleetctl`, or `gitsource/<name>`."""
    updated: datetime
    members: Annotated[tuple[Member, ...], Field(max_length=20_000)] = ()
    """What it holds, by kind and name."""
