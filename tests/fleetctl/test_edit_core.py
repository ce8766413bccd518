"""What `fleetctl edit` makes of texts and of two changes at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetctl.objects.patches import is_equal_json
from fleetctl.verbs import edit_session
from manifests.errors import ManifestError
from manifests.trees import Tree
from tests.fleetctl.test_patch_core import SCALARS

LINES = st.sampled_from(["#|", "#| no comment of ours", "# a comment", "kind: Node", "", "#| x\r"])
BODIES = st.lists(LINES, max_size=6).map("\n".join) | st.text(max_size=40)
NOTES = st.lists(st.sampled_from(["x", "no comment of ours", "", "a\nb"]), max_size=4)


@settings(max_examples=100, deadline=None)
@given(notes=NOTES, body=BODIES)
def test_comments_of_the_user_are_kept(notes: list[str], body: str) -> None:
    assert edit_session.without_notes(notes, edit_session.with_notes(notes, body)) == body


@settings(max_examples=100, deadline=None)
@given(notes=NOTES, body=BODIES, taken=st.sets(st.integers(0, 9)))
def test_notes_that_the_user_took_away_do_no_harm(
    notes: list[str], body: str, taken: set[int]
) -> None:
    ours = edit_session._marked_lines(notes)
    left = [line for number, line in enumerate(ours) if number not in taken]
    # A line of the user's that reads as one of ours that was taken away is taken for it.
    if not body.startswith(edit_session._marked_lines(["x"])[-1]):
        whole = "".join(f"{line}\n" for line in left) + body
        assert edit_session.without_notes(notes, whole) == body


def test_problems_are_told_at_the_lines_of_the_text_they_stand_in() -> None:
    problems = [
        ManifestError(source="/tmp/x", line=7, column=3, path="spec.b", message="is two"),
        ManifestError(source="/tmp/x", line=2, column=3, path="spec.a", message="is one"),
        ManifestError(source="/tmp/x", about="Node/a", message="is gone"),
    ]
    notes = edit_session.problem_notes("nothing was written:", problems)
    assert edit_session.with_notes(notes, "") == (
        '#| Edit below, save, and leave the editor. Lines that begin with "#|" at the top are not part of it.\n'
        "#| An empty file ends the edit, and so does leaving it as it is. What is wrong is told here.\n"
        "#| nothing was written:\n"
        "#| Node/a: is gone\n"
        "#| line 9: spec.a: is one\n"
        "#| line 14: spec.b: is two\n"
        "#|\n"
    )


@pytest.mark.parametrize(
    ("body", "is_empty"),
    [("", True), ("\n  \n# x\n---\n", True), ("a: b\n", False), ("{}", False)],
)
def test_what_counts_as_empty(body: str, is_empty: bool) -> None:
    assert edit_session.is_empty(body) is is_empty


# Null is not among them: nobody says it in an object.
KEYS = st.sampled_from(["a", "b", "c"])
OBJECTS: st.SearchStrategy[Tree] = st.recursive(
    st.dictionaries(KEYS, SCALARS, max_size=3),
    lambda inner: st.dictionaries(KEYS, inner | st.lists(SCALARS, max_size=2), max_size=3),
    max_leaves=9,
)


@settings(max_examples=100, deadline=None)
@given(base=OBJECTS, ours=OBJECTS, theirs=OBJECTS)
def test_two_changes_at_once(base: Tree, ours: Tree, theirs: Tree) -> None:
    assert is_equal_json(edit_session.merge_changes(base, base, theirs).tree, theirs)
    assert is_equal_json(edit_session.merge_changes(base, ours, base).tree, ours)
    assert edit_session.merge_changes(base, ours, ours).conflicts == ()
    merge = edit_session.merge_changes(base, ours, theirs)
    # Told of what others did, the user may write over it; and what they did elsewhere stays.
    again = edit_session.merge_changes(
        edit_session.acknowledge(base, merge.conflicts), ours, theirs
    )
    assert again.conflicts == ()
    for one in merge.conflicts:
        assert is_equal_json(at(again.tree, one.path), one.ours)


def at(tree: Tree, path: tuple[str | int, ...]) -> Tree:
    for part in path:
        tree = tree.get(str(part)) if isinstance(tree, dict) else None
    return tree


def test_a_conflict_is_one_of_the_same_field() -> None:
    base: Tree = {"spec": {"replicas": 2, "concurrency": 4, "names": ["a"], "old": {"x": 1}}}
    ours: Tree = {"spec": {"replicas": 3, "concurrency": 8, "names": ["a", "b"]}}
    theirs: Tree = {"spec": {"replicas": 5, "concurrency": 4, "names": ["c"], "old": {"x": 2}}}
    merge = edit_session.merge_changes(base, ours, theirs)
    assert sorted((one.field, one.ours, one.theirs) for one in merge.conflicts) == [
        ("spec.names", ["a", "b"], ["c"]),
        ("spec.old", None, {"x": 2}),
        ("spec.replicas", 3, 5),
    ]
    settled = edit_session.acknowledge(base, merge.conflicts)
    assert edit_session.merge_changes(settled, ours, theirs).tree == ours
