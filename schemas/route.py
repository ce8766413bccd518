"""ModelRoute: a public model name that is shared out over deployments."""

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from schemas.deployment import ServedName
from schemas.meta import ApiModel, ApiObject, ObjectName, Status
from schemas.routing import Routing

HeaderName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$", max_length=100)
]


class Backend(ApiModel):
    """One deployment behind the name."""

    deployment: ObjectName
    """The ModelDeployment that answers."""
    weight: Annotated[int, Field(ge=0, le=1_000_000)] = 1
    """Its share of the requests, relative to the other weights."""


Backends = Annotated[tuple[Backend, ...], Field(min_length=1, max_length=100)]


class HeaderMatch(ApiModel):
    """What a request must carry."""

    name: HeaderName
    """The header, in any case."""
    value: Annotated[str, StringConstraints(max_length=1000)] | None = None
    """Its whole value; left out, the header must only be there."""


class RouteRule(ApiModel):
    """Other backends for the requests that carry certain headers."""

    headers: Annotated[tuple[HeaderMatch, ...], Field(min_length=1, max_length=20)]
    """All of them must match."""
    backends: Backends
    """Who answers such requests, by weight."""


class ModelRouteSpec(ApiModel):
    """Which name goes where."""

    model: ServedName
    """The name that clients put into "model"."""
    backends: Backends
    """Who answers, by weight; a session stays with the one it was drawn for."""
    rules: Annotated[tuple[RouteRule, ...], Field(max_length=100)] = ()
    """Exceptions, the first that matches counts."""
    fallbacks: Annotated[tuple[ObjectName, ...], Field(max_length=100)] = ()
    """ModelDeployments that answer, the first that can, when none of the backends can."""
    routing: Routing | None = None
    """How an endpoint is chosen; left out, as the chosen deployment's own spec.routing says."""

    def deployments(self) -> dict[tuple[str | int, ...], str]:
        """Return every ModelDeployment that it names, by where it does."""
        ruled: dict[tuple[str | int, ...], str] = {
            ("rules", number, "backends", index, "deployment"): backend.deployment
            for number, rule in enumerate(self.rules)
            for index, backend in enumerate(rule.backends)
        }
        return {
            **{("backends", n, "deployment"): b.deployment for n, b in enumerate(self.backends)},
            **ruled,
            **{("fallbacks", n): name for n, name in enumerate(self.fallbacks)},
        }

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        names = self.fallbacks
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"fallbacks names {twice} twice; remove one of them")
        return self


class ModelRouteStatus(Status):
    """What is true of a route."""


class ModelRoute(ApiObject):
    """A public model name that is shared out over deployments."""

    kind: Literal["ModelRoute"] = "ModelRoute"
    spec: ModelRouteSpec
    """Which name goes where."""
    status: ModelRouteStatus | None = None
    """What is true; written by the reconciler."""
