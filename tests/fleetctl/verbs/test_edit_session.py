"""Texts, notes and merges of `fleetctl edit`."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetctl.objects import patches, writer
from fleetctl.verbs import edit_session
from fleetctl.verbs.edit_session import EditSession, load_text
from manifests.errors import ManifestError
from manifests.trees import Tree, is_equal
from schemas import kinds
from schemas.kinds import Kind
from schemas.meta import ApiObject
from tests.support.fleetctl_manifests import SCALARS
from tests.support.sampling import samples
from tests.support.schemas_strategies import objects

LINES = st.sampled_from(["#|", "#| no comment of ours", "# a comment", "kind: Node", "", "#| x\r"])
BODIES = st.lists(LINES, max_size=6).map("\n".join) | st.text(max_size=40)
NOTES = st.lists(st.sampled_from(["x", "no comment of ours", "", "a\nb"]), max_size=4)


@settings(max_examples=samples(100), deadline=None)
@given(notes=NOTES, body=BODIES)
def test_comments_of_the_user_are_kept(notes: list[str], body: str) -> None:
    assert edit_session.without_notes(notes, edit_session.with_notes(notes, body)) == body


@settings(max_examples=samples(100), deadline=None)
@given(notes=NOTES, body=BODIES, taken=st.sets(st.integers(0, 9)))
def test_notes_may_be_removed_by_the_user(notes: list[str], body: str, taken: set[int]) -> None:
    ours = edit_session._marked_lines(notes)
    left = [line for number, line in enumerate(ours) if number not in taken]
    # A line of the user that equals a removed note is treated as that note.
    if not body.startswith(edit_session._marked_lines(["x"])[-1]):
        whole = "".join(f"{line}\n" for line in left) + body
        assert edit_session.without_notes(notes, whole) == body


def test_problems_have_the_line_numbers_of_the_shown_text() -> None:
    problems = [
        ManifestError(source="/tmp/x", line=7, column=3, path="spec.b", message="is two"),
        ManifestError(source="/tmp/x", line=2, column=3, path="spec.a", message="is one"),
        ManifestError(source="/tmp/x", about="Node/a", message="is gone"),
    ]
    notes = edit_session.problem_notes("nothing was written:", problems)
    assert edit_session.with_notes(notes, "") == (
        '#| Edit the text below, save, and close the editor. Lines at the top that begin with "#|" are ignored.\n'
        "#| An empty or unchanged file cancels the edit. Problems are shown here.\n"
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
def test_empty_texts(body: str, is_empty: bool) -> None:
    assert edit_session.is_empty(body) is is_empty


# Without null, which objects do not contain.
KEYS = st.sampled_from(["a", "b", "c"])
OBJECTS: st.SearchStrategy[Tree] = st.recursive(
    st.dictionaries(KEYS, SCALARS, max_size=3),
    lambda inner: st.dictionaries(KEYS, inner | st.lists(SCALARS, max_size=2), max_size=3),
    max_leaves=9,
)


@settings(max_examples=samples(100), deadline=None)
@given(base=OBJECTS, ours=OBJECTS, theirs=OBJECTS)
def test_concurrent_changes_are_merged(base: Tree, ours: Tree, theirs: Tree) -> None:
    assert is_equal(edit_session.merge_changes(base, base, theirs).tree, theirs)
    assert is_equal(edit_session.merge_changes(base, ours, base).tree, ours)
    assert edit_session.merge_changes(base, ours, ours).conflicts == ()
    merge = edit_session.merge_changes(base, ours, theirs)
    # After the conflict was shown, the user may overwrite it; other changes of the other writer stay.
    again = edit_session.merge_changes(
        edit_session.acknowledge(base, merge.conflicts), ours, theirs
    )
    assert again.conflicts == ()
    for conflict in merge.conflicts:
        assert is_equal(at(again.tree, conflict.path), conflict.ours)


def at(tree: Tree, path: tuple[str | int, ...]) -> Tree:
    for part in path:
        tree = tree.get(str(part)) if isinstance(tree, dict) else None
    return tree


def test_conflicts_are_changes_of_the_same_field() -> None:
    base: Tree = {"spec": {"replicas": 2, "concurrency": 4, "names": ["a"], "old": {"x": 1}}}
    ours: Tree = {"spec": {"replicas": 3, "concurrency": 8, "names": ["a", "b"]}}
    theirs: Tree = {"spec": {"replicas": 5, "concurrency": 4, "names": ["c"], "old": {"x": 2}}}
    merge = edit_session.merge_changes(base, ours, theirs)
    assert sorted(
        (conflict.field, conflict.ours, conflict.theirs) for conflict in merge.conflicts
    ) == [
        ("spec.names", ["a", "b"], ["c"]),
        ("spec.old", None, {"x": 2}),
        ("spec.replicas", 3, 5),
    ]
    settled = edit_session.acknowledge(base, merge.conflicts)
    assert edit_session.merge_changes(settled, ours, theirs).tree == ours


USERS = [kind for kind in kinds.KINDS if kind.written_by_users]
SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much)


def drawn(data: st.DataObject, kind: Kind) -> ApiObject:
    """Return an object as stored, not marked for deletion."""
    model = data.draw(objects(kind.type))
    assert isinstance(model, ApiObject)
    metadata = model.metadata.model_copy(update={"deletion_timestamp": None})
    status = {"status": None} if "status" in kind.type.model_fields else {}
    return model.model_copy(update={"metadata": metadata, **status})


# Few examples: each reads a whole manifest three times.
@pytest.mark.parametrize("kind", USERS, ids=lambda kind: kind.name)
@settings(max_examples=samples(8, quick=3), deadline=None, suppress_health_check=SLOW)
@given(data=st.data(), seed=st.integers(0, 99), form=st.sampled_from(["yaml", "json"]))
def test_an_unchanged_text_gives_the_same_object(
    kind: Kind, data: st.DataObject, seed: int, form: str
) -> None:
    obj = drawn(data, kind)
    is_saved_as_it_was_shown(obj, form)
    comments_change_nothing(obj, random.Random(seed))
    patches_say_what_is_there(obj)


def is_saved_as_it_was_shown(obj: ApiObject, form: str) -> None:
    session = EditSession.of([obj])
    shown = edit_session.with_notes(edit_session.INSTRUCTIONS, session.text(form))
    loaded_objects = session.read(
        edit_session.without_notes(edit_session.INSTRUCTIONS, shown), f".{form}"
    )
    assert session.changed(loaded_objects) == []
    merged = session.merged(loaded_objects[0], obj)
    assert merged.conflicts == ()
    assert writer.merge_onto(obj, writer.load_edited(obj, merged.tree)) is None


def comments_change_nothing(obj: ApiObject, draw: random.Random) -> None:
    commented = ""
    for line in EditSession.of([obj]).text("yaml").splitlines():
        before = draw.choice(["", "", "# why\n", "\n"])
        commented += f"{before}{line}{draw.choice(['', '', '  # so'])}\n"
    assert (
        edit_session.without_notes(
            edit_session.INSTRUCTIONS, edit_session.with_notes(edit_session.INSTRUCTIONS, commented)
        )
        == commented
    )
    [loaded_object] = load_text(commented, ".yaml")
    assert writer.editable_tree(loaded_object.obj) == writer.editable_tree(obj)


def patches_say_what_is_there(obj: ApiObject) -> None:
    shown = writer.patchable_tree(obj)
    whole: Tree = [{"op": "replace", "path": "", "value": shown}]
    assert patches.apply_merge_patch(shown, shown) == shown
    after = patches.apply_json_patch(shown, whole)
    assert writer.merge_onto(obj, writer.load_patched(obj, after, "test").obj) is None
