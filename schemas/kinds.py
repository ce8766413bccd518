"""The list of kinds with their modules, plural and short names. A new kind is added here only."""

import importlib
from typing import TYPE_CHECKING, NamedTuple, cast

if (
    TYPE_CHECKING
):  # `fleetctl get` needs the names only, and starts five times as fast without the models
    from schemas.meta import ApiObject


class Kind(NamedTuple):
    """One kind of object; `written_by_users` says whether `apply` accepts it."""

    name: str
    module: str
    """The module of its class; imported on first use of `type`."""
    plural: str
    short: str
    written_by_users: bool

    @property
    def type(self) -> "type[ApiObject]":
        """Return the class of its objects."""
        found = getattr(importlib.import_module(self.module), self.name)
        return cast("type[ApiObject]", found)


def _declared(name: str, module: str, short: str) -> Kind:
    return _kind(name, module, short, written_by_users=True)


def _observed(name: str, module: str, short: str) -> Kind:
    return _kind(name, module, short, written_by_users=False)


def _kind(name: str, module: str, short: str, *, written_by_users: bool) -> Kind:
    low = name.lower()
    return Kind(
        name=name,
        module=f"schemas.{module}",
        plural=f"{low.removesuffix('y')}ies" if low.endswith("y") else f"{low}s",
        short=short,
        written_by_users=written_by_users,
    )


KINDS: tuple[Kind, ...] = (
    _declared("ModelDeployment", "deployment", "md"),
    _declared("NodePool", "pools", "np"),
    _declared("ShardGroup", "shardgroup", "sg"),
    _declared("ModelRoute", "route", "mr"),
    _declared("ModelPolicy", "modelpolicy", "mp"),
    _declared("GitSource", "gitsource", "gs"),
    _declared("Node", "node", "no"),
    _observed("Replica", "replica", "rep"),
    _observed("Endpoint", "replica", "ep"),
    _observed("Revision", "deployment", "rev"),
    _observed("Event", "event", "ev"),
    _observed("FabricTest", "fabrictest", "ft"),
)


def by_name(name: str) -> Kind | None:
    """Return the kind with this name in manifests; None if there is none."""
    return next((kind for kind in KINDS if kind.name == name), None)


def by_alias(word: str) -> Kind | None:
    """Return the kind for a user's word: `md`, `modeldeployment`, `ModelDeployments`; None if there is none."""
    low = word.lower()
    return next((k for k in KINDS if low in (k.plural, k.short, k.name.lower())), None)
