"""What the ranks of a group agree on once each knows what it has. Pure."""

from collections.abc import Sequence

from nodeagent.engine.ranks.errors import GroupError
from nodeagent.engine.ranks.words import Begin, Hello


def agree(hellos: Sequence[Hello]) -> Begin:
    """Return what holds for all; the first hello is rank 0's.

    Prefix caches must hold the same on all ranks, for rank 0 alone looks what is in its own. Stages of a pipeline with
    more layers need more for a token: all count what it takes where it takes most. That is exact for layers which keep
    every token, and for nothing else.

    Raises:
        GroupError: they have loaded different things.

    """
    own = hellos[0]
    for hello in hellos:
        if hello.model != own.model:
            raise GroupError(
                f"rank {hello.rank} has another model, or other versions of mlx or mlx-lm, than rank 0"
            )
    shared = min(hello.prefix_bytes for hello in hellos)
    if len({hello.token_bytes for hello in hellos}) == 1:
        return Begin(prefix_bytes=shared, token_bytes=None)
    if all(hello.is_even for hello in hellos):
        most = max(hello.token_bytes for hello in hellos)
        return Begin(prefix_bytes=shared, token_bytes=most)
    return Begin(prefix_bytes=0, token_bytes=None)


def room(hellos: Sequence[Hello]) -> float:
    """Return which part of all requests' caches has room on every rank."""
    return min(hello.room for hello in hellos)
