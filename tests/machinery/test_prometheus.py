"""Prometheus' text format: labels, buckets, full numbers, and the parser."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery.prometheus import (
    Counter,
    Gauge,
    Histogram,
    Sample,
    build_info,
    parse_samples,
    render,
)
from machinery.version import version

BOUNDS = (0.005, 0.01, 300.0)


def test_histograms_and_labels() -> None:
    histogram = Histogram("h", "help", (), bounds=BOUNDS)
    for seconds in (0.005, 0.006, 1000.0):
        histogram.observe(seconds)
    lines = list(histogram.lines())
    assert 'h_bucket{le="0.005"} 1' in lines
    assert 'h_bucket{le="0.01"} 2' in lines
    assert 'h_bucket{le="300"} 2' in lines
    assert 'h_bucket{le="+Inf"} 3' in lines
    counter = Counter("c", "help", ("a",))
    counter.add('x"\\\n')
    assert list(counter.lines())[-1] == 'c{a="x\\"\\\\\\n"} 1'


def test_the_release_of_a_process_is_a_label() -> None:
    (sample,) = parse_samples(render([build_info("engine")]))
    assert sample == Sample("fleet_build_info", {"process": "engine", "version": version()}, "1")


def test_large_numbers_keep_their_digits() -> None:
    counter = Counter("c", "help")
    counter.add(count=123_456_789)
    gauge = Gauge("g", "help", lambda: 12_345_678_901, "counter")
    assert render((counter, gauge)).splitlines() == [
        "# HELP c help",
        "# TYPE c counter",
        "c 123456789",
        "# HELP g help",
        "# TYPE g counter",
        "g 12345678901",
    ]


@pytest.mark.parametrize(("text", "expected"), [
    pytest.param("a 1\n", [Sample("a", {}, "1")], id="bare"),
    pytest.param('a{b="c"} 1', [Sample("a", {"b": "c"}, "1")], id="one-label"),
    pytest.param('a{b="c",d="e"} 1 17', [Sample("a", {"b": "c", "d": "e"}, "1")], id="time"),
    pytest.param('a{b="x\\"\\\\\\n"} 1', [Sample("a", {"b": 'x"\\\n'}, "1")], id="escapes"),
    pytest.param("# HELP a b\n# TYPE a gauge\n\nwords that are no sample\n", [], id="other-lines"),
    pytest.param("a nan\n", [Sample("a", {}, "nan")], id="values-stay-text"),
])  # fmt: skip
def test_samples_are_parsed(text: str, expected: list[Sample]) -> None:
    assert list(parse_samples(text)) == expected


def test_samples_of_other_names_are_skipped() -> None:
    assert list(parse_samples("a 1\nb 2\na_total 3\n", {"a"})) == [Sample("a", {}, "1")]


@given(st.text(max_size=200))
def test_any_text_can_be_parsed(text: str) -> None:
    assert all(sample.name for sample in parse_samples(text))


def test_what_is_rendered_is_parsed() -> None:
    counter = Counter("requests_total", "Requests.", ("outcome",))
    counter.add('a "quoted"\nline', count=3)
    (sample,) = parse_samples(render([counter]))
    assert sample == Sample("requests_total", {"outcome": 'a "quoted"\nline'}, "3")
