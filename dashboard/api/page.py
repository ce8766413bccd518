"""The page: one HTML document for every screen."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse, RedirectResponse

STATIC: Final = Path(__file__).parents[1] / "static"
"""Files of the page, which are served below /static/ without a key."""
SCREENS: Final = (
    *("/", "/map", "/macs", "/models", "/groups", "/requests", "/events", "/chat", "/add"),
    *("/apply", "/whatif", "/logs", "/changes", "/keys", "/git"),
    *("/macs/{name}", "/models/{name}", "/groups/{name}", "/replicas/{name}", "/git/{name}"),
)
"""Paths of the screens. All have the same document, which holds no data; its script reads the path."""


def page_version(folder: Path = STATIC) -> str:
    """Return a short digest of the page's files: another one means that an open page is of an older release."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class PageRoutes:
    """Handler of the page."""

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        for path in SCREENS:
            router.add_api_route(path, self.page, methods=["GET"], include_in_schema=False)
        router.add_api_route("/dashboard", self.home, methods=["GET"], include_in_schema=False)

    async def page(self) -> Response:
        """Return the HTML document of every screen."""
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    async def home(self) -> Response:
        """Lead to the page from the path that dashboards of other systems have."""
        return RedirectResponse("/", status_code=307)
