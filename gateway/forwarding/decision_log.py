"""Debug lines of a request's decisions: each choice with the scores of its candidates, waits and retries.

It exists only if the level is debug: without it, a decision costs one comparison with None.
"""

import logging
from collections.abc import Set as AbstractSet
from typing import Final

from gateway.request import InferenceRequest
from gateway.routing.candidates import Candidate, list_candidates
from gateway.routing.selection import ChosenEndpoint, NoReadyEndpoint, RoutingChoice
from gateway.routing.table import EndpointHealth, EngineEndpoint, ServedModel

log = logging.getLogger(__name__)

_MOST_CANDIDATES: Final = 8


class DecisionLog:
    """Writes the lines of all requests of a gateway."""

    @classmethod
    def if_enabled(cls) -> "DecisionLog | None":
        """Return a log if debug lines are written; None otherwise. The level of a process does not change."""
        return cls() if log.isEnabledFor(logging.DEBUG) else None

    def choice(
        self,
        request: InferenceRequest,
        model: ServedModel | None,
        health: EndpointHealth,
        failed: AbstractSet[EngineEndpoint],
        choice: RoutingChoice,
    ) -> None:
        """Write the endpoint of a choice, or why there is none, with the candidates, the best score first.

        The endpoint may be another than the first: a session or a cached prompt leads elsewhere, and equal scores are
        drawn.
        """
        fields: dict[str, object] = {}
        if failed:
            fields["failed"] = ",".join(
                sorted(engine_endpoint.replica for engine_endpoint in failed)
            )
        if model is not None:
            fields["candidates"] = [
                _candidate_fields(candidate)
                for backend in list_candidates(model, health)
                for candidate in backend.candidates[:_MOST_CANDIDATES]
            ]
        if isinstance(choice, ChosenEndpoint):
            endpoint = choice.endpoint
            fields |= {"replica": endpoint.replica, "node": endpoint.node}
            self.decision(request, "endpoint chosen", **fields)
            return
        if isinstance(choice, NoReadyEndpoint):
            self.decision(request, "no endpoint is ready", why=choice.reason, **fields)
            return
        self.decision(request, "no such model", **fields)

    def decision(self, request: InferenceRequest, message: str, **fields: object) -> None:
        """Write one decision; `message` is a constant text."""
        named = {"request_id": request.request_id.decode("ascii"), "model": request.model[:200]}
        log.debug(message, extra={**named, **fields})


def _candidate_fields(one: Candidate) -> dict[str, object]:
    candidate_fields: dict[str, object] = {
        "replica": one.endpoint.replica,
        "load": round(one.load, 3),
    }
    if one.score is not None:
        candidate_fields["score"] = round(one.score, 4)
        candidate_fields["parts"] = {name: round(value, 4) for name, value in one.parts.items()}
    if one.is_ejected:
        candidate_fields["ejected"] = True
    return candidate_fields
