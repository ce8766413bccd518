"""The loop of ranks above 0: waits for a step in a socket and executes it. Worker thread only."""

import socket
from dataclasses import dataclass, field

from engine.batch.executor import StepExecutor, update_gauges
from engine.errors import GroupError, StoppedError
from engine.gauges import Gauges
from engine.memory import allocation
from engine.ranks import messages
from engine.ranks.messages import StepMessage, StopMessage, TokenChecksum
from engine.ranks.rendezvous import WaitContext

_POLL_S = 0.5


@dataclass(slots=True, kw_only=True)
class Follower:
    """Executes the plans of rank 0."""

    channel: socket.socket
    executor: StepExecutor
    gauges: Gauges
    wait: WaitContext
    _number: int = 0
    _checksum: TokenChecksum = field(default_factory=TokenChecksum)

    def run(self) -> None:
        """Follow rank 0 until it sends a StopMessage.

        Raises:
            GroupError: rank 0 is gone, or has made other tokens than this rank.
            StoppedError: this process must end, and rank 0 did not say so.

        """
        while not self.wait.is_stopping():
            self.gauges.is_waiting = True
            raw = messages.receive(self.channel, _POLL_S)
            if raw is None:
                continue
            self.gauges.is_waiting = False
            match messages.decode(raw):
                case StepMessage() as step:
                    if step.number != self._number + 1:
                        raise GroupError(f"step {step.number} came after step {self._number}")
                    if step.made != self._checksum.sum:
                        raise GroupError(
                            f"before step {step.number} this rank had made other tokens than rank 0, so answers would be wrong"
                        )
                    clock = self.wait.clock
                    start_s = clock.monotonic()
                    self._number = step.number
                    self._checksum.add(self.executor.run(step.plan))
                    self.gauges.steps += 1
                    self.gauges.slowest_s = max(self.gauges.slowest_s, clock.monotonic() - start_s)
                    if not self.executor.jobs:
                        allocation.clear_buffers()
                    update_gauges(self.gauges, self.executor)
                case StopMessage():
                    return
                case message:
                    raise GroupError(f"rank 0 sent '{message.kind}' instead of a step")
        raise StoppedError
