"""Requests in flight at all gateways, the end of one by its id, and the candidates that a model's requests could get.

Each gateway is asked as the client would: with its API key, or the one that its session began with. Gateways decide what
it may see and end.
"""

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import quote

import aiohttp
import orjson
from fastapi import APIRouter, Path, Query, Request, Response

from dashboard.api.routes import json_response
from dashboard.auth import read_cookie
from dashboard.sessions import Sessions
from identity.dialer import Dialer, UntrustedAddressError
from insight.fleet_caches import FleetCaches
from machinery.http_body import read_limited
from schemas.records import GatewayLease
from schemas.wire.errors import ErrorBody, Refusal, RefusedError
from store import keys

_ANSWER_S: Final = 3.0
_MOST_BYTES: Final = 4 << 20
_MOST_GATEWAYS: Final = 50


class GatewayAnswerError(Exception):
    """A gateway did not answer, or refused; the message says why."""

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class RequestRoutes:
    """Handlers of the routes."""

    caches: FleetCaches
    dialer: Dialer
    sessions: Sessions

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        router.add_api_route("/api/v1/in-flight", self.list, methods=["GET"])
        path = "/api/v1/requests/{gateway}/{id:path}/cancel"
        router.add_api_route(path, self.cancel, methods=["POST"])
        router.add_api_route("/api/v1/explain/route", self.candidates, methods=["GET"])

    async def list(self, request: Request) -> Response:
        """List the requests in flight at all gateways, oldest first, with their phase and the progress of their prompts."""
        leases = self._gateways()
        answers = await asyncio.gather(
            *(
                self._ask(request, id_, lease, "GET", "/api/requests/in-flight")
                for id_, lease in leases.items()
            ),
            return_exceptions=True,
        )
        rows: list[dict[str, Any]] = []
        silent: dict[str, str] = {}
        for id_, answer in zip(leases, answers, strict=True):
            if isinstance(answer, GatewayAnswerError):
                silent[id_] = str(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                rows += [{"gateway": id_, **one} for one in answer.get("requests", ())]
        rows.sort(key=lambda row: -float(row.get("seconds") or 0.0))
        return json_response({"requests": rows, "gatewaysSilent": silent})

    async def cancel(
        self,
        request: Request,
        gateway: str,
        request_id: Annotated[str, Path(alias="id", max_length=128)],
    ) -> Response:
        """End a request in flight, at its gateway and at its engine."""
        lease = self._gateways().get(gateway)
        if lease is None:
            message = f"There is no gateway '{gateway[:100]}', or not any more."
            raise RefusedError(Refusal(status=404, message=message))
        path = f"/api/requests/{quote(request_id, safe='')}/cancel"
        return json_response(await self._ask_one(request, gateway, lease, "POST", path))

    async def candidates(
        self, request: Request, model: Annotated[str, Query(min_length=1, max_length=200)]
    ) -> Response:
        """List the engines that a request for a model could get now, best first, with the parts of their scores."""
        for id_, lease in self._gateways().items():
            path = f"/api/requests/candidates?model={quote(model, safe='')}"
            found = await self._ask_one(request, id_, lease, "GET", path)
            return json_response({"gateway": id_, **found})
        message = "No gateway is registered: start fleet-gateway, or `fleetctl up`."
        raise RefusedError(Refusal(status=502, message=message, code="no_gateway"))

    def _gateways(self) -> dict[str, GatewayLease]:
        prefix, leases = keys.GATEWAY_LEASE_PREFIX, self.caches.gateways.items
        return {key.removeprefix(prefix): leases[key] for key in sorted(leases)[:_MOST_GATEWAYS]}

    async def _ask_one(
        self, request: Request, id_: str, lease: GatewayLease, method: str, path: str
    ) -> dict[str, Any]:
        """Return a gateway's answer. Raises RefusedError."""
        try:
            return await self._ask(request, id_, lease, method, path)
        except GatewayAnswerError as error:
            raise RefusedError(Refusal(status=error.status, message=str(error))) from error

    async def _ask(
        self, request: Request, id_: str, lease: GatewayLease, method: str, path: str
    ) -> dict[str, Any]:
        """Return a gateway's answer. Raises GatewayAnswerError."""
        try:
            dial = self.dialer.gateway(id_, lease)
            timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(
                    method,
                    f"{lease.url.rstrip('/')}{path}",
                    headers=self._headers(request),
                    allow_redirects=False,
                    ssl=dial.ssl,
                    server_hostname=dial.server_hostname,
                ) as answer,
            ):
                body = await read_limited(answer.content.iter_any(), _MOST_BYTES)
        except UntrustedAddressError as error:
            raise GatewayAnswerError(str(error)) from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise GatewayAnswerError(f"gateway/{id_} does not answer: {error}") from error
        if answer.status != 200:
            refused = ErrorBody.parse(body)
            why = f"it answers {answer.status}" if refused is None else refused.message
            if answer.status == 404 and method == "GET":
                why = "its release does not tell what is in flight"
            status = answer.status if answer.status in (401, 403, 404) else 502
            raise GatewayAnswerError(f"gateway/{id_}: {why}", status)
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise GatewayAnswerError(f"gateway/{id_}: its answer is no JSON") from error
        return found if isinstance(found, dict) else {}

    def _headers(self, request: Request) -> dict[str, str]:
        """Return the client's own right to ask."""
        given = request.headers
        if "authorization" in given:
            return {"authorization": given["authorization"]}
        cookie = read_cookie(given.get("cookie", "").encode("latin-1"), request.scope)
        secret = self.sessions.secret_of(cookie)
        return {"authorization": f"Bearer {secret}"} if secret else {}
