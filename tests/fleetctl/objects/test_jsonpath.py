r"""kubectl's JSONPath: what it finds, and what is said of what is none.

The table of what it finds is that of kubectl's documentation (kubernetes.io/docs/reference/kubectl/jsonpath),
with a fleet's objects in it.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import jsonpath

TREE = {
    "kind": "List",
    "items": [
        {
            "kind": "Node",
            "metadata": {"name": "mac-1", "labels": {"lab.io/rack": "7"}},
            "status": {"memoryBytes": 64, "conditions": [{"type": "Ready", "status": "True"}]},
        },
        {
            "kind": "Node",
            "metadata": {"name": "mac-2", "labels": {}},
            "spec": {"unschedulable": True},
            "status": {"memoryBytes": 128, "conditions": [{"type": "Ready", "status": "False"}]},
        },
    ],
}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("kind is {.kind}", "kind is List"),
        ("{.kind}{'\\n'}", "List\n"),
        ("{['kind']}", "List"),
        ("{$.kind} {@.kind}", "List List"),
        ("{..name}", "mac-1 mac-2"),
        ("{.items[*].metadata.name}", "mac-1 mac-2"),
        ("{.items.*.metadata.name}", "mac-1 mac-2"),
        ("{.items[0].metadata.name}", "mac-1"),
        ("{.items[-1].metadata.name}", "mac-2"),
        ("{.items[-1:].metadata.name}", "mac-2"),
        ("{.items[0:2].metadata.name}", "mac-1 mac-2"),
        ("{.items[::2].metadata.name}", "mac-1"),
        ("{.items[0,1].metadata.name}", "mac-1 mac-2"),
        ("{.items[0]['kind','metadata'].name}", "mac-1"),
        ("{.items[*]['metadata.name']}", ""),
        ("{.items[?(@.status.memoryBytes>64)].metadata.name}", "mac-2"),
        ("{.items[?(@.status.memoryBytes <= 64)].metadata.name}", "mac-1"),
        ("{.items[?(@.spec.unschedulable==true)].metadata.name}", "mac-2"),
        ("{.items[?(@.spec)].metadata.name}", "mac-2"),
        ("{.items[?(@.kind>3)].metadata.name}", ""),
        ("{.items[?(@.metadata.name!='mac-1')].metadata.name}", "mac-2"),
        ('{.items[*].status.conditions[?(@.type=="Ready")].status}', "True False"),
        (r"{.items[0].metadata.labels.lab\.io/rack}", "7"),
        ("{.items[0].metadata.labels['lab.io/rack']}", "7"),
        ("{.items[0].metadata.labels}", '{"lab.io/rack":"7"}'),
        ("{.items[1].spec.unschedulable}", "true"),
        ('{range .items[*]}{.metadata.name}{"\\t"}{.status.memoryBytes}{"\\n"}{end}', "mac-1\t64\nmac-2\t128\n"),
        ("{range .items[*]}{range .status.conditions[*]}{.type},{end};{end}", "Ready,;Ready,;"),
        ("{range .items[*]}[{$.kind}]{end}", "[List][List]"),
        ("{.nobody.home[3]}", ""),
        ("{.kind.}", "List"),
        ("no path", "no path"),
        ("", ""),
    ],
)  # fmt: skip
def test_templates(template: str, expected: str) -> None:
    assert jsonpath.parse(template).text(TREE) == expected


@pytest.mark.parametrize(
    ("template", "reason", "place"),
    [
        ("{", "expected }", 2),
        ("{.a", "expected }", 4),
        ("{.a[}", "expected a number", 5),
        ("{.a[0}", "expected ]", 6),
        ("{.a[1:2:0]}", "step of a slice", 10),
        ("{.a[?(@.b)}", r"expected \)\]", 11),
        ("{.a[?@.b]}", r"expected \( after", 6),
        ("{range .a}", "has no {end}", 11),
        ("{end}", "{end} without a range", 6),
        ("{name}", "write .name for a field", 2),
        ("{range .a}" * 60, "more than 50 nested ranges", 511),
    ],
)
def test_invalid_templates_report_the_position(template: str, reason: str, place: int) -> None:
    with pytest.raises(FleetctlError, match=rf"{reason}.*\(at character {place}\)"):
        jsonpath.parse(template)


@pytest.mark.parametrize(
    ("template", "index", "length"),
    [
        ("{.items[2].metadata.name}", 2, 2),
        ("{.items[-3].metadata.name}", -1, 2),
        ("{.items[0:5].metadata.name}", 4, 2),
        ("{.empty[0]}", 0, 0),
        ("{.empty[-1]}", -1, 0),
    ],
)
def test_indexes_out_of_bounds_are_errors_as_in_kubectl(
    template: str, index: int, length: int
) -> None:
    tree = {**TREE, "empty": []}
    with pytest.raises(FleetctlError, match=rf"out of bounds: index {index}, length {length}$"):
        jsonpath.parse(template).text(tree)
    assert jsonpath.parse("{.empty[*]}{.empty[0:0]}{.empty[:]}").text(tree) == ""


def test_single_paths_ignore_indexes_out_of_bounds() -> None:
    assert jsonpath.parse_path(".items[7].metadata.name").find(TREE) == []


@pytest.mark.parametrize(
    "text", ["{.metadata.name}", ".metadata.name", "metadata.name", "$.metadata.name"]
)
def test_spellings_of_a_path(text: str) -> None:
    assert jsonpath.parse_path(text).find(TREE["items"][0]) == ["mac-1"]


@pytest.mark.parametrize("text", [".a b", ".a}", "a[0"])
def test_invalid_paths_are_errors(text: str) -> None:
    with pytest.raises(FleetctlError, match="at character"):
        jsonpath.parse_path(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(name=st.text(min_size=1), value=json_values)
def test_every_field_name_can_be_written(name: str, value: Any) -> None:
    quoted = "'" + name.replace("\\", "\\\\").replace("'", "\\'") + "'"
    assert jsonpath.parse_path(f"[{quoted}]").find({name: value}) == [value]


@given(text=st.text(alphabet="{}[]().@$*?,:'\"\\ab01-<>=! \n") | st.text())
def test_every_text_is_a_template_or_an_error(text: str) -> None:
    try:
        template = jsonpath.parse(text)
    except FleetctlError as error:
        assert "at character" in str(error)  # noqa: PT017 - the error is one of two good ends
    else:
        try:
            assert isinstance(template.text(TREE), str)
        except FleetctlError as error:
            assert "array index out of bounds" in str(error)  # noqa: PT017 - as above


@given(value=json_values)
def test_the_root_is_printed_as_json(value: Any) -> None:
    text = jsonpath.parse("{@}").text(value)
    assert text == (value if isinstance(value, str) else "" if value is None else text)
    if not isinstance(value, str) and value is not None:
        assert json.loads(text) == value
