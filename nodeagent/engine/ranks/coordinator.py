"""Rank 0's end of the channels: says when, and tells the others every step before doing it."""

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nodeagent.engine.batch.plan import Plan
from nodeagent.engine.errors import StoppedError
from nodeagent.engine.jobs import Made
from nodeagent.engine.ranks import frames, words
from nodeagent.engine.ranks.errors import GroupError
from nodeagent.engine.ranks.tally import Tally
from nodeagent.engine.ranks.words import Begin, Bye, Go, Hello, Step, Word

_LOOK_S = 0.5

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Coordinator:
    """The channels to all other ranks."""

    channels: list[socket.socket]
    """In rank order, from rank 1 on."""
    _number: int = 0
    _tally: Tally = field(default_factory=Tally)

    def go(self) -> None:
        """Have all ranks connect. The last one first, for it waits a moment by itself (model/connecting.py).

        Raises:
            GroupError: one of them is gone.

        """
        for channel in reversed(self.channels):
            frames.send(channel, words.encode(Go()))

    def hellos(self, is_stopping: Callable[[], bool]) -> list[Hello]:
        """Wait until all ranks have loaded, for as long as that takes; return what they say, in rank order.

        Raises:
            GroupError: one of them is gone.
            StoppedError: `is_stopping` became true.

        """
        return [self._hello(channel, is_stopping) for channel in self.channels]

    def begin(self, begin: Begin) -> None:
        """Tell all ranks what was agreed on.

        Raises:
            GroupError: one of them is gone.

        """
        self._say(begin)

    def tell(self, plan: Plan) -> None:
        """Send a plan to all ranks.

        Raises:
            GroupError: one of them is gone.

        """
        self._number += 1
        self._say(Step(number=self._number, plan=plan, made=self._tally.sum))

    def made(self, made: Sequence[Made]) -> None:
        """Count what a step brought here; the others compare it with theirs."""
        self._tally.add(made)

    def close(self) -> None:
        """Let the others end."""
        for channel in self.channels:
            try:
                frames.send(channel, words.encode(Bye()))
            except GroupError as error:
                log.warning("a rank was gone before it was let go", extra={"reason": str(error)})
            channel.close()

    def _say(self, word: Word) -> None:
        raw = words.encode(word)
        for rank, channel in enumerate(self.channels, 1):
            try:
                frames.send(channel, raw)
            except GroupError as error:
                raise GroupError(f"rank {rank} was lost: {error}") from error

    def _hello(self, channel: socket.socket, is_stopping: Callable[[], bool]) -> Hello:
        while (raw := frames.receive(channel, _LOOK_S)) is None:
            if is_stopping():
                raise StoppedError
        word = words.decode(raw)
        if not isinstance(word, Hello):
            raise GroupError(f"a rank said {word.kind} where it should say what it loaded")
        return word
