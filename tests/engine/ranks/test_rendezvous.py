"""The rendezvous of a group: joining, rejected ranks, timeouts, and the messages of a whole start."""

import socket
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
from typing_extensions import override

from engine.batch.step_plan import StepPlan
from engine.errors import GroupError, StoppedError
from engine.jobs import TokenOutput
from engine.ranks import messages, rendezvous
from engine.ranks.messages import (
    JoinMessage,
    LoadedMessage,
    RejectMessage,
    StartMessage,
    StepMessage,
    StopMessage,
    TokenChecksum,
)
from engine.ranks.rendezvous import RankLink, WaitContext
from machinery.clock import SystemClock
from schemas.wire.engine_config import GroupConfig
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(60)
JOIN = JoinMessage(rank=0, world_size=3, epoch=2, secret="s")
LOADED = LoadedMessage(
    rank=0, model="m", prefix_bytes=100, token_bytes=8, checkpoint_tokens=0, room=1.0
)
CLOCK = SystemClock()
WAIT = WaitContext(clock=CLOCK, pause=lambda _: None, is_stopping=lambda: False)
STOPPED = replace(WAIT, is_stopping=lambda: True)


def group(rank: int, port: int, *, size: int = 3, timeout_s: float = 20) -> GroupConfig:
    return GroupConfig(
        rank=rank,
        world_size=size,
        host="127.0.0.1",
        port=port,
        secret="s",
        epoch=2,
        timeout_s=timeout_s,
    )


def join_all(stack: ExitStack, size: int = 3) -> list[RankLink]:
    """Join all ranks of a group; return their links."""
    port, links = free_port(), {}

    def join(rank: int) -> None:
        links[rank] = rendezvous.join_group(group(rank, port, size=size), WAIT)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for link in links.values():
        channels = link.coordinator.channels if link.coordinator is not None else [link.channel]
        for channel in (*channels, *link.lifelines.values()):
            stack.enter_context(channel)
    return [links[rank] for rank in range(size)]


def test_a_group_joins_agrees_and_receives_every_step() -> None:
    with ExitStack() as stack:
        leader, *others = join_all(stack)
        assert leader.coordinator is not None
        assert sorted(leader.lifelines) == [1, 2]
        leader.start_connecting(WAIT)
        for rank, other in enumerate(others, 1):
            other.start_connecting(WAIT)
            assert other.channel is not None
            messages.send(other.channel, messages.encode(replace(LOADED, rank=rank)))
        assert [message.rank for message in leader.coordinator.receive_loaded(lambda: False)] == [
            1,
            2,
        ]
        leader.coordinator.send_start(StartMessage(prefix_bytes=40, token_bytes=None))
        leader.coordinator.send_plan(StepPlan(decodes=True))
        leader.coordinator.add_outputs([TokenOutput(job_id=1, token=2)])
        leader.coordinator.send_plan(StepPlan(decodes=True))
        leader.coordinator.close()
        checksum, plan = TokenChecksum(), StepPlan(decodes=True)
        checksum.add([TokenOutput(job_id=1, token=2)])
        for other in others:
            assert other.channel is not None
            got = [messages.decode(messages.receive(other.channel, 5) or b"") for _ in range(4)]
            assert got == [
                StartMessage(prefix_bytes=40, token_bytes=None),
                StepMessage(number=1, plan=plan, made=0),
                StepMessage(number=2, plan=plan, made=checksum.sum),
                StopMessage(),
            ]


@pytest.mark.parametrize(
    ("join", "reason"),
    [
        (replace(JOIN, rank=1, epoch=1), "it is of epoch 1, and the group is in epoch 2"),
        (replace(JOIN, rank=1, secret="\u00e9"), "its secret is not the group's"),
        (replace(JOIN, rank=3), "it is rank 3 of 3, and the group has ranks 1 to 2"),
        (replace(JOIN, rank=0), "it is rank 0 of 3"),
        (replace(JOIN, rank=1, world_size=2), "it is rank 1 of 2"),
        (replace(JOIN, rank=2), "rank 2 has joined already"),
        (None, ""),
    ],
    ids=["epoch", "secret", "rank", "zero", "size", "twice", "stranger"],
)
def test_a_process_outside_the_group_is_rejected(join: JoinMessage | None, reason: str) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = listener.getsockname()[:2]

        def send(*joins: JoinMessage) -> list[socket.socket]:
            sockets = [stack.enter_context(socket.create_connection(address)) for _ in joins]
            for channel, one in zip(sockets, joins, strict=True):
                messages.send(channel, messages.encode(one))
            return sockets

        send(replace(JOIN, rank=2), replace(JOIN, rank=2, is_lifeline=True))
        if join is None:
            odd = stack.enter_context(socket.create_connection(address))
            odd.sendall(b"GET / HTTP/1.1\r\n\r\n")
        else:
            (odd,) = send(join)
        send(replace(JOIN, rank=1), replace(JOIN, rank=1, is_lifeline=True))
        joined = rendezvous.accept_ranks(listener, JOIN, CLOCK, lambda: False, 20)
        assert (sorted(joined.channels), sorted(joined.lifelines)) == ([1, 2], [1, 2])
        joined.close()
        if join is None:
            with pytest.raises(GroupError):
                messages.receive(odd, 5)
            return
        answer = messages.decode(messages.receive(odd, 5) or b"")
        assert isinstance(answer, RejectMessage)
        assert answer.reason.startswith(reason)


