"""Tests of `bench.curves`: the picture shows the figures of a result, and is well-formed XML."""

import xml.etree.ElementTree as ET

from bench.curves import Panel, draw, panels

RESULT = {
    "bench": "scale",
    "nodes_50_binds_per_s": 300,
    "nodes_50_cpu_ms_per_replica": {"reconciler": 1.0, "etcd": 0.5},
    "nodes_500_binds_per_s": 600,
    "nodes_500_cpu_ms_per_replica": {"reconciler": 2.0, "etcd": 0.5},
    "nodes_500_first_look_s": None,
}


def test_a_picture_has_a_point_for_each_figure() -> None:
    found = panels(RESULT)
    assert found[0].curves["reconciler"] == [(50, 1.0), (500, 2.0)]
    assert found[2].curves["binds"] == [(50, 300.0), (500, 600.0)]
    assert found[3].curves["first look"] == []
    tree = ET.fromstring(draw(found))
    circles = tree.findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 6
    # The largest value is at the top of its panel, half of it in the middle, further to the left.
    low, high = circles[0].attrib, circles[1].attrib
    assert (float(low["cx"]), float(high["cx"])) == (44, 284)
    assert float(high["cy"]) < float(low["cy"])


def test_figures_that_are_missing_are_named() -> None:
    picture = draw([Panel(title="a < b", curves={"c": []})])
    assert "not measured" in picture
    assert "a &lt; b" in picture
    ET.fromstring(picture)
