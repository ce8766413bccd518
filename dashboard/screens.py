"""Screens of the page: their paths, and the views, columns and rows of the fleet's state that each of them shows. Pure.

The page reads this table from its own document, asks the stream for the same selections, and gets the first state with
the document itself.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote

PATHS: Final = (
    *("/", "/map", "/macs", "/models", "/groups", "/requests", "/events", "/chat", "/add"),
    *("/try", "/logs", "/changes", "/keys", "/git"),
    *("/macs/{name}", "/models/{name}", "/groups/{name}", "/replicas/{name}", "/git/{name}"),
)
"""Paths of the screens. All have the same document; its script reads the path."""

_MAC_STATE: Final = "state,isCordoned,isDraining"
_MAC_MEMORY: Final = "memoryBytes,allocatableBytes,promisedBytes,weightsBytes,kvBytes"
_MAC_CARD: Final = f"macs:{_MAC_STATE},{_MAC_MEMORY},chip,models,site,fills"
_PICTURE: Final = ("groups", "inFlight:replica")
"""Selections of `static/picture.js` besides Macs and models."""

LISTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "": (
            _MAC_CARD,
            "models",
            "problems",
            "events",
            "traffic",
            "figures:watts",
            *_PICTURE,
        ),
        "map": (_MAC_CARD, "models:desired,placed,revision,concurrency", *_PICTURE),
        "macs": (
            f"{_MAC_CARD},reason,agentVersion",
            "figures",
            "models:desired,placed,revision,concurrency",
            *_PICTURE,
        ),
        "models": ("models",),
        "groups": ("groups",),
        "events": ("events",),
        "requests": ("traffic", "inFlight", "ended"),
        "add": ("macs:state,isCordoned,isDraining,chip,memoryBytes,agentVersion", "joinRequests"),
        "logs": (
            *("macs:state", "replicas:deployment", "gateways:url"),
            *("reconcilers:identity", "dashboards:url"),
        ),
        "changes": ("changes",),
        "chat": (
            "gateways:url",
            "models:servedNames,source,contextLength,desired,ready,isAvailable,macs,reason,vision,loadsInSeconds,givesWay",
            "problems:kind,object,cause,affected",
        ),
        "git": ("gitSources", "conditions::kind=GitSource"),
        "try": (f"macs:{_MAC_STATE},{_MAC_MEMORY},chip,site", "models", "groups"),
    }
)
"""Selections of the screens without a name in their path, by its first part."""
DETAILS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "macs": (
            *("macs::name={name}", "replicas", "conditions::object={name}"),
            *("events", "figures::name={name}"),
        ),
        "models": (
            *("models::name={name}", "replicas::deployment={name}"),
            *("conditions::object={name}", "problems", "events"),
        ),
        "groups": (
            *("groups::name={name}", f"macs:{_MAC_STATE}", "conditions::object={name}"),
            *("events", "replicas"),
        ),
        "git": ("gitSources::name={name}", "conditions::object={name}"),
        "replicas": ("replicas::name={name}", "conditions::object={name}", "events"),
    }
)
"""Selections of the pages of one object; `{name}` is its name."""
FRAME: Final = ("gateways:url",)
"""Selections of all other screens: the frame of every screen has the summary, which comes with any view."""


def selections_of(raw_path: str) -> tuple[str, ...]:
    """Return the selections of a screen, by its path as it is in the URL."""
    first, *rest = (unquote(part) for part in raw_path.removeprefix("/").split("/"))
    if not rest:
        return LISTS.get(first, FRAME)
    detail = DETAILS.get(first, FRAME)
    return tuple(one.replace("{name}", rest[0]) for one in detail)
