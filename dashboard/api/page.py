"""The page: one HTML document for every screen, with the state that the screen shows first, and the files of the page."""

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from dashboard import screens
from dashboard.api.event_stream import snapshot
from dashboard.api.routes import takes_gzip
from dashboard.assets import PREFIX, Assets
from dashboard.auth import Visitor
from dashboard.fleet_model import FleetModel
from dashboard.subscription import parse_selections
from insight.conditions import Row
from schemas.records import role_includes
from schemas.wire.errors import refused

_FOREVER: Final = {
    "cache-control": "public, max-age=31536000, immutable",
    "vary": "accept-encoding",
}
_BOOT: Final = "<!-- boot -->"
_LEVEL: Final = 4
_HTML: Final = "text/html; charset=utf-8"


@dataclass(frozen=True, slots=True)
class PageRoutes:
    """Handlers of the page and of its files."""

    assets: Assets
    model: FleetModel
    describe_visitor: Callable[[Request], Row]
    """Returns what a client is told about itself."""

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        for path in screens.PATHS:
            router.add_api_route(path, self.page, methods=["GET"], include_in_schema=False)
        for path in screens.MOVED:
            router.add_api_route(path, self.moved, methods=["GET"], include_in_schema=False)
        router.add_api_route("/dashboard", self.home, methods=["GET"], include_in_schema=False)
        path = PREFIX + "{version}/{name:path}"
        methods = ["GET", "HEAD"]
        router.add_api_route(path, self.file, methods=methods, include_in_schema=False)

    async def page(self, request: Request) -> Response:
        """Return the HTML document of a screen; with the state of the fleet for a client that may see it."""
        return self.document(request)

    def document(self, request: Request, status: int = 200) -> Response:
        """Return the HTML document with a status: of a screen, or for an address that has none."""
        document = self.assets.shell.replace(_BOOT, boot_element(self._boot(request)))
        body = document.encode()
        headers = {"cache-control": "no-store", "vary": "accept-encoding"}
        if takes_gzip(request):
            body, headers["content-encoding"] = gzip.compress(body, _LEVEL), "gzip"
        return Response(body, status, media_type=_HTML, headers=headers)

    async def file(self, request: Request, version: str, name: str) -> Response:
        """Return a file of the page. One of another release is refused: its modules do not fit the others."""
        asset = self.assets.files.get(name) if version == self.assets.version else None
        if asset is None:
            message = "There is no such file in this release of the page. Load the page again."
            raise refused(404, message)
        body, headers = asset.body, dict(_FOREVER)
        if asset.packed is not None and takes_gzip(request):
            body, headers["content-encoding"] = asset.packed, "gzip"
        return Response(body, media_type=asset.media_type, headers=headers)

    async def moved(self, request: Request) -> Response:
        """Lead to the screen that an address of an earlier release has now."""
        url = screens.moved_to(request.url.path, request.url.query)
        return RedirectResponse(url, status_code=307)

    async def home(self) -> Response:
        """Lead to the page from the path that dashboards of other systems have."""
        return RedirectResponse("/", status_code=307)

    def _boot(self, request: Request) -> Row:
        """Return what the page begins with."""
        boot: Row = {
            "page": self.assets.version,
            "screens": {
                "lists": dict(screens.LISTS),
                "details": dict(screens.DETAILS),
                "frame": screens.FRAME,
            },
        }
        visitor: Visitor | None = request.state.visitor
        if visitor is None:
            return boot
        boot["me"] = self.describe_visitor(request)
        is_now = "at" not in request.query_params
        if is_now and role_includes(visitor.role, "viewer") and self.model.is_ready:
            path = request.scope["raw_path"].decode("ascii", "replace")
            texts = screens.selections_of(path, request.url.query)
            boot["view"] = texts
            boot["state"] = snapshot(self.model, parse_selections(texts))
        return boot


def boot_element(boot: Row) -> str:
    """Return the element with what the page begins with; no text in it can end the element. Pure."""
    text = orjson.dumps(boot).decode().replace("<", "\\u003c")
    return f'<script type="application/json" id="boot">{text}</script>'
