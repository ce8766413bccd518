"""The peer monitor: which loss a rank notices, and the reason that it passes on."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from engine.ranks import messages
from engine.ranks.messages import (
    ConnectMessage,
    FailureMessage,
    RankMessage,
    RejectMessage,
    StopMessage,
)
from engine.ranks.peer_monitor import PeerMonitor

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def lifelines() -> Iterator[tuple[dict[int, socket.socket], dict[int, socket.socket]]]:
    """Return rank 0's ends of two lifelines, and the other ends."""
    with ExitStack() as stack:
        pairs = {rank: socket.socketpair() for rank in (1, 2)}
        for pair in pairs.values():
            for end in pair:
                stack.enter_context(end)
        yield (
            {rank: pair[0] for rank, pair in pairs.items()},
            {rank: pair[1] for rank, pair in pairs.items()},
        )


Ends = tuple[dict[int, socket.socket], dict[int, socket.socket]]


def send(end: socket.socket, message: RankMessage) -> None:
    messages.send(end, messages.encode(message))


def receive(end: socket.socket) -> RankMessage:
    return messages.decode(messages.receive(end, 5) or b"")


async def test_the_death_of_a_rank_is_noticed_and_passed_on(lifelines: Ends) -> None:
    ours, theirs = lifelines
    monitor = PeerMonitor(0)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(monitor.watch())
        monitor.set_lifelines(ours)
        theirs[2].close()
        loss = await watching
    assert loss == "rank 2 was lost: its connection closed without a reason"
    await monitor.close(loss)
    assert receive(theirs[1]) == FailureMessage(reason=loss)


@pytest.mark.parametrize(
    ("message", "loss"),
    [
        (FailureMessage(reason="rank 1: no space"), "rank 1: no space"),
        (StopMessage(), "rank 1 was asked to end"),
        (RejectMessage(reason="no"), "rank 1 rejected this rank: no"),
        (ConnectMessage(), "rank 1 sent 'go' on its lifeline"),
    ],
)
async def test_the_last_message_of_a_rank_is_explained(
    lifelines: Ends, message: RankMessage, loss: str
) -> None:
    ours, theirs = lifelines
    monitor = PeerMonitor(0)
    monitor.set_lifelines(ours)
    send(theirs[1], message)
    assert await monitor.watch() == loss


async def test_invalid_bytes_count_as_a_loss(lifelines: Ends) -> None:
    ours, theirs = lifelines
    monitor = PeerMonitor(0)
    monitor.set_lifelines(ours)
    theirs[1].sendall(b"GET / HTTP/1.1\r\n")
    assert await monitor.watch() == (
        "rank 1 was lost: it announced a message of 1195725856 bytes on its lifeline"
    )


async def test_the_end_of_a_released_rank_is_no_loss(lifelines: Ends) -> None:
    ours, theirs = lifelines
    monitor = PeerMonitor(0)
    monitor.set_lifelines(ours)
    monitor.is_parting = True
    send(theirs[1], StopMessage())
    send(theirs[2], FailureMessage(reason="rank 2: it broke"))
    assert await monitor.watch() == "rank 2: it broke"
    other = PeerMonitor(1)
    other.set_lifelines({0: theirs[1]})
    await monitor.close(None)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(other.watch())
        with pytest.raises(TimeoutError):
            # Rank 0 releases its worker on the other channel, and that ends the process.
            await asyncio.wait_for(asyncio.shield(watching), 0.05)
        other.note_failure()
        assert await watching is None


@pytest.mark.parametrize("is_sent", [True, False])
async def test_a_failed_rank_waits_for_the_reason_of_another(
    lifelines: Ends, *, is_sent: bool
) -> None:
    ours, theirs = lifelines
    other = PeerMonitor(1)
    other.set_lifelines({0: theirs[1]})
    other.note_failure()
    if is_sent:
        send(ours[1], FailureMessage(reason="rank 2 was lost"))
    assert await other.watch() == ("rank 2 was lost" if is_sent else None)
    await other.close("no space")
    assert receive(ours[1]) == FailureMessage(reason="rank 1: no space")


async def test_a_failure_before_the_rendezvous_is_the_ranks_own() -> None:
    monitor = PeerMonitor(1)
    monitor.note_failure()
    assert await monitor.watch() is None
    await monitor.close("nobody came")
