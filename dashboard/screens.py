"""Screens of the page: their paths, and the views, columns and rows of the fleet's state that each of them shows. Pure.

The page reads this table from its own document, asks the stream for the same selections, and gets the first state with
the document itself.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final
from urllib.parse import parse_qs, unquote

PATHS: Final = (
    *("/", "/models", "/macs", "/requests", "/chat", "/activity", "/settings", "/try", "/run"),
    *("/macs/{name}", "/models/{name}", "/groups/{name}", "/replicas/{name}", "/git/{name}"),
)
"""Paths of the screens. All have the same document; its script reads the path."""
MOVED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "/map": "/macs?tab=picture",
        "/groups": "/macs?tab=groups",
        "/add": "/macs?tab=add",
        "/events": "/activity",
        "/changes": "/activity?tab=changes",
        "/git": "/activity?tab=git",
        "/logs": "/activity?tab=logs",
        "/keys": "/settings",
        "/whatif": "/try",
        "/apply": "/try",
    }
)
"""Paths of earlier releases, and where each leads."""

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
            "changes",
            "traffic",
            "figures:watts",
            *_PICTURE,
        ),
        "macs": (f"{_MAC_CARD},reason,agentVersion", "figures:gpuPercent,active"),
        "macs?picture": (
            _MAC_CARD,
            "figures",
            "models:desired,placed,revision,concurrency",
            *_PICTURE,
        ),
        "macs?groups": ("groups",),
        "macs?add": ("joinRequests",),
        "models": ("models",),
        "requests": ("traffic", "inFlight", "ended", "models:queueLimit"),
        "activity": ("events",),
        "activity?changes": ("changes",),
        "activity?git": ("gitSources", "conditions::kind=GitSource"),
        "activity?logs": (
            *("macs:state", "replicas:deployment", "gateways:url"),
            *("reconcilers:identity", "dashboards:url"),
        ),
        "chat": (
            "gateways:url",
            "models:servedNames,source,contextLength,desired,ready,isAvailable,macs,reason,vision,loadsInSeconds,givesWay",
            "problems:kind,object,cause,affected",
        ),
        "settings?fleet": ("gateways", "reconcilers", "dashboards", "traffic"),
        "run": (f"macs:{_MAC_STATE},{_MAC_MEMORY},chip,site", "models:servedNames", "groups"),
        "try": (f"macs:{_MAC_STATE},{_MAC_MEMORY},chip,site", "models", "groups"),
    }
)
"""Selections of the screens without a name in their path: by its first part, and by the tab if it has others."""
DETAILS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "macs": (
            *("macs::name={name}", "replicas", "conditions::object={name}"),
            *("events", "figures::name={name}"),
        ),
        "models": (
            *("models::name={name}", "replicas::deployment={name}", f"macs:{_MAC_STATE}"),
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


def selections_of(raw_path: str, query: str = "") -> tuple[str, ...]:
    """Return the selections of a screen, by its path and its query as they are in the URL."""
    first, *rest = (unquote(part) for part in raw_path.removeprefix("/").split("/"))
    if not rest:
        tab = parse_qs(query).get("tab", [""])[0]
        return LISTS.get(f"{first}?{tab}") or LISTS.get(first, FRAME)
    detail = DETAILS.get(first, FRAME)
    return tuple(selection.replace("{name}", rest[0]) for selection in detail)


def moved_to(path: str, query: str) -> str:
    """Return the address to which a path of an earlier release leads, with its query."""
    target = MOVED[path]
    return f"{target}{'&' if '?' in target else '?'}{query}" if query else target
