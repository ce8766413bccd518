"""Comments of YAML: which field they belong to, and that they stay with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.yaml import comments, parser
from manifests.yaml.comments import FieldComments

TEXT = """\
# of the file
# and its team
apiVersion: v1  # the only one
spec:
  # how many
  replicas: 2 # two
  text: "no # comment"   # after a text
  url: http://host/#anchor
  block: | # of the sign
    # no comment
    text
  nodes:
  # the fast one
  - name: mac-1  # in the lab
    priority: 5
  # the slow one
  - name: mac-2
  flow: {a: 1, b: [2, 3]} # of the last
# at the end
"""


def read(text: str) -> comments.DocumentComments:
    [document_comments] = comments.read_comments(text, parser.parse(text, "").documents)
    return document_comments


def test_comments_belong_to_the_field_below_or_on_their_line() -> None:
    document_comments = read(TEXT)
    assert document_comments.fields == {
        ("apiVersion",): FieldComments(
            above=(" of the file", " and its team"), beside=" the only one"
        ),
        ("spec", "replicas"): FieldComments(above=(" how many",), beside=" two"),
        ("spec", "text"): FieldComments(beside=" after a text"),
        ("spec", "block"): FieldComments(beside=" of the sign"),
        ("spec", "nodes", 0): FieldComments(above=(" the fast one",)),
        ("spec", "nodes", 0, "name"): FieldComments(beside=" in the lab"),
        ("spec", "nodes", 1): FieldComments(above=(" the slow one",)),
        ("spec", "flow", "b", 1): FieldComments(beside=" of the last"),
    }
    assert document_comments.end == (" at the end",)


def test_documents_have_their_own() -> None:
    text = "# one\na: 1\n# end of one\n---\n# two\nb: 2\n"
    first, second = comments.read_comments(text, parser.parse(text, "").documents)
    assert first.fields == {("a",): FieldComments(above=(" one",))}
    assert first.end == (" end of one",)
    assert second.fields == {("b",): FieldComments(above=(" two",))}


def test_changed_values_and_reordered_items_keep_them() -> None:
    new = parser.dump(
        {
            "apiVersion": "v1",
            "spec": {
                "replicas": 5,
                "nodes": [{"name": "mac-3"}, {"name": "mac-2"}, {"name": "mac-1", "priority": 9}],
            },
        }
    )
    text, gone = comments.keep_comments(TEXT, new)
    assert text == (
        "# of the file\n"
        "# and its team\n"
        "apiVersion: v1  # the only one\n"
        "spec:\n"
        "  # how many\n"
        "  replicas: 5  # two\n"
        "  nodes:\n"
        "  - name: mac-3\n"
        "  # the slow one\n"
        "  - name: mac-2\n"
        "  # the fast one\n"
        "  - name: mac-1  # in the lab\n"
        "    priority: 9\n"
        "# at the end\n"
    )
    assert gone == (" after a text", " of the sign", " of the last")
    assert comments.keep_comments(text, new) == (text, ())


@pytest.mark.parametrize("old", ["", "a: [", "a: 1\n---\nb: 2\n", "# alone\n"])
def test_a_text_that_is_no_single_document_changes_nothing(old: str) -> None:
    assert comments.keep_comments(old, "a: 1\n") == ("a: 1\n", ())


keys = st.sampled_from(["a", "b", "name", "spec"])
values = st.recursive(
    st.integers(0, 9) | st.text("ab #:'\"\n-", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(keys, values, min_size=1, max_size=3), st.data())
def test_comments_never_change_a_value(tree: dict[str, object], data: st.DataObject) -> None:
    plain = parser.dump(tree)  # type: ignore[arg-type]  # any tree of JSON values
    [root] = parser.parse(plain, "").documents
    paths = [path for path, _ in comments._places(root, ())]
    chosen = data.draw(st.sets(st.sampled_from(paths)))
    fields = {path: FieldComments(above=(" up",), beside=" side") for path in chosen}
    text = comments.with_comments(plain, comments.DocumentComments(fields=fields, end=(" end",)))
    assert parser.parse_values(text) in ([tree], None)
    file = parser.parse(text, "")
    assert not file.problems
    again, gone = comments.keep_comments(text, plain)
    assert (again.count("# up"), again.count("# side"), gone) == (
        text.count("# up"),
        text.count("# side"),
        (),
    )
