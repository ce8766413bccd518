"""What ranks say to each other, and what happens to strangers, the silent, the late and the different."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest

from engine.batch.step_plan import PromptChunk, StepPlan
from engine.config import GroupConfig
from engine.errors import GroupError, StoppedError
from engine.jobs import Job, SamplingParams, TokenOutput
from engine.ranks import coordinator, messages, rendezvous
from engine.ranks.messages import (
    ConnectMessage,
    FailureMessage,
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
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(60)
JOIN = JoinMessage(rank=0, world_size=3, epoch=2, secret="s")
HELLO = LoadedMessage(rank=0, model="m", prefix_bytes=100, token_bytes=8, is_even=True, room=1.0)
CLOCK = SystemClock()
PATIENT = WaitContext(clock=CLOCK, pause=lambda _: None, is_stopping=lambda: False)
HASTY = replace(PATIENT, is_stopping=lambda: True)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


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


def test_a_step_arrives_as_it_was() -> None:
    sampling = SamplingParams(temperature=0.5, seed=-7, logit_bias=((3, 1.5),))
    job = Job(id=7, prompt=(1, 2), max_tokens=9, sampling=sampling, grammar="x\u00e9", emitted=(4,))
    plan = StepPlan(
        joins=(job,),
        leaves=(3,),
        decodes=True,
        chunks=(PromptChunk(job_id=7, count=5, is_last=True),),
        prefix_bytes=0,
        clears=True,
    )
    said: list[messages.RankMessage] = [
        StepMessage(number=3, plan=plan, made=9),
        StartMessage(prefix_bytes=5, token_bytes=None),
        StopMessage(),
    ]
    more: list[messages.RankMessage] = [
        *said,
        JOIN,
        HELLO,
        ConnectMessage(),
        RejectMessage(reason="no"),
        FailureMessage(reason="gone"),
    ]
    for word in more:
        assert messages.decode(messages.encode(word)) == word


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"kind":"step"}', b"\x80\x04.", b'{"kind":"no"}'])
def test_what_is_no_word_is_refused(raw: bytes) -> None:
    with pytest.raises(GroupError, match="no word of ranks"):
        messages.decode(raw)


def test_frames_come_whole_or_not_at_all(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    messages.send(one, b"abc")
    assert messages.receive(other, 1) == b"abc"
    assert messages.receive(other, 0.01) is None
    one.sendall((1 << 31).to_bytes(4, "big"))
    with pytest.raises(GroupError, match="at most"):
        messages.receive(other, 1)
    one.sendall(b"\0\0\0\5ab")
    one.close()
    with pytest.raises(GroupError, match="in the middle of a word"):
        messages.receive(other, 1)


def met(stack: ExitStack, size: int = 3) -> list[RankLink]:
    """Let all ranks of a group meet; return their links."""
    port, links = free_port(), {}

    def come(rank: int) -> None:
        links[rank] = rendezvous.join_group(group(rank, port, size=size), PATIENT)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for link in links.values():
        held = link.coordinator.channels if link.coordinator is not None else [link.channel]
        for channel in (*held, *link.lines.values()):
            stack.enter_context(channel)
    return [links[rank] for rank in range(size)]


def test_ranks_meet_agree_and_are_told_every_step() -> None:
    with ExitStack() as stack:
        lead, *others = met(stack)
        assert lead.coordinator is not None
        assert sorted(lead.lines) == [1, 2]
        lead.go(PATIENT)
        for rank, other in enumerate(others, 1):
            other.go(PATIENT)
            assert other.channel is not None
            messages.send(other.channel, messages.encode(replace(HELLO, rank=rank)))
        assert [hello.rank for hello in lead.coordinator.hellos(lambda: False)] == [1, 2]
        lead.coordinator.begin(StartMessage(prefix_bytes=40, token_bytes=None))
        lead.coordinator.tell(StepPlan(decodes=True))
        lead.coordinator.made([TokenOutput(job_id=1, token=2)])
        lead.coordinator.tell(StepPlan(decodes=True))
        lead.coordinator.close()
        tally, plan = TokenChecksum(), StepPlan(decodes=True)
        tally.add([TokenOutput(job_id=1, token=2)])
        for other in others:
            assert other.channel is not None
            got = [messages.decode(messages.receive(other.channel, 5) or b"") for _ in range(4)]
            assert got == [
                StartMessage(prefix_bytes=40, token_bytes=None),
                StepMessage(number=1, plan=plan, made=0),
                StepMessage(number=2, plan=plan, made=tally.sum),
                StopMessage(),
            ]


@pytest.mark.parametrize(
    ("join", "why"),
    [
        (replace(JOIN, rank=1, epoch=1), "it is of epoch 1, and the group is in epoch 2"),
        (replace(JOIN, rank=1, secret="\u00e9"), "its secret is not the group's"),
        (replace(JOIN, rank=3), "it is rank 3 of 3, and the group has ranks 1 to 2"),
        (replace(JOIN, rank=0), "it is rank 0 of 3"),
        (replace(JOIN, rank=1, world_size=2), "it is rank 1 of 2"),
        (replace(JOIN, rank=2), "rank 2 is here already"),
        (None, ""),
    ],
    ids=["epoch", "secret", "rank", "zero", "size", "twice", "stranger"],
)
def test_who_does_not_belong_is_turned_away(join: JoinMessage | None, why: str) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = listener.getsockname()[:2]

        def said(*joins: JoinMessage) -> list[socket.socket]:
            made = [stack.enter_context(socket.create_connection(address)) for _ in joins]
            for channel, one in zip(made, joins, strict=True):
                messages.send(channel, messages.encode(one))
            return made

        said(replace(JOIN, rank=2), replace(JOIN, rank=2, is_lifeline=True))
        if join is None:
            odd = stack.enter_context(socket.create_connection(address))
            odd.sendall(b"GET / HTTP/1.1\r\n\r\n")
        else:
            (odd,) = said(join)
        said(replace(JOIN, rank=1), replace(JOIN, rank=1, is_lifeline=True))
        found = rendezvous.accept_ranks(listener, JOIN, CLOCK, lambda: False, 20)
        assert (sorted(found.channels), sorted(found.lines)) == ([1, 2], [1, 2])
        found.close()
        if join is None:
            with pytest.raises(GroupError):
                messages.receive(odd, 5)
            return
        away = messages.decode(messages.receive(odd, 5) or b"")
        assert isinstance(away, RejectMessage)
        assert away.reason.startswith(why)


def test_who_is_turned_away_says_why() -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        newer = replace(JOIN, epoch=3)

        def gather() -> None:
            with pytest.raises(StoppedError):
                rendezvous.accept_ranks(listener, newer, CLOCK, over.is_set, 20)

        thread = threading.Thread(target=gather)
        thread.start()
        link = rendezvous.join_group(group(1, listener.getsockname()[1]), PATIENT)
        assert link.channel is not None
        with link.channel, link.lines[0], pytest.raises(GroupError, match="away: it is of epoch 2"):
            link.go(PATIENT)
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("others", "begin"),
    [
        (
            [{"prefix_bytes": 40}, {"prefix_bytes": 70}],
            StartMessage(prefix_bytes=40, token_bytes=None),
        ),
        ([{"token_bytes": 16}, {}], StartMessage(prefix_bytes=100, token_bytes=16)),
        ([{"token_bytes": 16, "is_even": False}], StartMessage(prefix_bytes=0, token_bytes=None)),
    ],
    ids=["the smallest", "unequal stages", "unequal stages that rotate"],
)
def test_what_all_ranks_agree_on(others: Sequence[dict[str, object]], begin: StartMessage) -> None:
    hellos = [HELLO, *(replace(HELLO, rank=1, **other) for other in others)]  # type: ignore[arg-type]
    assert coordinator.agree(hellos) == begin


def test_requests_get_what_has_room_on_every_rank() -> None:
    assert coordinator.smallest_kv_share([HELLO, replace(HELLO, room=0.25)]) == 0.25


def test_another_model_ends_the_group() -> None:
    with pytest.raises(GroupError, match="rank 1 has another model"):
        coordinator.agree([HELLO, replace(HELLO, rank=1, model="other")])


def test_rank_0_says_who_is_missing_and_can_be_stopped() -> None:
    with pytest.raises(GroupError, match=r"ranks \[1, 2\] did not come"):
        rendezvous.join_group(group(0, free_port(), timeout_s=0.05), PATIENT)
    with pytest.raises(StoppedError):
        rendezvous.join_group(group(0, free_port()), HASTY)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(GroupError, match="cannot listen to the other ranks"),
    ):
        rendezvous.join_group(group(0, taken.getsockname()[1]), PATIENT)


def test_a_rank_says_where_it_looked() -> None:
    port = free_port()
    with pytest.raises(GroupError, match=f"not at 127.0.0.1:{port}"):
        rendezvous.join_group(group(1, port, timeout_s=0.05), PATIENT)
    with pytest.raises(StoppedError):
        rendezvous.join_group(group(1, port), HASTY)


def test_a_lost_rank_is_noticed_when_it_is_told_something(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    one, other = pair
    made = coordinator.Coordinator(channels=[one])
    other.close()
    with pytest.raises(GroupError, match="rank 1 was lost"):
        made.tell(StepPlan(decodes=True))
