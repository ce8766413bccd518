"""The page: one HTML document for every screen, and the YAML of an object, which a screen reads when it is opened."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse

from dashboard.api.routes import json_response
from insight.fleet_caches import FleetCaches
from manifests.yaml import core_schema
from schemas.meta import ApiObject
from schemas.wire.errors import Refusal, RefusedError
from store import keys, object_trees

STATIC: Final = Path(__file__).parents[1] / "static"
"""Files of the page, which are served below /static/ without a key."""
SCREENS: Final = (
    *("/", "/macs", "/models", "/groups", "/requests", "/events", "/chat", "/add"),
    *("/macs/{name}", "/models/{name}", "/groups/{name}", "/replicas/{name}"),
)
"""Paths of the screens. All have the same document, which holds no data; its script reads the path."""


@dataclass(frozen=True, slots=True)
class PageRoutes:
    """Handlers of the page and of the documents behind it."""

    caches: FleetCaches

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        for path in SCREENS:
            router.add_api_route(path, self.page, methods=["GET"], include_in_schema=False)
        router.add_api_route("/api/v1/objects/{kind}/{name}", self.object, methods=["GET"])

    async def page(self) -> Response:
        """Return the HTML document of every screen."""
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    async def object(self, kind: str, name: str) -> Response:
        """Return one object with its status as YAML, without secrets."""
        spec = self.caches.objects.specs.items.get(keys.spec_key(kind, name))
        if spec is None:
            message = f"There is no {kind[:60]} '{name[:200]}', or not any more."
            raise RefusedError(Refusal(status=404, message=message))
        status = self.caches.objects.statuses.items.get(keys.status_key(kind, name))
        return json_response({"kind": kind, "name": name, "yaml": _yaml(spec, status)})


def _yaml(spec: ApiObject, status: object) -> str:
    found = spec if status is None else spec.model_copy(update={"status": status})
    tree = found.model_dump(mode="json", by_alias=True, exclude_none=True)
    tree = object_trees.without_managed_fields(object_trees.hide_secrets(tree))
    return core_schema.dump(tree)
