"""PinnedPrefix: the beginning of an agent's prompts, which a deployment's engines always hold."""

from collections.abc import Sequence
from typing import Annotated, Final

from pydantic import Field, StringConstraints

from schemas import quantity
from schemas.kv_cache import KvCache
from schemas.meta import ApiModel, ModelPath

CHAT_FIELDS: Final = (
    "messages",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "chat_template_kwargs",
)
"""Fields of a Chat Completions request that its prompt is made of."""
RESPONSES_FIELDS: Final = ("instructions", "input", "tools", "tool_choice", "reasoning")
"""Fields of a Responses request that its prompt is made of."""


class PinnedPrefix(ApiModel):
    """The beginning of an agent's prompts, which engines always hold.

    The text is in a file on the Macs and not here: that of an agent has 200 kB, and each replica's object would have a
    copy of it. An engine reads the file's messages before the first one of a user, and its tools.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=63)]
    """Its name in conditions."""
    file: ModelPath
    """A file of `fleetctl launch AGENT --record`, or a request of the agent as JSON, with `messages` (Chat Completions)
    or `input` (Responses) and `tools`; resolved like model.path."""
    tokens: Annotated[int, Field(ge=64, le=16_777_216)]
    """Tokens for which memory is proven; a longer prefix is not pinned, and the condition says how long it is."""


def check_prefixes(
    prefixes: Sequence[PinnedPrefix], cache: KvCache | None, sharding: str, context_length: int
) -> None:
    """Refuse prefixes that no engine could pin. Raises ValueError."""
    if not prefixes:
        return
    names = [prefix.name for prefix in prefixes]
    if len(set(names)) < len(names):
        raise ValueError(f"has two prefixes with one name: {', '.join(names)}; rename one")
    cache = cache or KvCache()
    others = {
        f"sharding: {sharding}": sharding != "Never",
        "kvCache.window": cache.window is not None,
        "kvCache.prefixBytes: 0": cache.prefix_bytes is not None
        and quantity.parse(cache.prefix_bytes) == 0,
    }
    for name in (name for name, is_given in others.items() if is_given):
        raise ValueError(f"has prefixes and {name}, with which none is pinned; remove one of them")
    longest = max(prefixes, key=lambda prefix: prefix.tokens)
    if longest.tokens >= context_length:
        raise ValueError(
            f"prefix {longest.name} has tokens: {longest.tokens}, which must be less than contextLength, "
            f"{context_length}"
        )
