"""Roles by route: which rights each route of the gateway needs. The one table of it; `check_role` enforces it.

A route that is missing from the table needs the role admin.
"""

import ipaddress
from collections.abc import Mapping
from types import MappingProxyType

from fastapi import Request

from gateway import errors
from schemas.records import Role, role_includes

ROUTE_ROLES: Mapping[str, Role | None] = MappingProxyType(
    {
        # Health checks, Prometheus and the reconciler have no key; these answers contain nothing that a client
        # wrote, but for repositories of the owners that a ModelPolicy names (/metrics/demand). Ollama clients read the
        # first two before they send a key.
        "GET /": None,
        "GET /api/version": None,
        "GET /docs": None,
        "GET /health": None,
        "GET /health/live": None,
        "GET /health/ready": None,
        "GET /metrics": None,
        "GET /openapi.json": None,
        "GET /metrics/demand": None,
        "GET /metrics/vllm": None,
        # A ticket of the store in place of a key (gateway/admin/routes.py).
        "GET /v1/logs/gateway": None,
        # A ticket, or a certificate of a recorder (gateway/admin/routes.py).
        "GET /api/dashboard/feed": None,
        # Models. `*`: every method; all but POST are answered with 405.
        "* /v1/chat/completions": "user",
        "* /v1/completions": "user",
        "* /v1/responses": "user",
        "* /v1/embeddings": "user",
        "* /v1/score": "user",
        "* /v1/rerank": "user",
        "* /v1/audio/transcriptions": "user",
        "* /v1/audio/translations": "user",
        "* /v1/audio/speech": "user",
        "* /tokenize": "user",
        "* /detokenize": "user",
        "* /v1/messages": "user",
        "* /v1/messages/count_tokens": "user",
        "* /infill": "user",
        "* /api/chat": "user",
        "* /api/generate": "user",
        "* /api/embed": "user",
        "* /api/embeddings": "user",
        # Responses, files and batches of the key's own.
        "GET /v1/responses/{response_id}": "user",
        "DELETE /v1/responses/{response_id}": "user",
        "GET /v1/responses/{response_id}/input_items": "user",
        "POST /v1/responses/{response_id}/cancel": "user",
        "GET /v1/files": "user",
        "POST /v1/files": "user",
        "GET /v1/files/{file_id}": "user",
        "DELETE /v1/files/{file_id}": "user",
        "GET /v1/files/{file_id}/content": "user",
        "GET /v1/batches": "user",
        "POST /v1/batches": "user",
        "GET /v1/batches/{batch_id}": "user",
        "POST /v1/batches/{batch_id}/cancel": "user",
        "GET /v1/models": "user",
        "GET /v1/models/{name}": "user",
        "GET /model/info": "user",
        "GET /api/tags": "user",
        "GET /api/ps": "user",
        "POST /api/show": "user",
        "POST /api/pull": "user",
        # LM Studio's and llama-swap's loads and unloads. An unload concerns all clients.
        "POST /api/v1/models/load": "user",
        "POST /api/v1/models/unload": "operator",
        "GET /running": "user",
        "POST /api/models/unload": "operator",
        "POST /api/models/unload/{name}": "operator",
        # Ollama's management of models, which is refused with an explanation.
        "* /api/create": "user",
        "* /api/copy": "user",
        "* /api/push": "user",
        "* /api/delete": "user",
        # The admin API.
        "GET /api/cluster/status": "viewer",
        "GET /api/cluster/workers": "viewer",
        "GET /api/cluster/workers/{name}": "viewer",
        "GET /api/dashboard/overview": "viewer",
        "GET /api/dashboard/workers": "viewer",
        "GET /api/dashboard/metrics/timeseries": "viewer",
        "GET /api/dashboard/requests": "viewer",
        "GET /api/requests/ended": "viewer",
        "GET /api/requests/in-flight": "viewer",
        "GET /api/requests/candidates": "viewer",
        "GET /api/requests/stream": "viewer",
        "POST /api/requests/{id}/cancel": "operator",
        "GET /queue": "viewer",
        "GET /metrics/snapshot": "viewer",
        # Refused with an explanation: what runs is declared.
        "POST /api/cluster/load-model": "operator",
        "POST /api/cluster/unload-model": "operator",
        "POST /api/cluster/workers/{name}/load-model": "operator",
        "POST /api/cluster/workers/{name}/unload-model": "operator",
    }
)

"""Role by method and path template; None: no key is needed."""

PUBLIC_PATHS = frozenset(
    route.partition(" ")[2] for route, role in ROUTE_ROLES.items() if role is None
)
"""Paths that need no key."""


def find_route(method: str, path: str) -> str | None:
    """Return the row of the table for a method and a path template; None if there is none."""
    method = "GET" if method == "HEAD" else method
    rows = (f"{method} {path}", f"* {path}")
    return next((row for row in rows if row in ROUTE_ROLES), None)


def needed_role(method: str, path: str) -> Role | None:
    """Return the role that a route needs, by its path template; None if it needs no key."""
    row = find_route(method, path)
    return "admin" if row is None else ROUTE_ROLES[row]


def check_role(request: Request) -> None:
    """Refuse keys whose role lacks the route's right; a FastAPI dependency of every route.

    Raises:
        RefusedError: the role is too low.

    """
    if request.method == "OPTIONS":  # browsers send no key with it, and the answer reveals nothing
        return
    needed = needed_role(request.method, request.scope["route"].path_format)
    if needed is None:
        return
    principal = request.state.principal
    if principal is None:
        if not role_includes(_role_without_key(request), needed):
            raise errors.key_required(needed)
    elif not role_includes(principal.role, needed):
        raise errors.role_required(principal.name, principal.role, needed)


def _role_without_key(request: Request) -> Role:
    """Return the role of a client of a gateway that requires no keys: other machines may read, and no more."""
    if request.client is None:  # a unix socket
        return "admin"
    try:
        is_local = ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        is_local = False
    return "admin" if is_local else "viewer"
