"""The space that keys take, by prefix: what fills the quota of the store."""

from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass

from store.keys import ROOT
from store.port import Transport

# Kind of key, kind of object, and node or name: `event/Node/mac-1/`.
_LEVELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixUsage:
    """The current values below one prefix. The store also holds their history, until it is compacted."""

    prefix: str
    keys: int
    size_bytes: int


async def usage_by_prefix(transport: Transport) -> list[PrefixUsage]:
    """Return the usage of each prefix, the largest first: of a node's events, of a kind's specs, and so on.

    Raises:
        StoreError: the store cannot be read.

    """
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    async with aclosing(transport.pages(f"{ROOT}/")) as pages:
        async for page in pages:
            for item in page.items:
                found = counts[_prefix_of(item.key)]
                found[0] += 1
                found[1] += len(item.key) + len(item.value)
    usages = (
        PrefixUsage(prefix=prefix, keys=number, size_bytes=size)
        for prefix, (number, size) in counts.items()
    )
    return sorted(usages, key=lambda usage: (-usage.size_bytes, usage.prefix))


def _prefix_of(key: str) -> str:
    """Return the prefix that a key counts for: its folder, at most three levels below the fleet's root."""
    inner = key.removeprefix(f"{ROOT}/")
    root = key[: len(key) - len(inner)]
    folders = inner.split("/")[:-1][:_LEVELS]
    return root + "".join(f"{folder}/" for folder in folders)
