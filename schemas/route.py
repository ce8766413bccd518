"""ModelRoute: a public model name that is distributed over deployments."""

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
    """A header that a request must carry."""

    name: HeaderName
    """The header's name, in any case."""
    value: Annotated[str, StringConstraints(max_length=1000)] | None = None
    """The header's whole value. Default: any value."""


class RouteRule(ApiModel):
    """Other backends for requests with certain headers."""

    headers: Annotated[tuple[HeaderMatch, ...], Field(min_length=1, max_length=20)]
    """All of them must match."""
    backends: Backends
    """Deployments that answer such requests, by weight."""


class ModelRouteSpec(ApiModel):
    """A model name, and the deployments that answer for it."""

    model: ServedName
    """The name that clients put into "model"."""
    backends: Backends
    """Deployments that answer, by weight; a session stays with its first choice."""
    rules: Annotated[tuple[RouteRule, ...], Field(max_length=100)] = ()
    """Exceptions; the first rule that matches applies."""
    fallbacks: Annotated[tuple[ObjectName, ...], Field(max_length=100)] = ()
    """ModelDeployments to use when none of the backends can answer; the first that can is taken."""
    routing: Routing | None = None
    """The choice of an endpoint. Default: spec.routing of the chosen deployment."""

    def deployments(self) -> dict[tuple[str | int, ...], str]:
        """Return every ModelDeployment that the route names, by its path in the spec."""
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
    """The observed state of a route."""


class ModelRoute(ApiObject):
    """A public model name that is distributed over deployments."""

    kind: Literal["ModelRoute"] = "ModelRoute"
    spec: ModelRouteSpec
    """A model name, and the deployments that answer for it."""
    status: ModelRouteStatus | None = None
    """The observed state; written by the reconciler."""
