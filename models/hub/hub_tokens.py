"""Tokens for hubs in the store: one for each endpoint, which is sent to that endpoint only."""

from schemas.records import HubToken
from store import codec, keys
from store.port import StoreReader


async def list_tokens(store: StoreReader) -> list[HubToken]:
    """Return all tokens, by name. Raises StoreError."""
    items = (await store.list(keys.HUB_TOKEN_PREFIX)).items
    return sorted((codec.decode(HubToken, item) for item in items), key=lambda one: one.name)


async def find(store: StoreReader, endpoint: str) -> HubToken | None:
    """Return the token for an endpoint, the first by name if there are several; None if there is none.

    Raises:
        StoreError: the store did not answer.

    """
    wanted = endpoint.rstrip("/")
    tokens = await list_tokens(store)
    return next((one for one in tokens if one.endpoint.rstrip("/") == wanted), None)


async def token_for(store: StoreReader, endpoint: str) -> str:
    """Return the text of the token for an endpoint, "" if there is none. Raises StoreError."""
    found = await find(store, endpoint)
    return "" if found is None else found.token.get_secret_value()
