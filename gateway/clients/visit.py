"""One client's request to a model, from its first byte to its last, as uvicorn's protocol carries it along."""

import asyncio
from dataclasses import dataclass, field

from gateway.asks import Heard
from gateway.carry.trail import Trail
from gateway.clients.reply import Reply
from gateway.errors import Refusal

_NEVER = float("inf")


@dataclass(slots=True, eq=False)
class Visit:
    """It has what uvicorn's protocol asks of its own request cycles, and is put in their place."""

    heard: Heard
    reply: Reply
    more_body: bool = True
    body: bytearray = field(default_factory=bytearray)
    is_turn: bool = False
    """Whether what was asked before on this connection has been answered."""
    task: asyncio.Task[None] | None = None
    ending: Refusal | None = None
    """Why it is cut off although its client is there."""
    trail: Trail = field(default_factory=Trail)
    model: str = "unknown"
    outcome: str = "client_gone"
    began_s: float = 0.0
    """When the request was all here, by the gateway's clock."""
    sending_since_s: float = _NEVER
    """Since when the client has been reading nothing."""

    @property
    def response_complete(self) -> bool:
        return self.reply.is_complete

    @property
    def keep_alive(self) -> bool:
        return self.reply.keep_alive

    @keep_alive.setter
    def keep_alive(self, value: bool) -> None:
        self.reply.keep_alive = value

    @property
    def disconnected(self) -> bool:
        return self.reply.is_gone

    @disconnected.setter
    def disconnected(self, value: bool) -> None:
        self.reply.is_gone = value
        if self.task is not None:
            self.task.cancel()

    @property
    def message_event(self) -> "Visit":
        return self

    def set(self) -> None:
        """Do nothing: what uvicorn tells its cycles this way, we are told otherwise."""

    def cut(self, why: Refusal) -> None:
        """End it, and tell the client why."""
        if self.task is not None and self.ending is None:
            self.ending = why
            self.task.cancel()
