"""The listings of models that no hub has, as the agents that have them offer them."""

from schemas.blob_share import ModelListing, ModelOffer
from store import codec, keys
from store.errors import UndecodableError
from store.port import Transport


async def read_listings(transport: Transport, repo: str) -> tuple[ModelListing, ...]:
    """Return the listings of a repository, one for each Mac that has a commit of it whole.

    Raises:
        StoreError: the store does not answer.

    """
    start = f"{repo.replace('/', '--')}@"
    model_listings = []
    for item in (await transport.list(keys.SHARE_PREFIX)).items:
        _, what, folder = keys.share_parts(item.key)
        if what != "have" or not folder.startswith(start):
            continue
        try:
            offer = codec.decode(ModelOffer, item)
        except UndecodableError:
            continue  # an agent of a newer release
        if offer.is_whole and offer.listing is not None:
            model_listings.append(offer.listing)
    return tuple(model_listings)
