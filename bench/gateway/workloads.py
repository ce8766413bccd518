"""The workloads of `bench.gateway`: four kinds of traffic, one client alone, and streams."""

from dataclasses import dataclass

from bench.gateway.loading import Load
from bench.gateway.peers import Peer


@dataclass(frozen=True)
class Case:
    """One workload: the requests, and the number of clients at once."""

    name: str
    connections: int = 64
    is_streamed: bool = False
    pace_us: int = 0
    """Between the events of a stream; 0: as fast as they are taken."""
    turns: int = 1
    has_fresh_heads: bool = False

    def load(self, peer: Peer, seconds: float) -> Load:
        """Return the load of this case on one peer."""
        return Load(
            port=peer.port,
            connections=self.connections,
            seconds=seconds,
            is_streamed=self.is_streamed,
            key=peer.key,
            header=peer.header,
            turns=self.turns,
            has_fresh_heads=self.has_fresh_heads,
            is_tls=peer.is_tls,
        )


# One head that repeats flatters a gateway that remembers heads; chats of one turn, one that remembers no chats.
KINDS = (
    Case("one_head"),
    Case("fresh_heads", has_fresh_heads=True),
    Case("two_turns", turns=2),
    Case("both", turns=2, has_fresh_heads=True),
)
ALONE = Case("alone", connections=1)
STREAM = Case("stream", is_streamed=True)
PACED = Case("paced", is_streamed=True, pace_us=5000)
"""As engines stream: a token each 5 ms."""
CASES = (*KINDS, ALONE, STREAM, PACED)
