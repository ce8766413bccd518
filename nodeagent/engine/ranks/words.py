"""What ranks say to each other, as JSON. Values only.

rank n -> rank 0: Join         who it is; it has imported MLX
rank 0 -> rank n: Go           all are there: connect; or Away, and the channel is closed
rank n -> rank 0: Hello        what it has in memory
rank 0 -> rank n: Begin        what all agreed on
rank 0 -> rank n: Step, Step, ...
rank 0 -> rank n: Bye          it was asked to end; the channel closing without it is a failure

Each rank has a second channel to rank 0, its lifeline, which also begins with a Join. On it both sides say why they end,
Over or Bye, and nothing else: that it closes without a word is how the death of a rank is noticed.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from nodeagent.engine.batch.plan import Plan
from nodeagent.engine.ranks.errors import GroupError


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A rank that is about to connect to the others."""

    rank: int
    world_size: int
    epoch: int
    secret: str
    is_lifeline: bool = False
    kind: Literal["join"] = "join"


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """Not this one."""

    reason: str
    kind: Literal["away"] = "away"


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """All ranks are there: connect."""

    kind: Literal["go"] = "go"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A rank that has its share of the model in memory."""

    rank: int
    model: str
    """A digest of what must be alike: the model's configuration and files, and the versions of mlx and mlx-lm."""
    prefix_bytes: int
    """What its prefix cache may hold."""
    token_bytes: int
    """What one token takes there: stages of a pipeline may differ."""
    is_even: bool
    """Whether every token takes as much: no layers that rotate, and no states."""
    room: float
    """What the caches of requests may take there, as a part of what they take when all slots are full."""
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """All ranks are there."""

    prefix_bytes: int
    """What each prefix cache may hold, so that all forget the same things at the same time."""
    token_bytes: int | None
    """What a token counts for in them, where it takes more on some ranks than on others; None: what it takes."""
    kind: Literal["begin"] = "begin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The next thing to do."""

    number: int
    plan: Plan
    made: int
    """A check sum of all tokens rank 0 knew of before this step (`Tally`)."""
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """Free the model and end."""

    kind: Literal["bye"] = "bye"


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The group has failed; on lifelines."""

    reason: str
    kind: Literal["over"] = "over"


Word: TypeAlias = Join | Away | Go | Hello | Begin | Step | Bye | Over
_WORD: TypeAdapter[Word] = TypeAdapter(Annotated[Word, Field(discriminator="kind")])


def encode(word: Word) -> bytes:
    """Return a word as JSON."""
    return orjson.dumps(word)


def decode(raw: bytes) -> Word:
    """Return the word.

    Raises:
        GroupError: it is none.

    """
    try:
        return _WORD.validate_json(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, found["loc"]))
        raise GroupError(f"what came is no word of ranks: {where}: {found['msg']}") from error
