"""Tokens for hubs: one for each endpoint, copied to the nodes that fetch with it, and only while they fetch.

An agent may read the tokens below its own node's prefix, and no other (`store.etcd.users`).
"""

from models.hub.hub_settings import HubSettings
from reconciler.listers.lister import Lister
from schemas.deployment import HubReference, ModelDeployment
from schemas.meta import is_true
from schemas.records import HubToken
from schemas.replica import MODEL_PRESENT
from store import codec, keys
from store.port import Delete, ModRevisionGuard, Put, StoreReader, Transport


async def find_token(store: StoreReader, endpoint: str) -> HubToken | None:
    """Return the token for an endpoint, the first by name if there are several; None if there is none.

    Raises:
        StoreError: the store did not answer.

    """
    wanted = endpoint.rstrip("/")
    # Raises StoreError.
    items = (await store.list(keys.HUB_TOKEN_PREFIX)).items
    tokens = sorted((codec.decode(HubToken, item) for item in items), key=lambda one: one.name)
    return next((token for token in tokens if token.endpoint.rstrip("/") == wanted), None)


async def token_for(store: StoreReader, endpoint: str) -> str:
    """Return the text of the token for an endpoint, "" if there is none. Raises StoreError."""
    token = await find_token(store, endpoint)
    return "" if token is None else token.token.get_secret_value()


class TokenGrants:
    """Writes and removes the grants of deployments."""

    def __init__(self, lister: Lister, hubs: HubSettings) -> None:
        self._lister = lister
        self._hubs = hubs
        self._granted: dict[str, set[str]] = {}
        """Nodes with a grant, by deployment; a deployment that is missing has not been read."""

    async def reconcile(
        self, deployment: ModelDeployment, source: HubReference, transport: Transport
    ) -> None:
        """Grant the token to the nodes that fetch for the deployment, and take it from the others.

        Raises:
            StoreError: the store did not answer, or another leader writes.

        """
        name = deployment.name
        wanted = {
            preload.node
            for preload in self._lister.preloads_of(name)
            if not self._lister.has_files(preload.node, preload.source.folder)
        }
        for replica in self._lister.replicas_of(name):
            if replica.metadata.deletion_timestamp is not None or replica.spec.model.hub is None:
                continue
            reports = self._lister.ranks(replica)
            for rank, report in zip(replica.spec.ranks, reports, strict=True):
                if report is None or not is_true(report.conditions, MODEL_PRESENT):
                    wanted.add(rank.node)
        if name not in self._granted:
            self._granted[name] = await self._read(name, transport)
        granted = self._granted[name]
        if wanted == granted:
            return
        token = await find_token(transport, self._hubs.endpoint_of(source))
        given = wanted if token is not None else set()
        for node in sorted(granted - given):
            await transport.commit([], [Delete(key=keys.hub_grant_key(node, name))])
            granted.discard(node)
        for node in sorted(given - granted):
            assert token is not None
            key = keys.hub_grant_key(node, name)
            before = await transport.get(key)
            guard = ModRevisionGuard(
                key=key, mod_revision=0 if before is None else before.mod_revision
            )
            await transport.commit([guard], [Put(key=key, value=codec.encode(token))])
            granted.add(node)

    async def remove(self, name: str, transport: Transport) -> None:
        """Remove all grants of a deployment that is gone. Raises StoreError."""
        if name not in self._granted:
            return
        for node in sorted(self._granted.pop(name)):
            await transport.commit([], [Delete(key=keys.hub_grant_key(node, name))])

    async def _read(self, name: str, transport: Transport) -> set[str]:
        """Return the nodes to which an earlier leader has granted the token."""
        items = (await transport.list(keys.HUB_GRANT_PREFIX)).items
        found = (item.key.removeprefix(keys.HUB_GRANT_PREFIX).partition("/") for item in items)
        return {node for node, _, deployment in found if deployment == name}
