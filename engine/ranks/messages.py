"""Messages between the ranks of a group, as JSON behind a length prefix.

rank n -> rank 0: JoinMessage       sent after the rank has imported MLX
rank 0 -> rank n: ConnectMessage    all ranks are present, connect MLX; or RejectMessage, and the channel closes
rank n -> rank 0: LoadedMessage     the rank's part of the model is in memory
rank 0 -> rank n: StartMessage      the values that all ranks agreed on
rank 0 -> rank n: StepMessage       repeated
rank 0 -> rank n: StopMessage       rank 0 was asked to end; a channel that closes without it is a failure

Each rank has a second channel to rank 0, its lifeline, which also begins with a JoinMessage. On it either side only
sends its reason to end, a FailureMessage or a StopMessage. A lifeline that closes without one means that the rank died.
`send` and `receive` block with deadlines; use them in the worker thread only.
"""

import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias
from zlib import crc32

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from engine.batch.step_plan import StepPlan
from engine.errors import GroupError
from engine.jobs import TokenOutput

# A plan of 1,024 jobs with a million tokens each is larger; no rank has the memory for such jobs either.
MAX_BYTES = 256 << 20
LENGTH_BYTES = 4
# A rank whose kernel accepts no bytes for this long is dead or frozen.
_SEND_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinMessage:
    """A rank wants to connect to the others."""

    rank: int
    world_size: int
    epoch: int
    secret: str = field(repr=False)
    is_lifeline: bool = False
    kind: Literal["join"] = "join"


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectMessage:
    """Rank 0 does not accept the rank."""

    reason: str
    kind: Literal["away"] = "away"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectMessage:
    """All ranks are present: connect MLX."""

    kind: Literal["go"] = "go"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedMessage:
    """A rank has its part of the model in memory."""

    rank: int
    model: str
    """A digest that all ranks must share: the model's config and files, and the versions of mlx and mlx-lm."""
    prefix_bytes: int
    """The most bytes that its prefix cache may hold."""
    token_bytes: int
    """Cache bytes of one token on this rank; stages of a pipeline may differ."""
    checkpoint_tokens: int
    """The distance of checkpoints in its prefix cache; 0 if every token takes the same number of bytes."""
    room: float
    """The room for requests' caches on this rank, as a share of the caches of all slots when full."""
    by_rows: bool = False
    """True if this rank's layers can keep the rows of a batch in arrays of their own."""
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMessage:
    """All ranks have loaded: start to follow plans."""

    prefix_bytes: int
    """The limit of every rank's prefix cache, so that all ranks evict the same blocks at the same time."""
    token_bytes: int | None
    """The size of a token in these caches, where real sizes differ between ranks; None for the real size."""
    by_rows: bool = False
    """True if all ranks can keep the rows of a batch in arrays of their own."""
    kind: Literal["begin"] = "begin"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """The next step to execute."""

    number: int
    plan: StepPlan
    made: int
    """The checksum of all tokens that rank 0 knew before this step (`TokenChecksum`)."""
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMessage:
    """Free the model and end."""

    kind: Literal["bye"] = "bye"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureMessage:
    """The group has failed; on lifelines only."""

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


class TokenChecksum:
    """A checksum of all tokens of a rank, in the order in which they were read. It shows ranks that differ."""

    def __init__(self) -> None:
        self.sum = 0

    def add(self, outputs: Iterable[TokenOutput]) -> None:
        """Add the tokens of a step."""
        for output in outputs:
            self.sum = crc32(b"%d %d" % (output.job_id, output.token), self.sum)


def encode(message: RankMessage) -> bytes:
    """Return a message as JSON."""
    return orjson.dumps(message)


def decode(raw: bytes) -> RankMessage:
    """Parse a message.

    Raises:
        GroupError: the bytes are no message.

    """
    try:
        return _ADAPTER.validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise GroupError(
            f"received an invalid message between ranks: {where}: {first['msg']}"
        ) from error


def frame(raw: bytes) -> bytes:
    """Return an encoded message behind its length."""
    return len(raw).to_bytes(LENGTH_BYTES, "big") + raw


def send(channel: socket.socket, raw: bytes) -> None:
    """Send one encoded message.

    Raises:
        GroupError: the other rank is gone, or accepts no bytes.

    """
    channel.settimeout(_SEND_S)
    try:
        channel.sendall(frame(raw))
    except TimeoutError as error:
        raise GroupError(f"the other rank accepted no data for {_SEND_S:g} s") from error
    except OSError as error:
        raise GroupError(f"the other rank is gone: {error.strerror}") from error


def receive(channel: socket.socket, timeout_s: float | None) -> bytes | None:
    """Return the next encoded message; None if none began within `timeout_s`. None waits without a limit.

    Raises:
        GroupError: the other rank is gone, or sent no valid message.

    """
    channel.settimeout(timeout_s)
    try:
        first = channel.recv(1)
    except TimeoutError:
        return None
    except OSError as error:
        raise GroupError(f"the other rank is gone: {error.strerror}") from error
    channel.settimeout(_SEND_S)
    rest = _receive_exactly(channel, LENGTH_BYTES - len(first), first)
    length = int.from_bytes(first + rest, "big")
    if length > MAX_BYTES:
        raise GroupError(
            f"the other rank announced a message of {length} bytes; the limit is {MAX_BYTES}"
        )
    return _receive_exactly(channel, length, first)


def _receive_exactly(channel: socket.socket, count: int, before: bytes) -> bytes:
    """Return `count` bytes; `before` are the bytes of this message so far, none if the channel was closed."""
    if not before:
        raise GroupError("the other rank closed the channel")
    found = bytearray()
    while len(found) < count:
        try:
            part = channel.recv(min(count - len(found), 1 << 20))
        except TimeoutError as error:
            raise GroupError("the other rank stopped in the middle of a message") from error
        except OSError as error:
            raise GroupError(f"the other rank is gone: {error.strerror}") from error
        if not part:
            raise GroupError("the other rank closed the channel in the middle of a message")
        found += part
    return bytes(found)
