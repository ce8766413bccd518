"""Who noticed what, and said what, when a rank ended."""

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
def lines() -> Iterator[tuple[dict[int, socket.socket], dict[int, socket.socket]]]:
    """Give rank 0's ends of two lifelines, and the other ends."""
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


def say(end: socket.socket, word: RankMessage) -> None:
    messages.send(end, messages.encode(word))


def heard(end: socket.socket) -> RankMessage:
    return messages.decode(messages.receive(end, 5) or b"")


async def test_a_death_is_noticed_and_passed_on(lines: Ends) -> None:
    ours, theirs = lines
    mine = PeerMonitor(0)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(mine.watch())
        mine.met(ours)
        theirs[2].close()
        loss = await watching
    assert loss == "rank 2 was lost: its connection closed without a word"
    await mine.close(loss)
    assert heard(theirs[1]) == FailureMessage(reason=loss)


@pytest.mark.parametrize(
    ("word", "loss"),
    [
        (FailureMessage(reason="rank 1: no space"), "rank 1: no space"),
        (StopMessage(), "rank 1 was asked to end"),
        (RejectMessage(reason="no"), "rank 1 turned this rank away: no"),
        (ConnectMessage(), "rank 1 said go on its lifeline"),
    ],
)
async def test_what_a_last_word_means(lines: Ends, word: RankMessage, loss: str) -> None:
    ours, theirs = lines
    mine = PeerMonitor(0)
    mine.met(ours)
    say(theirs[1], word)
    assert await mine.watch() == loss


async def test_noise_is_a_loss(lines: Ends) -> None:
    ours, theirs = lines
    mine = PeerMonitor(0)
    mine.met(ours)
    theirs[1].sendall(b"GET / HTTP/1.1\r\n")
    assert await mine.watch() == "rank 1 was lost: a last word of 1195725856 bytes is announced"


async def test_who_is_let_go_is_no_loss(lines: Ends) -> None:
    ours, theirs = lines
    mine = PeerMonitor(0)
    mine.met(ours)
    mine.is_parting = True
    say(theirs[1], StopMessage())
    say(theirs[2], FailureMessage(reason="rank 2: it broke"))
    assert await mine.watch() == "rank 2: it broke"
    other = PeerMonitor(1)
    other.met({0: theirs[1]})
    await mine.close(None)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(other.watch())
        with pytest.raises(TimeoutError):
            # Its worker is let go by rank 0, and ends the process.
            await asyncio.wait_for(asyncio.shield(watching), 0.05)
        other.failed()
        assert await watching is None


@pytest.mark.parametrize("is_told", [True, False])
async def test_who_fails_asks_who_is_to_blame(lines: Ends, *, is_told: bool) -> None:
    ours, theirs = lines
    other = PeerMonitor(1)
    other.met({0: theirs[1]})
    other.failed()
    if is_told:
        say(ours[1], FailureMessage(reason="rank 2 was lost"))
    assert await other.watch() == ("rank 2 was lost" if is_told else None)
    await other.close("no space")
    assert heard(ours[1]) == FailureMessage(reason="rank 1: no space")


async def test_who_fails_before_it_met_anybody_is_to_blame_itself() -> None:
    mine = PeerMonitor(1)
    mine.failed()
    assert await mine.watch() is None
    await mine.close("nobody came")
