"""Lines of a log that arrives in pieces: whole, filtered, and bounded."""

import orjson
from hypothesis import given
from hypothesis import strategies as st

from insight.logs import LineFilter, LineReader, LogRange


def read(reader: LineReader, *pieces: bytes) -> list[bytes]:
    return [line for piece in pieces for line in reader.add(piece)] + reader.end()


@given(st.lists(st.binary(max_size=6).map(lambda one: one.replace(b"\r", b"\n")), max_size=8))
def test_the_cuts_between_pieces_change_nothing(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    lines = whole.split(b"\n")
    expected = lines[:-1] + ([lines[-1]] if lines[-1] else [])
    assert read(LineReader(), *pieces) == expected


def test_a_text_is_found_in_any_case_of_letters() -> None:
    wanted = LineFilter(text="Größe")
    lines = "eine GRÖSSE\neine GRÖßE\nno such\nlast größe".encode()
    assert read(LineReader(wanted), lines) == ["eine GRÖßE".encode(), "last größe".encode()]


def test_lines_about_a_name_that_have_a_text() -> None:
    about = [
        orjson.dumps({"message": message, "key": key})
        for message, key in (
            ("placed", "ModelDeployment/qwen"),
            ("placed", "ModelDeployment/qwen-2"),
            ("scaled", "ModelDeployment/qwen"),
        )
    ]
    log = b"\n".join((*about, b"placed qwen, says a library", b'{"message": "placed qwen"'))
    assert read(LineReader(LineFilter(about="qwen")), log) == [about[0], about[2]]
    assert read(LineReader(LineFilter(about="qwen", text="PLACED")), log) == [about[0]]


def test_an_endless_line_is_passed_on_in_parts() -> None:
    reader = LineReader(max_line_bytes=10)
    assert reader.add(b"x" * 8) == []
    assert reader.add(b"y" * 8) == [b"x" * 8 + b"y" * 8]
    assert read(reader, b"z\nlast") == [b"z", b"last"]


def test_parameters_are_those_that_were_chosen() -> None:
    assert LogRange().params() == {}
    chosen = LogRange(tail=0, since="5m", is_followed=True)
    assert chosen.params() == {"tail": "0", "since": "5m", "follow": "true"}
