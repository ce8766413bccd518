"""Frames of WebSockets: messages in any pieces, and what no client may send."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wsproto.frame_protocol import Opcode

from machinery.websocket_frames import FrameError, ServerFrames, switching_protocols


def client_frame(opcode: int, payload: bytes, *, is_last: bool = True) -> bytes:
    """Return a masked frame, as clients send it."""
    mask, size = b"\x01\xfe\x7f\x80", len(payload)
    first = (0x80 if is_last else 0) | opcode
    if size < 126:
        head = struct.pack("!BB", first, 0x80 | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", first, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", first, 0x80 | 127, size)
    return head + mask + bytes(one ^ mask[at % 4] for at, one in enumerate(payload))


@given(
    st.lists(st.text(max_size=300).map(str.encode) | st.just(b"x" * 70_000), max_size=4),
    st.lists(st.integers(1, 100_000), max_size=8),
)
def test_messages_arrive_whole_in_any_pieces(messages: list[bytes], cuts: list[int]) -> None:
    data = b"".join(client_frame(Opcode.TEXT, message) for message in messages)
    reader = ServerFrames(100_000)
    found: list[tuple[int, bytes]] = []
    for cut in (*cuts, len(data)):
        found += reader.feed(data[:cut])
        data = data[cut:]
    found += reader.feed(data)
    assert found == [(Opcode.TEXT, message) for message in messages]
    assert reader.held_bytes == 0


def test_a_message_in_parts_with_a_ping_between() -> None:
    reader = ServerFrames(100)
    data = (
        client_frame(Opcode.TEXT, b"he", is_last=False)
        + client_frame(Opcode.PING, b"?")
        + client_frame(Opcode.CONTINUATION, b"llo")
    )
    assert list(reader.feed(data)) == [
        (Opcode.CONTINUATION, b""),
        (Opcode.PING, b"?"),
        (Opcode.TEXT, b"hello"),
    ]


@pytest.mark.parametrize(("data", "code"), [
    (b"\x81\x01x", 1002),  # without a mask
    (b"\xc1\x81mask.", 1002),  # compressed
    (b"\x83\x80mask", 1002),  # an unknown kind
    (b"\x09\x80mask", 1002),  # a ping in parts
    (b"\x89\xfe\x00\x80mask", 1002),  # a long ping
    (client_frame(Opcode.CONTINUATION, b"x"), 1002),  # without a beginning
    (client_frame(Opcode.TEXT, b"a", is_last=False) + client_frame(Opcode.TEXT, b"b"), 1002),
    (client_frame(Opcode.TEXT, b"x" * 101), 1009),
    (b"\x81\xff" + b"\xff" * 8, 1002),  # a length beyond the protocol's
    (client_frame(Opcode.TEXT, b"\xff"), 1007),  # no UTF-8
    (client_frame(Opcode.TEXT, b"x" * 60, is_last=False) + client_frame(0, b"x" * 60), 1009),
])  # fmt: skip
def test_what_no_client_may_send(data: bytes, code: int) -> None:
    with pytest.raises(FrameError) as error:
        list(ServerFrames(100).feed(data))
    assert error.value.code == code


def test_the_answer_to_a_handshake() -> None:
    # The example of RFC 6455, section 1.3.
    answer = switching_protocols(b"dGhlIHNhbXBsZSBub25jZQ==")
    assert b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in answer
