"""What ranks above 0 do: wait for a step in a socket, do it, wait again. The worker's thread alone."""

import socket
from dataclasses import dataclass, field

import mlx.core as mx

from engine.batch.executor import StepExecutor, update_gauges
from engine.errors import GroupError, StoppedError
from engine.gauges import Gauges
from engine.ranks import messages
from engine.ranks.messages import StepMessage, StopMessage, TokenChecksum
from engine.ranks.rendezvous import WaitContext

_POLL_S = 0.5


@dataclass(slots=True, kw_only=True)
class Follower:
    """Does what rank 0 says."""

    channel: socket.socket
    executor: StepExecutor
    gauges: Gauges
    patience: WaitContext
    _number: int = 0
    _tally: TokenChecksum = field(default_factory=TokenChecksum)

    def run(self) -> None:
        """Follow until rank 0 says bye.

        Raises:
            GroupError: rank 0 is gone, or has made other tokens than this rank.
            StoppedError: this process is to end, and rank 0 said nothing of it.

        """
        while not self.patience.is_stopping():
            self.gauges.is_waiting = True
            raw = messages.receive(self.channel, _POLL_S)
            if raw is None:
                continue
            self.gauges.is_waiting = False
            match messages.decode(raw):
                case StepMessage() as step:
                    self._do(step)
                case StopMessage():
                    return
                case word:
                    raise GroupError(f"rank 0 said {word.kind} in the middle of work")
        raise StoppedError

    def _do(self, step: StepMessage) -> None:
        if step.number != self._number + 1:
            raise GroupError(f"step {step.number} came after step {self._number}")
        if step.made != self._tally.sum:
            raise GroupError(
                f"before step {step.number} this rank had made other tokens than rank 0: its answers would be garbage"
            )
        clock = self.patience.clock
        began = clock.monotonic()
        self._number = step.number
        self._tally.add(self.executor.run(step.plan))
        self.gauges.steps += 1
        self.gauges.slowest_s = max(self.gauges.slowest_s, clock.monotonic() - began)
        if not self.executor.jobs:
            mx.clear_cache()
        update_gauges(self.gauges, self.executor)