def test_a_rejected_rank_raises_the_reason() -> None:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        newer = replace(JOIN, epoch=3)

        def accept() -> None:
            with pytest.raises(StoppedError):
                rendezvous.accept_ranks(listener, newer, CLOCK, stop.is_set, 20)

        thread = threading.Thread(target=accept)
        thread.start()
        link = rendezvous.join_group(group(1, listener.getsockname()[1]), WAIT)
        assert link.channel is not None
        with (
            link.channel,
            link.lifelines[0],
            pytest.raises(GroupError, match="rejected this rank: it is of epoch 2"),
        ):
            link.start_connecting(WAIT)
        stop.set()
        thread.join()


def test_rank_0_names_the_missing_ranks_and_can_be_stopped() -> None:
    with pytest.raises(GroupError, match=r"ranks \[1, 2\] did not come"):
        rendezvous.join_group(group(0, free_port(), timeout_s=0.05), WAIT)
    with pytest.raises(StoppedError):
        rendezvous.join_group(group(0, free_port()), STOPPED)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(GroupError, match="cannot listen to the other ranks"),
    ):
        rendezvous.join_group(group(0, taken.getsockname()[1]), WAIT)


def test_a_rank_without_a_leader_names_the_address() -> None:
    port = free_port()
    with pytest.raises(GroupError, match=f"not at 127.0.0.1:{port}"):
        rendezvous.join_group(group(1, port, timeout_s=0.05), WAIT)
    with pytest.raises(StoppedError):
        rendezvous.join_group(group(1, port), STOPPED)


def strange(address: tuple[str, int], data: bytes, stack: ExitStack) -> socket.socket:
    channel = stack.enter_context(socket.create_connection(address))
    channel.sendall(data)
    return channel


@pytest.mark.parametrize(
    "data",
    [b"", b"\0\0", (256 << 20).to_bytes(4, "big"), (4096).to_bytes(4, "big") + b"{" * 3000],
    ids=["silent", "half-a-length", "huge", "half-a-message"],
)
def test_strangers_do_not_delay_the_ranks(data: bytes) -> None:
    """One after another, each would have had seconds for each byte."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=200))
        address = listener.getsockname()[:2]
        crowd = [strange(address, data, stack) for _ in range(100)]
        for join in (JOIN, replace(JOIN, is_lifeline=True)):
            for rank in (1, 2):
                raw = messages.frame(messages.encode(replace(join, rank=rank)))
                strange(address, raw, stack)
        frozen = Ticks()
        joined = rendezvous.accept_ranks(listener, JOIN, frozen, lambda: False, 20)
        assert sorted(joined.channels) == sorted(joined.lifelines) == [1, 2]
        joined.close()
        for one in crowd[-3:]:
            one.settimeout(20)
            with suppress(ConnectionError):
                assert one.recv(1) == b""


class Ticks(SystemClock):
    """A clock that stands still: nothing may depend on the time of a stranger."""

    @override
    def monotonic(self) -> float:
        return 0.0


def test_a_stranger_that_sends_byte_by_byte_has_one_limit_for_all() -> None:
    stop = threading.Event()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        channel = strange(listener.getsockname()[:2], (4000).to_bytes(4, "big"), stack)

        def accept() -> None:
            with pytest.raises(StoppedError):
                rendezvous.accept_ranks(listener, JOIN, CLOCK, stop.is_set, 60)

        thread = threading.Thread(target=accept)
        thread.start()
        sent = 0
        with suppress(ConnectionError):
            while sent < 2000:
                channel.sendall(b"{")
                sent += 1
                stop.wait(0.02)
        stop.set()
        thread.join()
        assert sent < 2000
