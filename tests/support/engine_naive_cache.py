"""A naive model of the block tree: a table of prefixes that is searched from end to end."""

from dataclasses import dataclass, field

from engine.cache.block_tree import NODE_BYTES

Tokens = tuple[int, ...]
WEIGHT = 10  # of a token, in a node or in one of its windows


def shared(one: Tokens, other: Tokens) -> int:
    """Return the number of tokens that both begin with."""
    same = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        same += 1
    return same


def parent(prefix: Tokens, block: int) -> Tokens:
    """Return the prefix that ends with the previous block."""
    return prefix[: (len(prefix) - 1) // block * block]


def chain(prefix: Tokens, block: int) -> list[Tokens]:
    """Return the prefixes that end with a block of this one, the shortest first."""
    found = []
    while prefix:
        found.append(prefix)
        prefix = parent(prefix, block)
    return found[::-1]


@dataclass
class Table:
    """The held prefixes, each up to a block's end, and their last use; for models without windows or states."""

    block: int
    limit_bytes: int
    used: dict[Tokens, int] = field(default_factory=dict)
    clock: int = 0

    @property
    def nbytes(self) -> int:
        return sum(self._size(prefix) for prefix in self.used)

    def match(self, tokens: Tokens) -> int:
        """Return the longest common beginning with a held prefix, without the last token."""
        return min(len(tokens) - 1, max((shared(one, tokens) for one in self.used), default=0))

    def use(self, prefixes: list[Tokens]) -> None:
        """Touch these prefixes, the last one first."""
        for prefix in reversed(prefixes):
            self.clock += 1
            self.used[prefix] = self.clock

    def recent(self) -> list[Tokens]:
        """Return the held prefixes, last used first."""
        return sorted(self.used, key=lambda prefix: -self.used[prefix])

    def store(self, tokens: Tokens) -> None:
        """Store as much of the tokens as fits."""
        since = self.clock
        self._touch(tokens)
        wanted = 0
        added = []
        for prefix in chain(tokens, self.block):
            if self._cover(prefix):
                continue
            wanted += self._size(prefix)
            while self.nbytes + wanted > self.limit_bytes:
                oldest = min(self.used, key=self.used.__getitem__, default=None)
                if oldest is None or self.used[oldest] > since:
                    break
                del self.used[oldest]
            else:
                added.append(prefix)
                continue
            break
        for prefix in added:
            for tail in [one for one in self.used if prefix[: len(one)] == one]:
                if parent(tail, self.block) == parent(prefix, self.block):
                    del self.used[tail]
            self.used[prefix] = 0
        self._touch(tokens)

    def trim(self, limit_bytes: int) -> None:
        while self.nbytes > limit_bytes:
            del self.used[min(self.used, key=self.used.__getitem__)]

    def _size(self, prefix: Tokens) -> int:
        return NODE_BYTES + WEIGHT * (len(prefix) - len(parent(prefix, self.block)))

    def _cover(self, prefix: Tokens) -> Tokens | None:
        """Return the held prefix that covers this one: itself, or a longer one up to the same block's end."""
        same = [
            one
            for one in self.used
            if one[: len(prefix)] == prefix
            and parent(one, self.block) == parent(prefix, self.block)
        ]
        return min(same) if same else None

    def _touch(self, tokens: Tokens) -> None:
        covers = [self._cover(prefix) for prefix in chain(tokens, self.block)]
        self.use([prefix for prefix in covers if prefix is not None])
