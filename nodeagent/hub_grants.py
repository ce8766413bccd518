"""The tokens of hubs that this node may fetch with now: read when a fetch starts, and kept nowhere."""

from dataclasses import dataclass

from models.hub.hub_settings import HubSettings
from schemas.deployment import HubReference
from schemas.records import HubToken
from store import codec, keys
from store.port import StoreReader


@dataclass(frozen=True, slots=True, kw_only=True)
class HubGrants:
    """The grants below this node's prefix, which the reconciler writes for deployments and fleetctl for pulls."""

    store: StoreReader
    node: str
    hubs: HubSettings

    async def token(self, source: HubReference, holder: str) -> str:
        """Return the token that was granted to a deployment, or for a folder; "" if there is none for this hub.

        Raises:
            StoreError: the store did not answer.

        """
        item = await self.store.get(keys.hub_grant_key(self.node, holder))
        if item is None:
            return ""
        granted = codec.decode(HubToken, item)
        is_for_hub = granted.endpoint.rstrip("/") == self.hubs.endpoint_of(source)
        return granted.token.get_secret_value() if is_for_hub else ""
