"""Messages between ranks: encoding, framing and invalid input."""

import socket
from collections.abc import Iterator

import pytest

from engine.batch.step_plan import PromptChunk, StepPlan
from engine.errors import GroupError
from engine.jobs import Job, SamplingParams
from engine.ranks import messages
from engine.ranks.messages import (
    ConnectMessage,
    FailureMessage,
    JoinMessage,
    LoadedMessage,
    RejectMessage,
    StartMessage,
    StepMessage,
    StopMessage,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_every_message_survives_encoding() -> None:
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
    every: list[messages.RankMessage] = [
        StepMessage(number=3, plan=plan, made=9),
        StartMessage(prefix_bytes=5, token_bytes=None),
        StopMessage(),
        JoinMessage(rank=0, world_size=3, epoch=2, secret="s"),
        LoadedMessage(
            rank=0, model="m", prefix_bytes=100, token_bytes=8, checkpoint_tokens=0, room=1.0
        ),
        ConnectMessage(),
        RejectMessage(reason="no"),
        FailureMessage(reason="gone"),
    ]
    for message in every:
        assert messages.decode(messages.encode(message)) == message


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"kind":"step"}', b"\x80\x04.", b'{"kind":"no"}'])
def test_an_invalid_message_is_refused(raw: bytes) -> None:
    with pytest.raises(GroupError, match="invalid message between ranks"):
        messages.decode(raw)


def test_a_frame_arrives_completely_or_raises(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    messages.send(one, b"abc")
    assert messages.receive(other, 1) == b"abc"
    assert messages.receive(other, 0.01) is None
    one.sendall((1 << 31).to_bytes(4, "big"))
    with pytest.raises(GroupError, match="the limit is"):
        messages.receive(other, 1)
    one.sendall(b"\0\0\0\5ab")
    one.close()
    with pytest.raises(GroupError, match="in the middle of a message"):
        messages.receive(other, 1)
