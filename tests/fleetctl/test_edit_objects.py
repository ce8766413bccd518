"""Every object that users write goes through an editor and a patch, and comes out as it went in."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetctl.objects import patches, writer
from fleetctl.verbs import edit_session
from fleetctl.verbs.edit_session import EditSession, load_text
from manifests.trees import Tree
from schemas import kinds
from schemas.kinds import Kind
from schemas.meta import ApiObject
from tests.support.schemas_strategies import objects

USERS = [kind for kind in kinds.KINDS if kind.written_by_users]
SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much)


def drawn(data: st.DataObject, kind: Kind) -> ApiObject:
    """Return an object as the store has it, and nobody deletes it."""
    found = data.draw(objects(kind.type))
    assert isinstance(found, ApiObject)
    metadata = found.metadata.model_copy(update={"deletion_timestamp": None})
    status = {"status": None} if "status" in kind.type.model_fields else {}
    return found.model_copy(update={"metadata": metadata, **status})


# Few: each reads a whole manifest thrice.
@pytest.mark.parametrize("kind", USERS, ids=lambda kind: kind.name)
@settings(max_examples=8, deadline=None, suppress_health_check=SLOW)
@given(data=st.data(), seed=st.integers(0, 99), form=st.sampled_from(["yaml", "json"]))
def test_what_goes_in_comes_out(kind: Kind, data: st.DataObject, seed: int, form: str) -> None:
    obj = drawn(data, kind)
    is_saved_as_it_was_shown(obj, form)
    comments_change_nothing(obj, random.Random(seed))
    patches_say_what_is_there(obj)


def is_saved_as_it_was_shown(obj: ApiObject, form: str) -> None:
    session = EditSession.of([obj])
    shown = edit_session.with_notes(edit_session.INSTRUCTIONS, session.text(form))
    found = session.read(edit_session.without_notes(edit_session.INSTRUCTIONS, shown), f".{form}")
    assert session.changed(found) == []
    merged = session.merged(found[0], obj)
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
    [found] = load_text(commented, ".yaml")
    assert writer.editable_tree(found.obj) == writer.editable_tree(obj)


def patches_say_what_is_there(obj: ApiObject) -> None:
    shown = writer.patchable_tree(obj)
    whole: Tree = [{"op": "replace", "path": "", "value": shown}]
    assert patches.apply_merge_patch(shown, shown) == shown
    after = patches.apply_json_patch(shown, whole)
    assert writer.merge_onto(obj, writer.load_patched(obj, after, "test").obj) is None
