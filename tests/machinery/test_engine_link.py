"""Frames of the engine link: whole however they are cut, bounded, and refused where they cannot be frames."""

import random
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery import engine_link
from machinery.engine_link import (
    EngineGauges,
    Failure,
    FrameReader,
    LinkError,
    RequestHead,
    ResumeRecord,
    ResumeStart,
    StatusHead,
)

LIMIT = 1000
FRAMES = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 255), st.binary(max_size=LIMIT)),
    max_size=12,
)


def encoded(frames: list[tuple[int, int, bytes]]) -> bytes:
    return b"".join(engine_link.frame(*frame) for frame in frames)


@given(frames=FRAMES, cuts=st.lists(st.integers(0, 13_000), max_size=20))
def test_frames_are_the_same_however_they_are_cut(
    frames: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    data, reader = encoded(frames), FrameReader(LIMIT)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    read = [frame for a, b in pairwise(places) for frame in reader.feed(data[a:b])]
    assert read == frames


def test_a_frame_above_the_limit_is_refused_by_its_header() -> None:
    data = engine_link.frame(1, engine_link.EVENTS, b"x" * (LIMIT + 1))
    with pytest.raises(LinkError, match="a frame of 1001 bytes; at most 1000 are accepted"):
        FrameReader(LIMIT).feed(data[: engine_link.HEADER_BYTES])


@given(
    head=st.builds(
        RequestHead,
        method=st.sampled_from(("GET", "POST")),
        path=st.text(max_size=40),
        lines=st.binary(max_size=200),
        body_bytes=st.integers(0, 2**40),
    ),
    body=st.binary(max_size=200),
)
def test_a_request_is_read_as_it_was_written(head: RequestHead, body: bytes) -> None:
    payload = engine_link.encode_request(head, memoryview(body))
    assert engine_link.decode_request(payload) == (head, body)


def test_heads_are_read_as_they_were_written() -> None:
    status = StatusHead(503, engine_link.header_lines([(b"a", b"b: c"), (b"d", b"")]))
    assert engine_link.decode_status(engine_link.encode_head(status)) == status
    assert engine_link.split_lines(status.lines) == [(b"a", b"b: c"), (b"d", b"")]
    gauges = EngineGauges("m-0", True, 3, 0, 0.5, None)
    assert engine_link.decode_gauges(engine_link.encode_head(gauges)) == gauges
    assert engine_link.decode_window(engine_link.encode_window(7)) == 7


def test_headers_that_fill_a_frame_are_refused_before_they_are_sent() -> None:
    with pytest.raises(LinkError, match="too large"):
        engine_link.encode_request(RequestHead("POST", "/", b"x" * 70_000, 0), b"")


@given(record=st.binary(max_size=200), events=st.binary(max_size=200), cut=st.integers(0, 203))
def test_a_record_is_split_from_its_events(record: bytes, events: bytes, cut: int) -> None:
    payload = engine_link.encode_recorded(record, events)
    assert engine_link.split_recorded(payload) == (record, events)
    if cut < len(record) + 4:
        with pytest.raises(LinkError, match="shorter than its record"):
            engine_link.split_recorded(payload[:cut])


def test_records_are_read_one_behind_the_other() -> None:
    start = ResumeStart(-7, "9c11", "chatcmpl-1", 1_700_000_000, 11, 4)
    records = [
        ResumeRecord({}, start),
        *[ResumeRecord({0: [token], 2: [1, 2]}) for token in range(300)],
        ResumeRecord({1: [5]}, finished=[1, 0], output_tokens=901, events=7),
    ]
    raw = b"".join(map(engine_link.encode_head, records))
    assert engine_link.decode_records(raw, len(records)) == records
    for invalid, count in ((raw, 1), (raw[:-1], len(records)), (b"\x91\x80", 2), (b"\x90", 1)):
        with pytest.raises(LinkError, match="invalid resume records"):
            engine_link.decode_records(invalid, count)


def decode_record(payload: bytes) -> object:
    return engine_link.decode_records(payload, 1)


DECODERS = (
    decode_record,
    engine_link.decode_failure,
    engine_link.split_recorded,
    engine_link.decode_request,
    engine_link.decode_status,
    engine_link.decode_gauges,
    engine_link.decode_window,
)


def hostile_frames(count: int, seed: int) -> int:
    """Feed random frames in random pieces, with some bytes wrong; return the number of frames that were read."""
    draw, read = random.Random(seed), 0
    valid = [
        engine_link.encode_request(RequestHead("POST", "/v1/x", b"a: b\r\n", 3), b"abc"),
        engine_link.encode_head(StatusHead(200, b"a: b\r\n")),
        engine_link.encode_head(EngineGauges("m-0", True, 1, 2, 0.5, 0.25)),
        engine_link.encode_window(5),
        engine_link.encode_head(Failure("no", b"data: {}\n\n")),
        engine_link.encode_head(ResumeRecord({0: [1, 2]}, ResumeStart(1, "a", "b", 2, 3, 4))),
        engine_link.encode_recorded(b"ab", b"cd"),
    ]
    reader, fed = FrameReader(LIMIT), 0
    while fed < count:
        payload = bytearray(draw.choice(valid) if draw.random() < 0.5 else draw.randbytes(40))
        if draw.random() < 0.5:
            payload[draw.randrange(len(payload))] = draw.randrange(256)
        data = bytearray(
            engine_link.frame(draw.getrandbits(32), draw.randrange(256), bytes(payload))
        )
        if draw.random() < 0.01:
            data[draw.randrange(len(data))] = draw.randrange(256)
        fed += 1
        cut = draw.randrange(len(data))
        try:
            frames = [*reader.feed(bytes(data[:cut])), *reader.feed(bytes(data[cut:]))]
        except LinkError:
            reader = FrameReader(LIMIT)
            continue
        for _, kind, body in frames:
            read += 1
            try:
                DECODERS[kind % len(DECODERS)](body)
            except LinkError:
                continue
    return read


@pytest.mark.parametrize(
    "count", [3_000, pytest.param(1_000_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_hostile_frames_cost_little_and_raise_one_error(count: int) -> None:
    tracemalloc.start()
    try:
        read = hostile_frames(count, seed=count)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read > count / 4
    assert peak < 1 << 20
