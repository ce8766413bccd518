"""The door of all that is no request to a model: FastAPI's routes. Whatever is not open asks for a key.

A route that is for admins alone says so: `dependencies=[Depends(admin_only)]`.
"""

from collections.abc import Callable

from fastapi import Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access import refusals
from gateway.access.access import Access
from gateway.access.holder import Holder
from gateway.errors import Refusal, RefusedError

# Health checks and Prometheus have no key, and neither has the reconciler, which reads the demand. Health
# tells numbers, metrics names and numbers, and neither anything that a client wrote. Ollama's clients look at the first two, which tell
# that there is somebody, before they show a key.
# The log asks for a ticket from the store instead of a key (gateway/admin/log.py).
OPEN = frozenset(
    {"/", "/api/version", "/health", "/metrics", "/metrics/demand", "/v1/logs/gateway"}
)


class Door:
    """ASGI middleware: lets in who has a key, and notes who it is."""

    def __init__(
        self, app: ASGIApp, *, access: Access, refuse: Callable[[Scope, Refusal], Response]
    ) -> None:
        self._app = app
        self._access = access
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        # Browsers ask beforehand without the headers that they ask about; there is nothing in the answer.
        if scope["type"] == "http" and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            try:
                holder = self._access.identify(scope["headers"])
            except RefusedError as error:
                await self._refuse(scope, error.refusal)(scope, receive, send)
                return
            scope.setdefault("state", {})["holder"] = holder
        await self._app(scope, receive, send)


def holder_of(request: Request) -> Holder | None:
    """Return who asks; None where keys are not asked for."""
    holder: Holder | None = request.state.holder
    return holder


def admin_only(request: Request) -> None:
    """Refuse keys that are not for the admin API: a dependency of its routes.

    Raises:
        RefusedError: it is another key.

    """
    holder = holder_of(request)
    if holder is not None and not holder.is_admin:
        raise refusals.not_admin(holder)


def may_see(request: Request, model: str) -> bool:
    """Return whether who asks may know of the model."""
    holder = holder_of(request)
    return holder is None or holder.may_ask_for(model)
