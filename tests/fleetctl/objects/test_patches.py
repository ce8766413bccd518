"""Merge patches and JSON patches: the examples of their RFCs, and properties of all documents."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetctl.objects import patches
from fleetctl.objects.patches import PatchError
from manifests.trees import Tree, is_equal
from tests.support.fleetctl_manifests import SCALARS
from tests.support.sampling import samples

# RFC 7386, appendix A: document, patch, outcome.
MERGES = """
{"a":"b"} {"a":"c"} {"a":"c"}
{"a":"b"} {"b":"c"} {"a":"b","b":"c"}
{"a":"b"} {"a":null} {}
{"a":"b","b":"c"} {"a":null} {"b":"c"}
{"a":["b"]} {"a":"c"} {"a":"c"}
{"a":"c"} {"a":["b"]} {"a":["b"]}
{"a":{"b":"c"}} {"a":{"b":"d","c":null}} {"a":{"b":"d"}}
{"a":[{"b":"c"}]} {"a":[1]} {"a":[1]}
["a","b"] ["c","d"] ["c","d"]
{"a":"b"} ["c"] ["c"]
{"a":"foo"} null null
{"a":"foo"} "bar" "bar"
{"e":null} {"a":1} {"e":null,"a":1}
[1,2] {"a":"b","c":null} {"a":"b"}
{} {"a":{"bb":{"ccc":null}}} {"a":{"bb":{}}}
"""

# RFC 6902, appendix A: document, patch, outcome (A.1 to A.7, A.10, A.14, A.16).
PATCHES = """
{"foo":"bar"} [{"op":"add","path":"/baz","value":"qux"}] {"foo":"bar","baz":"qux"}
{"foo":["bar","baz"]} [{"op":"add","path":"/foo/1","value":"qux"}] {"foo":["bar","qux","baz"]}
{"baz":"qux","foo":"bar"} [{"op":"remove","path":"/baz"}] {"foo":"bar"}
{"foo":["bar","qux","baz"]} [{"op":"remove","path":"/foo/1"}] {"foo":["bar","baz"]}
{"baz":"qux"} [{"op":"replace","path":"/baz","value":"boo"}] {"baz":"boo"}
{"a":{"b":1},"c":{}} [{"op":"move","from":"/a/b","path":"/c/d"}] {"a":{},"c":{"d":1}}
{"a":[1,2,3,4]} [{"op":"move","from":"/a/1","path":"/a/3"}] {"a":[1,3,4,2]}
{"foo":"bar"} [{"op":"add","path":"/child","value":{"g":{}}}] {"foo":"bar","child":{"g":{}}}
{"/":9,"~1":10} [{"op":"test","path":"/~01","value":10}] {"/":9,"~1":10}
{"foo":["bar"]} [{"op":"add","path":"/foo/-","value":["abc"]}] {"foo":["bar",["abc"]]}
{"a":{"b":1}} [{"op":"copy","from":"/a","path":"/c"},{"op":"replace","path":"/c/b","value":2}] {"a":{"b":1},"c":{"b":2}}
{"a":1} [{"op":"replace","path":"","value":[2]}] [2]
{"a":1.0} [{"op":"test","path":"/a","value":1,"xyz":0}] {"a":1.0}
{"a":1} [{"op":"move","from":"/a","path":"/a"}] {"a":1}
"""


def table(text: str) -> list[tuple[Tree, Tree, Tree]]:
    rows = [line.split(" ") for line in text.strip().splitlines()]
    return [(json.loads(a), json.loads(b), json.loads(c)) for a, b, c in rows]


@pytest.mark.parametrize(("document", "patch", "outcome"), table(MERGES))
def test_merge_patches(document: Tree, patch: Tree, outcome: Tree) -> None:
    assert patches.apply_merge_patch(document, patch) == outcome


@pytest.mark.parametrize(("document", "patch", "outcome"), table(PATCHES))
def test_json_patches(document: Tree, patch: Tree, outcome: Tree) -> None:
    before = json.dumps(document)
    assert patches.apply_json_patch(document, patch) == outcome
    assert json.dumps(document) == before


DOCUMENT: Tree = {"spec": {"replicas": 2, "names": ["a", "b"], "on": True}}


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ({"op": "replace", "path": "/spec/replica", "value": 1},
         'operation 1 (replace /spec/replica): /spec has no "replica"; did you mean replicas?'),
        ({"op": "remove", "path": "/spec/names/2"},
         'operation 1 (remove /spec/names/2): /spec/names is a list of 2 items without index "2"; '
         'indexes start at 0, and "-" appends'),
        ({"op": "remove", "path": "/spec/names/-"}, 'without index "-"'),
        ({"op": "add", "path": "/spec/names/3", "value": 1}, 'without index "3"'),
        ({"op": "add", "path": "/spec/names/01", "value": 1}, 'without index "01"'),
        ({"op": "add", "path": "/spec/replicas/x", "value": 1}, "/spec/replicas is 2, which has no fields"),
        ({"op": "add", "path": "/x/y", "value": 1}, 'the object has no "x"'),
        ({"op": "add", "path": "spec.replicas", "value": 1}, "does not begin with a slash"),
        ({"op": "add", "path": "/a~2b", "value": 1}, 'has a single "~"; write ~0'),
        ({"op": "add", "path": 3, "value": 1}, "3 is not a path"),
        ({"op": "add", "path": "/spec/x"}, '"value" is missing'),
        ({"op": "move", "path": "/spec/names/0", "from": "/spec"}, "a value cannot be moved into itself"),
        ({"op": "copy", "path": "/x", "from": "/spec/z"}, '/spec has no "z"'),
        ({"op": "test", "path": "/spec/replicas", "value": 3}, "the value is 2, not 3; nothing was changed"),
        ({"op": "test", "path": "/spec/on", "value": 1}, "the value is true, not 1"),
        ({"op": "remove", "path": ""}, "the whole object cannot be removed"),
        ({"op": "put", "path": "/a"}, 'unknown "op" "put"; use one of add, remove, replace'),
        (["add"], "operation 1: not an operation"),
    ],
)  # fmt: skip
def test_operations_that_cannot_be_applied(operation: Tree, expected: str) -> None:
    with pytest.raises(PatchError) as caught:
        patches.apply_json_patch(DOCUMENT, [operation])
    assert expected in str(caught.value)


def test_a_json_patch_must_be_a_list() -> None:
    with pytest.raises(PatchError, match="a JSON patch is a list, such as"):
        patches.apply_json_patch(DOCUMENT, {"op": "remove", "path": "/spec"})


TREES: st.SearchStrategy[Tree] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["a", "b", "c/d", "e~f", ""]), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=samples(100), deadline=None)
@given(before=TREES, after=TREES)
def test_a_created_merge_patch_turns_one_document_into_the_other(before: Tree, after: Tree) -> None:
    assert is_equal(
        patches.apply_merge_patch(before, patches.create_merge_patch(before, after)), after
    )


def pointers(tree: Tree, path: str = "") -> list[str]:
    """Return pointers to everything in the tree, itself excepted."""
    found: list[str] = []
    if isinstance(tree, dict):
        for key, value in tree.items():
            inner = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
            found += [inner, *pointers(value, inner)]
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            found += [f"{path}/{index}", *pointers(value, f"{path}/{index}")]
    return found


@settings(max_examples=samples(100), deadline=None)
@given(tree=TREES, data=st.data())
def test_a_move_and_its_reverse_change_nothing(tree: Tree, data: st.DataObject) -> None:
    whole: Tree = {"in": tree, "out": {}}
    path = data.draw(st.sampled_from(["/in", *(f"/in{pointer}" for pointer in pointers(tree))]))
    there: Tree = [
        {"op": "copy", "from": path, "path": "/kept"},
        {"op": "move", "from": path, "path": "/out/x"},
        {"op": "add", "path": path, "value": "new"},
        {"op": "test", "path": path, "value": "new"},
        {"op": "remove", "path": path},
        {"op": "move", "from": "/out/x", "path": path},
        {"op": "remove", "path": "/kept"},
    ]
    assert is_equal(patches.apply_json_patch(whole, there), whole)
