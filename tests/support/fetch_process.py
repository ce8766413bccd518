"""A process that fetches one model from the stand-in hub, for tests that kill it.

Arguments: the folder of the store, the endpoint, and the bytes of a piece.
Prints the reason and the message of a failure, or the model's folder.
"""

import asyncio
import sys
from pathlib import Path

from machinery.clock import SystemClock
from models.hub.connection import open_hub_session
from models.hub.errors import ModelFetchError
from models.hub.fetcher import FetchLimits, FetchRequest, ModelFetcher
from models.hub.huggingface import HuggingFaceHub
from models.model_store.store import ModelStore
from tests.support.hub import COMMIT, REPO


async def main(root: str, endpoint: str, piece_bytes: str) -> None:
    clock = SystemClock()
    limits = FetchLimits(piece_bytes=int(piece_bytes), attempts=2)
    fetcher = ModelFetcher(ModelStore(Path(root), clock), clock, limits=limits)
    async with open_hub_session() as session:
        hub = HuggingFaceHub(session, endpoint=endpoint)
        try:
            model = await fetcher.fetch(hub, FetchRequest(repo=REPO, commit=COMMIT))
        except ModelFetchError as error:
            sys.exit(f"{error.reason}: {error}")
    print(model.folder)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
