"""The warm-up of a new engine's prefix cache: it reads the prompts that other replicas of its deployment read last.

It happens before the endpoint is published, so that a replica that moves is not slow for the clients that move with it.
It is bounded and optional: without prompts, or when its time is over, the engine serves all the same.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Final, Protocol

import aiohttp

from nodeagent.engines import group_launch
from nodeagent.engines.engine_http import EngineHttp
from nodeagent.engines.engine_processes import EngineProcess
from nodeagent.peers.peer_blobs import PeerError
from nodeagent.replicas.deployment_replicas import Siblings
from schemas.replica import Replica
from schemas.wire import headers
from schemas.wire.recent_prompts import MAX_TOKENS, RecentPrompt, RecentPrompts
from store.errors import StoreError

log = logging.getLogger(__name__)

LIMIT_S: Final = 20.0
"""Seconds after which an engine serves, however much of the prompts it has read."""
_MAX_DONORS: Final = 4
_MAX_ANSWER_BYTES: Final = 1 << 20


class PeerPrompts(Protocol):
    """The port to the prompts of other nodes' engines."""

    async def read(self, node: str, url: str, replica: str) -> RecentPrompts:
        """Return the last prompts of a replica on a node. Raises PeerError."""
        ...


class PeerAddresses(Protocol):
    """The port to the addresses of other agents."""

    async def urls(self) -> dict[str, str]:
        """Return the URL of each node that shares files, by name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWarmup:
    """Warms the prefix caches of one node's new engines."""

    node: str
    siblings: Siblings
    addresses: PeerAddresses
    peers: PeerPrompts
    engines: EngineHttp
    limit_s: float = LIMIT_S

    async def warm(self, process: EngineProcess) -> int:
        """Let an engine read prompts of its deployment; return their number. Never fails."""
        count = 0
        try:
            async with asyncio.timeout(self.limit_s):
                for prompt in await self._prompts(process.replica):
                    if not await self._read(process, prompt):
                        break
                    count += 1
        except TimeoutError:
            log.info("the time to warm the prefix cache is over", extra={"prompts": count})
        except (aiohttp.ClientError, OSError, ValueError, StoreError) as error:
            log.warning(
                "the prefix cache is not warmed",
                extra={"replica": process.replica, "why": str(error)},
            )
        if count:
            log.info("prefix cache warmed", extra={"replica": process.replica, "prompts": count})
        return count

    async def donors(self, replica: str) -> list[Replica]:
        """Return the replicas of the same deployment on other nodes, those that are about to end first.

        Raises:
            StoreError: the store could not be read.
            UndecodableError: a newer mlx-fleet wrote the replica.

        """
        replicas = [
            one
            for one in await self.siblings.of(replica)
            if group_launch.rank_of_node(one, self.node) is None
        ]
        replicas.sort(key=lambda one: (one.metadata.deletion_timestamp is None, one.name))
        return replicas[:_MAX_DONORS]

    async def _prompts(self, replica: str) -> list[RecentPrompt]:
        donors = await self.donors(replica)
        if not donors:
            return []
        urls = await self.addresses.urls()
        lists = await asyncio.gather(*(self._ask(donor, urls) for donor in donors))
        return list(_merged(lists))

    async def _ask(self, donor: Replica, urls: dict[str, str]) -> Sequence[RecentPrompt]:
        node = donor.spec.ranks[0].node
        if node not in urls:
            return ()
        try:
            return (await self.peers.read(node, urls[node], donor.name)).prompts
        except PeerError as error:
            log.info("no prompts of a replica", extra={"replica": donor.name, "why": str(error)})
            return ()

    async def _read(self, process: EngineProcess, prompt: RecentPrompt) -> bool:
        """Let the engine read one prompt; return False if it takes no more now."""
        body: dict[str, object] = {
            "model": process.served_name,
            "prompt": prompt.tokens,
            "max_tokens": 1,
            "temperature": 0,
        }
        if prompt.request_salt:
            body["cache_salt"] = prompt.request_salt
        salt = {headers.CACHE_SALT: prompt.key_salt} if prompt.key_salt else None
        status, _ = await self.engines.post(
            process.address,
            "/v1/completions",
            body,
            limit_s=self.limit_s,
            max_bytes=_MAX_ANSWER_BYTES,
            headers=salt,
        )
        # 400: the prompt of another version may be longer than the context, or have other tokens.
        return status in (200, 400)


def _merged(lists: Sequence[Sequence[RecentPrompt]]) -> Iterator[RecentPrompt]:
    """Yield the newest prompts of all lists in turn, within the budget of one engine."""
    left = MAX_TOKENS
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for prompt in chain.from_iterable(zip_longest(*lists)):
        if prompt is None or (prompt.salt, prompt.tokens) in seen:
            continue
        seen.add((prompt.salt, prompt.tokens))
        left -= len(prompt.tokens)
        if left < 0:
            return
        yield prompt
