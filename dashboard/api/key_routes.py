"""Route of API keys with their use."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from fastapi import APIRouter, Request, Response

from dashboard.api.routes import json_response
from dashboard.auth import Visitor
from dashboard.history.queries import HistoryReader, ReadError, RequestQuery
from insight.conditions import Row
from machinery.clock import Clock
from schemas.records import ApiKey, role_includes
from store import codec, keys
from store.port import Transport

_DAY_S: Final = 24 * 3600.0
_MOST_REQUESTS: Final = 20_000


@dataclass(frozen=True, slots=True)
class KeyRoutes:
    """Handler of `/api/v1/keys`."""

    transport: Transport
    reader: HistoryReader | None
    clock: Clock

    def add_to(self, router: APIRouter) -> None:
        """Register the route."""
        router.add_api_route("/api/v1/keys", self.keys, methods=["GET"])

    async def keys(self, request: Request) -> Response:
        """List API keys without their hashes, with limits and the use of 24 hours; a lesser role than admin sees its own."""
        visitor: Visitor = request.state.visitor
        items = (await self.transport.list(keys.API_KEY_PREFIX)).items
        known = [codec.decode(ApiKey, item) for item in items]
        if not role_includes(visitor.role, "admin"):
            known = [key for key in known if key.name == visitor.name]
        use = await self._use({key.name for key in known})
        rows = [_key_row(key, use.get(key.name, [])) for key in known]
        return json_response({"keys": rows, "isOwnOnly": not role_includes(visitor.role, "admin")})

    async def _use(self, names: set[str]) -> dict[str, list[Row]]:
        """Return requests and tokens of the last 24 hours by key and model."""
        if self.reader is None or not names:
            return {}
        now_s = self.clock.now().timestamp()
        only = next(iter(names)) if len(names) == 1 else ""
        query = RequestQuery(begin_s=now_s - _DAY_S, end_s=now_s, limit=_MOST_REQUESTS, key=only)
        try:
            ended_requests = await self.reader.requests(query)
        except ReadError:
            return {}
        sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        for request in ended_requests:
            if request.api_key in names:
                total = sums[request.api_key or "", request.model]
                total[0] += 1
                total[1] += request.tokens.prompt or 0
                total[2] += request.tokens.output or 0
        use: dict[str, list[Row]] = defaultdict(list)
        for (key, model), (requests, prompt, output) in sorted(sums.items()):
            use[key].append(
                {
                    "model": model,
                    "requests": requests,
                    "promptTokens": prompt,
                    "outputTokens": output,
                }
            )
        return use


def _key_row(key: ApiKey, use: list[Row]) -> Row:
    return {
        "name": key.name,
        "role": key.role,
        "created": key.created.isoformat(),
        "expires": None if key.expires is None else key.expires.isoformat(),
        "models": list(key.models),
        "requestsPerMinute": key.requests_per_minute,
        "tokensPerMinute": key.tokens_per_minute,
        "concurrency": key.concurrency,
        "previous": len(key.previous),
        "use": use,
    }
