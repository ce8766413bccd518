"""What ranks say to each other, as JSON. Values only.

rank n -> rank 0: Join         who it is; it has imported MLX
rank 0 -> rank n: Go           all are there: connect; or Away, and the channel is closed
rank n -> rank 0: Hello        what it has in memory
rank 0 -> rank n: Begin        what all agreed on
rank 0 -> rank n: Step, Step, ...
rank 0 -> rank n: Bye          it was asked to end; the channel closing without it is a failure

Each rank has a second channel to rank 0, its lifeline, which also begins with a Join. On it both sides say why they end,
Over or Bye, and nothing else: that it closes without a word is how the death of a rank is noticed.

Words on a socket, each after its length. Blocking, with deadlines; used in the worker's thread alone.

A check sum of the tokens a rank has made, by which ranks notice that they differ. Pure.
"""

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias
from zlib import crc32

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from engine.batch.step_plan import StepPlan
from engine.errors import GroupError
from engine.jobs import TokenOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinMessage:
    """A rank that is about to connect to the others."""

    rank: int
    world_size: int
    epoch: int
    secret: str
    is_lifeline: bool = False
    kind: Literal["join"] = "join"


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectMessage:
    """Not this one."""

    reason: str
    kind: Literal["away"] = "away"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectMessage:
    """All ranks are there: connect."""

    kind: Literal["go"] = "go"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedMessage:
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
class StartMessage:
    """All ranks are there."""

    prefix_bytes: int
    """What each prefix cache may hold, so that all forget the same things at the same time."""
    token_bytes: int | None
    """What a token counts for in them, where it takes more on some ranks than on others; None: what it takes."""
    kind: Literal["begin"] = "begin"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """The next thing to do."""

    number: int
    plan: StepPlan
    made: int
    """A check sum of all tokens rank 0 knew of before this step (`Tally`)."""
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMessage:
    """Free the model and end."""

    kind: Literal["bye"] = "bye"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureMessage:
    """The group has failed; on lifelines."""

    reason: str
    kind: Literal["over"] = "over"


RankMessage: TypeAlias = (
    JoinMessage
    | RejectMessage
    | ConnectMessage
    | LoadedMessage
    | StartMessage
    | StepMessage
    | StopMessage
    | FailureMessage
)
_ADAPTER: TypeAdapter[RankMessage] = TypeAdapter(
    Annotated[RankMessage, Field(discriminator="kind")]
)


def encode(word: RankMessage) -> bytes:
    """Return a word as JSON."""
    return orjson.dumps(word)


def decode(raw: bytes) -> RankMessage:
    """Return the word.

    Raises:
        GroupError: it is none.

    """
    try:
        return _ADAPTER.validate_json(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, found["loc"]))
        raise GroupError(f"what came is no word of ranks: {where}: {found['msg']}") from error


# A plan of 1,024 jobs with a million tokens each is larger; nobody has memory for it either.
MAX_BYTES = 256 << 20
LENGTH_BYTES = 4
# A rank whose kernel takes nothing for so long is gone or frozen.
_SEND_S = 20.0


def frame(raw: bytes) -> bytes:
    """Return a word with its length before it."""
    return len(raw).to_bytes(LENGTH_BYTES, "big") + raw


def send(channel: socket.socket, raw: bytes) -> None:
    """Send one word.

    Raises:
        GroupError: the other side is gone, or takes nothing.

    """
    channel.settimeout(_SEND_S)
    try:
        channel.sendall(frame(raw))
    except TimeoutError as error:
        raise GroupError(f"the other rank took nothing for {_SEND_S:g} s") from error
    except OSError as error:
        raise GroupError(f"the other rank is gone: {error.strerror}") from error


def receive(channel: socket.socket, timeout_s: float | None) -> bytes | None:
    """Return the next word; None if none began within the time. `timeout_s` None waits for as long as it takes.

    Raises:
        GroupError: the other side is gone, or sent what is no word.

    """
    channel.settimeout(timeout_s)
    try:
        first = channel.recv(1)
    except TimeoutError:
        return None
    except OSError as error:
        raise GroupError(f"the other rank is gone: {error.strerror}") from error
    channel.settimeout(_SEND_S)
    length = int.from_bytes(
        first + _receive_exactly(channel, LENGTH_BYTES - len(first), first), "big"
    )
    if length > MAX_BYTES:
        raise GroupError(f"a word of {length} bytes is announced; at most {MAX_BYTES} are allowed")
    return _receive_exactly(channel, length, first)


def _receive_exactly(channel: socket.socket, count: int, before: bytes) -> bytes:
    if not before:
        raise GroupError("the other rank closed the channel")
    found = bytearray()
    while len(found) < count:
        try:
            part = channel.recv(min(count - len(found), 1 << 20))
        except TimeoutError as error:
            raise GroupError("the other rank stopped in the middle of a word") from error
        except OSError as error:
            raise GroupError(f"the other rank is gone: {error.strerror}") from error
        if not part:
            raise GroupError("the other rank closed the channel in the middle of a word")
        found += part
    return bytes(found)


class TokenChecksum:
    """All tokens so far, in the order in which they were read."""

    def __init__(self) -> None:
        self.sum = 0

    def add(self, made: Iterable[TokenOutput]) -> None:
        """Count what a step brought."""
        for one in made:
            self.sum = crc32(b"%d %d" % (one.job_id, one.token), self.sum)
