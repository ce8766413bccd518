"""What must hold of any manifest of any kind that is applied over any other."""

import contextlib
import json
from datetime import UTC, datetime
from functools import cache, partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from manifests import declaration, ownership, three_way
from manifests.errors import ManifestErrors
from manifests.load import Document, LoadedObject
from manifests.ownership import MergedObject
from manifests.three_way import Force
from manifests.trees import spec_of
from manifests.yaml.nodes import Mark, YamlNode
from schemas import kinds
from schemas.kinds import Kind
from schemas.meta import ApiModel, ApiObject
from tests.schemas.strategies import objects

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DOCUMENT = Document(source="any", root=YamlNode(mark=Mark(line=1, column=1), content={}))

every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(k, id=k.name) for k in kinds.KINDS if k.written_by_users]
)
many = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


LABELS = st.dictionaries(st.sampled_from(["team", "lab/rack"]), st.sampled_from(["a", "b"]))


@cache
def manifests(kind: Kind) -> st.SearchStrategy[ApiObject]:
    """Return what files may say: names alike, nothing of the fleet's, no default spelled out where that is allowed."""
    spec = objects(kind.type.model_fields["spec"].annotation)  # type: ignore[arg-type]  # each kind has one
    return st.builds(partial(_as_a_file_has_it, kind), spec, LABELS)


def _as_a_file_has_it(kind: Kind, spec: ApiModel, labels: dict[str, str]) -> ApiObject:
    for is_sparse in (True, False):
        said = json.loads(spec.model_dump_json(by_alias=True, exclude_defaults=is_sparse))
        tree = {"kind": kind.name, "metadata": {"name": "a", "labels": labels}, "spec": said}
        try:
            return kind.type.model_validate_json(json.dumps(tree))
        except ValidationError:
            continue  # a mapping whose every field has its default may have to say one of them
    raise AssertionError("what a dump says can be read")


def applied(
    existing: ApiObject | None, manifest: ApiObject, *, force: Force = False
) -> MergedObject:
    item = LoadedObject(obj=manifest, document=DOCUMENT)
    return ownership.merge_manifest(existing, item, manager="me", force=force, now=NOW, uid="u")


def in_turn(*manifest: ApiObject) -> ApiObject:
    """Return the object after all of them were applied; nobody else writes."""
    there: ApiObject | None = None
    for one in manifest:
        merged = applied(there, one)
        assert (merged.conflicts, merged.kept) == ((), ())
        there = merged.obj
    assert there is not None
    return there


def content(obj: ApiObject) -> tuple[object, ...]:
    return spec_of(obj), obj.metadata.labels, obj.metadata.annotations


@every_kind
@many
@given(data=st.data())
def test_any_manifest_over_any_other(kind: Kind, data: st.DataObject) -> None:
    first, second, other = (data.draw(manifests(kind)) for _ in range(3))
    alone(first, second)
    beside_another(first, second, edited(in_turn(first), other))


def alone(first: ApiObject, second: ApiObject) -> None:
    """Without other writers a merge is what apply always was: the object becomes what the manifest says."""
    there = in_turn(first, second)
    assert content(there) == content(second)
    assert applied(there, second).obj is there


def edited(there: ApiObject, other: ApiObject) -> ApiObject:
    """Return the object as somebody's editor leaves it."""
    labels = {**there.metadata.labels, "theirs": "x"}
    metadata = there.metadata.model_copy(update={"labels": labels})
    after = there.model_copy(update={"spec": spec_of(other), "metadata": metadata})
    return ownership.record_update(there, after, "edit", NOW)


def beside_another(first: ApiObject, second: ApiObject, there: ApiObject) -> None:
    # What says what it said undoes nobody.
    same = applied(there, first)
    assert same.conflicts == ()
    assert content(same.obj) == content(there)
    assert all(clash.owner == "edit" for clash in same.kept)
    # Force leaves all that the manifest says, unless what both say does not go together.
    with contextlib.suppress(ManifestErrors):
        forced = applied(there, second, force=True)
        assert (forced.conflicts, forced.kept) == ((), ())
        assert three_way.matches(
            declaration.applied_fields(second), declaration.declarable_fields(forced.obj)
        )
    # What is taken back leaves what others said.
    after = ownership.withdraw_manifest(there, "me")
    assert after.metadata.labels["theirs"] == "x"
    assert [entry.manager for entry in after.metadata.managed_fields] == ["edit"]
