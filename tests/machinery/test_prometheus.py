"""Prometheus' text form: labels, buckets, and numbers in full."""

from machinery.prometheus import Counter, Gauge, Histogram, render

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
