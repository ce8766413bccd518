"""The route that shows prompts of an engine here to the node that takes over: `GET /v1/prompts/<replica>`.

Prompts are what clients wrote. Gateways send those of a deployment to each node that serves it, so a node gets them
from here only if the store assigns it a replica of the same deployment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import aiohttp
from fastapi import FastAPI, Path, Request, Response

from identity.names import Role
from identity.peers import peer_of
from machinery.http_server import SSL_OBJECT
from nodeagent.engines import group_launch
from nodeagent.engines.engine_http import EngineHttp
from nodeagent.engines.tls import NodeTls
from nodeagent.replicas.deployment_replicas import Siblings
from nodeagent.replicas.engine_tracker import EngineTracker
from schemas.meta import NAME_PATTERN
from schemas.wire import recent_prompts
from schemas.wire.errors import Refusal, RefusedError
from store.errors import StoreError, UndecodableError

_ENGINE_TIMEOUT_S = 2.0

ReplicaNameParam = Annotated[str, Path(pattern=NAME_PATTERN, max_length=128)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRoutes:
    """The route of one agent's prompts, and its authorization."""

    node: str
    siblings: Siblings
    engines: Mapping[str, EngineTracker]
    """Engines by replica name: the agent's own mapping, which changes."""
    tls: NodeTls | None = None

    def add_to(self, app: FastAPI) -> None:
        """Add the route to the agent's API."""
        app.add_api_route(f"{recent_prompts.PATH}/{{replica}}", self.get, methods=["GET"])

    async def get(self, request: Request, replica: ReplicaNameParam) -> Response:
        """Answer with the last prompts of an engine, as it reports them."""
        await self._authorize(request, replica)
        engine = self.engines.get(replica)
        if engine is None:
            raise self._refused(404, f"replica {replica} has no engine here")
        http = EngineHttp(self.tls)
        try:
            body = await http.get(
                engine.process.address,
                recent_prompts.ENGINE_PATH,
                limit_s=_ENGINE_TIMEOUT_S,
                max_bytes=recent_prompts.MAX_BODY_BYTES,
            )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise self._refused(503, f"the engine of {replica} does not answer") from error
        finally:
            await http.close()
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    async def _authorize(self, request: Request, replica: str) -> None:
        """Refuse all but nodes that have a replica of the same deployment. Raises RefusedError."""
        peer = peer_of(request.scope.get("state", {}).get(SSL_OBJECT))
        if peer is not None and peer.identity.role is Role.NODE:
            try:
                siblings = await self.siblings.of(replica)
            except (StoreError, UndecodableError) as error:
                message = "the store does not tell which nodes have a replica of the deployment"
                raise self._refused(503, f"{message}; try again") from error
            ranks = (group_launch.rank_of_node(sibling, peer.identity.name) for sibling in siblings)
            if any(rank is not None for rank in ranks):
                return
        raise self._refused(403, "only nodes with a replica of the same deployment get its prompts")

    def _refused(self, status: int, message: str) -> RefusedError:
        return RefusedError(
            Refusal(status=status, message=f"{self.node}: {message}", type="refused")
        )
