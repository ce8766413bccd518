"""The route that shows which engines a request for a model could get now, and why: `GET /api/requests/candidates`."""

from dataclasses import dataclass
from typing import Annotated, Final

import orjson
from fastapi import Query, Request, Response

from gateway.admin.admin_context import AdminContext
from gateway.auth.access_control import principal_of
from gateway.routing.candidates import BackendCandidates, Candidate, list_candidates

CANDIDATES_PATH: Final = "/api/requests/candidates"
_MOST: Final = 200
"""Candidates of one backend in an answer."""


@dataclass(frozen=True, slots=True)
class CandidateRoute:
    """Handler of the route."""

    context: AdminContext

    async def show(
        self, request: Request, model: Annotated[str, Query(max_length=200)]
    ) -> Response:
        """List the candidates of a model with the parts of their scores, the one that would be chosen first.

        A session or a cached prompt may lead a request elsewhere.

        Raises:
            RefusedError: there is no such model.

        """
        context = self.context
        context.fleet_state.access.allow(principal_of(request), model)
        table = context.fleet_state.table_cache.table
        served_model = table.models.get(model)
        if served_model is None:
            access, principal = context.fleet_state.access, principal_of(request)
            raise access.unknown_model(principal, table, model)
        health = context.load_tracker.health(context.clock.monotonic())
        backends = [_render(candidate) for candidate in list_candidates(served_model, health)]
        body = {"gateway": context.id, "model": model, "backends": backends}
        return Response(orjson.dumps(body), media_type="application/json")


def _render(backend: BackendCandidates) -> dict[str, object]:
    return {
        "deployments": backend.deployments,
        "weight": backend.weight,
        "strategy": backend.strategy,
        "fallback": backend.is_fallback,
        "total": len(backend.candidates),
        "candidates": [_render_candidate(candidate) for candidate in backend.candidates[:_MOST]],
    }


def _render_candidate(one: Candidate) -> dict[str, object]:
    endpoint = one.endpoint
    return {
        "replica": endpoint.replica,
        "worker": endpoint.node,
        "score": None if one.score is None else round(one.score, 4),
        "parts": {name: round(value, 4) for name, value in one.parts.items()},
        "inFlight": one.in_flight,
        "othersInFlight": round(one.others_in_flight, 3),
        "concurrency": endpoint.concurrency,
        "memoryFree": one.headroom,
        "gpuLoad": one.gpu_load,
        "leased": one.is_leased,
        "ejected": one.is_ejected,
    }
