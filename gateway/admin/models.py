"""`/model/info`: what is known of the models that clients may use. Whoever has a key sees those that it is for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import orjson
from fastapi import APIRouter, Request, Response

from gateway import errors
from gateway.access.door import holder_of, may_see
from gateway.admin.sight import Sight, targets
from gateway.errors import RefusedError
from gateway.routing.choosing import nearest
from gateway.routing.table import Model
from schemas.deployment import ModelDeployment

Json: TypeAlias = dict[str, object]


def make_router(sight: Sight) -> APIRouter:
    """Return the route."""
    router = APIRouter()
    router.add_api_route("/model/info", ModelInfo(sight).info, methods=["GET", "HEAD"])
    return router


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One method a route."""

    sight: Sight

    async def info(self, request: Request, model: str = "") -> Response:
        """Tell of one model, or of all."""
        keeper = self.sight.known.keeper
        if not keeper.is_synced:
            raise RefusedError(errors.not_synced())
        table = keeper.table
        deployments = keeper.known().deployments
        if not model:
            seen = [found for found in table.models.values() if may_see(request, found.name)]
            seen.sort(key=lambda found: found.name)
            return _json({"data": [_told(found, deployments) for found in seen]})
        self.sight.known.access.allow(holder_of(request), model)
        found = table.models.get(model)
        if found is None:
            near = nearest(table, model)
            raise RefusedError(errors.unknown_model(model, sorted(table.models), near))
        return _json(_told(found, deployments))


def _told(model: Model, deployments: Mapping[str, ModelDeployment]) -> Json:
    names = dict.fromkeys(name for share in model.shares for name in share.deployments)
    found = [deployments.get(name) for name in names]
    specs = [one.spec for one in found if one is not None]
    leased = {target for target, is_leased in targets(model) if is_leased}
    return {
        "id": model.name,
        "created": model.created,
        "deployments": list(names),
        "source": [spec.model.path for spec in specs],
        # What every one of them can take: a client cannot know which one answers.
        "contextLength": min((spec.context_length for spec in specs), default=None),
        "concurrency": sum(target.concurrency for target in leased),
        "replicasReady": len({target.replica for target in leased}),
        "deviceCount": len({target.node for target in leased}),
    }


def _json(body: Json) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
