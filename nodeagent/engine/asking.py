"""Has a rank's share of a model answer without computing anything, and judges the shapes. For engine/splitting.py.

mlx's arrays are lazy: an answer that nobody reads has a shape, and mlx-lm's complaints come all the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

Model: TypeAlias = Any  # an mlx.nn.Module; mlx ships no types
Shape: TypeAlias = tuple[int, ...]

# Tokens that are asked for at once: more than one, so that axes of tokens and of requests cannot be taken for another.
_TOKENS: Final = 5


class Group:
    """A rank of a group as `shard` and `pipeline` look at it; it connects nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@contextmanager
def _watched(group: Group | None) -> Iterator[list[tuple[Shape, ...]]]:
    """Note what attention gets, and let collectives return what has the shape of their results."""
    seen: list[tuple[Shape, ...]] = []
    fast = mx.fast.scaled_dot_product_attention

    def attend(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return fast(q, k, v, **rest)

    stands_in: dict[str, Any] = {}
    if group is not None:
        stands_in = {
            **dict.fromkeys(("all_sum", "send", "recv_like"), lambda x, *_, **__: x),
            "all_gather": lambda x, **_: mx.concatenate([x] * group.size(), axis=0),
        }
    before = {name: getattr(mx.distributed, name) for name in stands_in}
    mx.fast.scaled_dot_product_attention = attend
    try:
        for name, stand_in in stands_in.items():
            setattr(mx.distributed, name, stand_in)
        yield seen
    finally:
        mx.fast.scaled_dot_product_attention = fast
        for name, real in before.items():
            setattr(mx.distributed, name, real)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The shapes of an answer that nobody computed."""

    logits: Shape
    attention: list[tuple[Shape, ...]]
    """Of queries, keys and values, call by call."""
    caches: list[list[Shape]]
    """What each layer keeps."""


def ask(model: Model, group: Group | None, *, tokens: int = _TOKENS) -> Answer:
    """Have a model, or a group's share of one, answer so many tokens, as far as shapes go."""
    with _watched(group) as seen:
        caches = make_prompt_cache(model)
        logits = model(mx.zeros((1, tokens), dtype=mx.int32), cache=caches)
    return Answer(
        logits=tuple(logits.shape),
        attention=seen,
        caches=[[tuple(one.shape) for _, one in named_arrays(cache.state)] for cache in caches],
    )


def named_arrays(tree: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a tree, with their places."""
    pairs: Any = tree_flatten(tree)
    return [(name, one) for name, one in pairs if isinstance(one, mx.array)]


def heads_complaint(whole: tuple[Shape, ...], share: tuple[Shape, ...], size: int) -> str:
    """Return what is wrong with one attention of a share, by the shapes of queries, keys and values; "" if nothing.

    mlx-lm divides heads by `//=`: with a remainder it may go on with heads of another size, and answer nonsense.
    """
    names = ("attention heads", "KV heads", "KV heads")
    for name, before, after in zip(names, whole, share, strict=True):
        if before[-1] != after[-1]:
            return f"{size} does not divide {before[1]} {name}"
        heads, rank_heads = before[1], after[1]
        divided = rank_heads * size == heads
        # With fewer KV heads than ranks some types give several ranks the same one; a latent belongs to no head.
        shared = name == "KV heads" and rank_heads == 1 and (heads == 1 or size % heads == 0)
        if not divided and not shared:
            return f"{size} does not divide {heads} {name}"
    return ""


def answer_complaint(whole: Answer, share: Answer, size: int) -> str:
    """Return why a share's answer cannot be the whole's; "" if nothing speaks against it."""
    if share.logits != whole.logits:
        return f"its logits would have the shape {share.logits} instead of {whole.logits}"
    if len(share.attention) != len(whole.attention) or len(share.caches) != len(whole.caches):
        return "a share attends otherwise than the whole"
    for before, after in zip(whole.attention, share.attention, strict=True):
        complaint = heads_complaint(before, after, size)
        if complaint:
            return complaint
    return ""
