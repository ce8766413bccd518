"""ModelRoute: a public model name that is distributed over deployments."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from schemas.deployment import ServedName
from schemas.external import ExternalEndpoint
from schemas.meta import ApiModel, ApiObject, ObjectName, Status
from schemas.routing import HealthCheck, Routing

HeaderName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$", max_length=100)
]


class Backend(ApiModel):
    """One deployment, or one external endpoint, behind the name."""

    deployment: ObjectName | None = None
    """The ModelDeployment that answers."""
    external: ObjectName | None = None
    """In place of a deployment: the name of one of the route's external endpoints."""
    weight: Annotated[int, Field(ge=0, le=1_000_000)] = 1
    """Its share of the requests, relative to the other weights."""

    @property
    def name(self) -> str:
        """The name of what answers."""
        return self.deployment or self.external or ""

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if (self.deployment is None) == (self.external is None):
            raise ValueError("name either a deployment or an external endpoint")
        return self


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
    """Backends that answer such requests, by weight."""


class Mirror(ApiModel):
    """Shadow traffic: another deployment gets copies of requests, and its answers are dropped."""

    deployment: ObjectName
    """ModelDeployment that gets the copies; clients see nothing of it."""
    percent: Annotated[int, Field(ge=1, le=100)] = 100
    """Share of the requests that are copied."""


class ModelRouteSpec(ApiModel):
    """A model name, and the deployments and external endpoints that answer for it."""

    model: ServedName
    """The name that clients put into "model"."""
    backends: Backends
    """Deployments and external endpoints that answer, by weight; a session stays with its first choice."""
    rules: Annotated[tuple[RouteRule, ...], Field(max_length=100)] = ()
    """Exceptions; the first rule that matches applies."""
    fallbacks: Annotated[tuple[ObjectName, ...], Field(max_length=100)] = ()
    """ModelDeployments and external endpoints to use when none of the backends can answer; the first that can is taken."""
    external: Annotated[tuple[ExternalEndpoint, ...], Field(max_length=20)] = ()
    """OpenAI servers outside the fleet, for backends and fallbacks."""
    mirror: Mirror | None = None
    """Shadow traffic: a deployment that gets copies of requests, such as a candidate for this name."""
    routing: Routing | None = None
    """The choice of an endpoint. Default: spec.routing of the chosen deployment."""

    def deployments(self) -> dict[tuple[str | int, ...], str]:
        """Return every ModelDeployment that the route names, by its path in the spec."""
        external = {endpoint.name for endpoint in self.external}
        mirror = self.mirror
        return {
            **({} if mirror is None else {("mirror", "deployment"): mirror.deployment}),
            **{
                (*path, "deployment"): backend.deployment
                for path, backend in self._backends()
                if backend.deployment is not None
            },
            **{
                ("fallbacks", number): name
                for number, name in enumerate(self.fallbacks)
                if name not in external
            },
        }

    def _backends(self) -> Iterator[tuple[tuple[str | int, ...], Backend]]:
        """Yield every backend with its path in the spec."""
        for number, backend in enumerate(self.backends):
            yield ("backends", number), backend
        for number, rule in enumerate(self.rules):
            for index, backend in enumerate(rule.backends):
                yield ("rules", number, "backends", index), backend

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        for label, names in (
            ("fallbacks", self.fallbacks),
            ("external", tuple(endpoint.name for endpoint in self.external)),
        ):
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"{label} names {twice} twice; remove one of them")
        return self

    @model_validator(mode="after")
    def _checks_what_is_its_own(self) -> Self:
        if self.routing is None or self.external or self.routing.health_check == HealthCheck():
            return self
        raise ValueError(
            "routing.healthCheck of a route is for its external endpoints, and it has none; set it in the ModelDeployment"
        )

    @model_validator(mode="after")
    def _external_matches(self) -> Self:
        known = {endpoint.name for endpoint in self.external}
        named = {one.external: one for _, one in self._backends() if one.external is not None}
        for name in named:
            if name not in known:
                there = ", ".join(sorted(known)) or "none"
                raise ValueError(f"external has no {name}; there are: {there}")
        if unused := known - set(named) - set(self.fallbacks):
            raise ValueError(
                f"external: {min(unused)} is neither a backend nor a fallback; name it in one of them, or remove it"
            )
        return self


class ModelRouteStatus(Status):
    """The observed state of a route."""


class ModelRoute(ApiObject):
    """A public model name that is distributed over deployments."""

    kind: Literal["ModelRoute"] = "ModelRoute"
    spec: ModelRouteSpec
    """A model name, and the deployments and external endpoints that answer for it."""
    status: ModelRouteStatus | None = None
    """The observed state; written by the reconciler."""
