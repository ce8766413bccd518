"""ModelRoute: a public model name that is shared out over deployments."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.deployment import ServedName
from schemas.meta import ApiModel, ApiObject, ObjectName, Status


class Backend(ApiModel):
    """One deployment behind the name."""

    deployment: ObjectName
    """The ModelDeployment that answers."""
    weight: Annotated[int, Field(ge=0, le=1_000_000)] = 1
    """Its share of the requests, relative to the other weights."""


class ModelRouteSpec(ApiModel):
    """Which name goes where."""

    model: ServedName
    """The name that clients put into "model"."""
    backends: Annotated[tuple[Backend, ...], Field(min_length=1)]
    """Who answers, by weight."""


class ModelRouteStatus(Status):
    """What is true of a route."""


class ModelRoute(ApiObject):
    """A public model name that is shared out over deployments."""

    kind: Literal["ModelRoute"] = "ModelRoute"
    spec: ModelRouteSpec
    """Which name goes where."""
    status: ModelRouteStatus | None = None
    """What is true; written by the reconciler."""
