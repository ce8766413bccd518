"""Tests of `manifests.ownership`: the owner of a field, and manifests applied over the changes of others."""

import contextlib
import json
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from manifests import declaration, ownership, three_way
from manifests.documents import Document
from manifests.errors import ManifestErrors
from manifests.load import LoadedObject
from manifests.ownership import FieldConflict, MergedObject
from manifests.three_way import Force
from manifests.trees import object_tree, spec_of
from manifests.yaml.nodes import Mark, YamlNode
from schemas import kinds
from schemas.deployment import ModelDeployment
from schemas.gitsource import GitSource
from schemas.kinds import Kind
from schemas.kv_cache import KvCache
from schemas.meta import APPLY_SET, CHANGE_CAUSE, RESTARTED_AT, ApiModel, ApiObject
from tests.support.manifests_texts import HEAD, deployment, read, route
from tests.support.sampling import samples
from tests.support.schemas_strategies import objects
from tests.support.world import with_metadata, with_spec

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
SCALE = "fleetctl-scale"


def merged(
    existing: ApiObject | None, text: str, *, manager: str = "fleetctl", force: Force = False
) -> MergedObject:
    [item] = read(text)
    return ownership.merge_manifest(
        existing, item, manager=manager, force=force, now=LATER, uid="u-1"
    )


def made(text: str, **how: Any) -> ModelDeployment:
    obj = merged(None, text, **how).obj
    assert isinstance(obj, ModelDeployment)
    return obj


def again(existing: ApiObject, text: str, **how: Any) -> ModelDeployment:
    """Return the object after an apply without conflicts."""
    merged_object = merged(existing, text, **how)
    assert merged_object.conflicts == ()
    assert isinstance(merged_object.obj, ModelDeployment)
    return merged_object.obj


def changed_by(
    obj: ModelDeployment, manager: str, at: datetime = NOW, **spec: Any
) -> ModelDeployment:
    """Return the object after a command changed its spec."""
    return ownership.record_update(obj, with_spec(obj, **spec), manager, at)


def labelled(obj: ModelDeployment, **labels: str) -> ModelDeployment:
    after = with_metadata(obj, labels=labels)
    return ownership.record_update(obj, after, "fleetctl-label", NOW)


def owner(obj: ApiObject, path: str) -> str | None:
    entry = ownership.field_owner(obj, path)
    return entry.manager if entry is not None else None


def clashes(found: tuple[FieldConflict, ...]) -> list[tuple[str, str, object, object]]:
    return [(conflict.path, conflict.owner, conflict.theirs, conflict.ours) for conflict in found]


def test_applied_fields_belong_to_the_manager() -> None:
    obj = made(deployment(meta="  labels: {a/b: c}\n", rest="  servedNames: [x]\n"))
    for path in ("spec.replicas", 'metadata.labels["a/b"]', "spec.servedNames[0]", "spec.model"):
        assert owner(obj, path) == "fleetctl"
    assert owner(obj, "spec.concurrency") is None


def test_updated_fields_belong_to_the_verb() -> None:
    obj = changed_by(made(deployment()), SCALE, replicas=5)
    assert owner(obj, "spec.replicas") == SCALE
    back = changed_by(obj, "fleetctl-edit", replicas=7)
    assert [entry.manager for entry in back.metadata.managed_fields] == [
        "fleetctl",
        "fleetctl-edit",
    ]
    assert owner(back, "spec") == "fleetctl-edit"
    assert ownership.record_update(back, back, SCALE, LATER) == back


def test_annotations_of_the_fleet_have_no_owner() -> None:
    obj = made(deployment())
    noted = with_metadata(obj, annotations={RESTARTED_AT: "x"})
    after = ownership.record_update(obj, noted, "x", LATER)
    assert after.metadata.managed_fields == obj.metadata.managed_fields
    assert again(after, deployment()) is after


def test_a_field_changed_by_another_manager_is_kept_and_by_both_a_conflict() -> None:
    obj = changed_by(made(deployment(replicas=2)), SCALE, replicas=5)
    merged_object = merged(obj, deployment(replicas=2))
    assert merged_object.obj is obj
    assert merged_object.conflicts == ()
    assert [conflict.kept_message for conflict in merged_object.kept_by_others] == [
        "modeldeployment/qwen: spec.replicas stays 5, set by fleetctl-scale; the manifest says 2"
    ]
    merged_object = merged(obj, deployment(replicas=3))
    assert clashes(merged_object.conflicts) == [("spec.replicas", SCALE, 5, 3)]
    assert merged_object.obj is obj


def test_a_field_changed_by_both_to_the_same_value_is_no_conflict() -> None:
    obj = changed_by(made(deployment(replicas=2)), SCALE, replicas=5)
    after = again(obj, deployment(replicas=5))
    assert (after.spec.replicas, after.metadata.generation) == (5, obj.metadata.generation)
    # From now on the manifest's value counts again.
    assert again(after, deployment(replicas=6)).spec.replicas == 6


def test_force_takes_the_field() -> None:
    obj = changed_by(made(deployment(replicas=2)), SCALE, replicas=5)
    for text in (deployment(replicas=2), deployment(replicas=3)):
        after = again(obj, text, force=True)
        assert after.spec.replicas < 5
        assert owner(after, "spec.replicas") == "fleetctl"
        assert len(after.metadata.managed_fields) == 1


def test_drift_is_corrected_but_other_manifests_are_respected() -> None:
    obj = changed_by(made(deployment(replicas=2), manager="gitsource/a"), SCALE, replicas=5)
    how: dict[str, Any] = {"manager": "gitsource/a", "force": "drift"}
    assert again(obj, deployment(replicas=2), **how).spec.replicas == 2
    other = merged(made(deployment(replicas=2)), deployment(replicas=3), **how)
    assert clashes(other.conflicts) == [("spec.replicas", "fleetctl", 2, 3)]


def test_a_field_removed_from_the_manifest_returns_to_its_default() -> None:
    text = deployment(meta="  labels: {a: b, c: d}\n", rest="  concurrency: 9\n")
    after = again(made(text), deployment(meta="  labels: {a: b}\n"))
    assert (after.metadata.labels, after.spec.concurrency) == ({"a": "b"}, "Auto")


def test_labels_are_merged_by_key() -> None:
    obj = labelled(made(deployment(meta="  labels: {a: b, c: d}\n")), a="b", x="y")
    merged_object = merged(obj, deployment(meta="  labels: {a: z, c: d}\n"))
    assert merged_object.obj.metadata.labels == {"a": "z", "x": "y"}
    assert clashes(merged_object.kept_by_others) == [
        ("metadata.labels.c", "fleetctl-label", None, "d")
    ]
    assert (
        "metadata.labels.c stays unset, set by fleetctl-label"
        in merged_object.kept_by_others[0].kept_message
    )


def test_defaults_in_list_items_are_no_difference() -> None:
    obj = merged(None, route()).obj
    assert merged(obj, route()).obj is obj
    spelled = route(backends="[{deployment: qwen, weight: 1}]")
    assert merged(obj, spelled).obj is obj


def test_printed_objects_own_what_was_edited() -> None:
    first = changed_by(made(deployment(rest="  contextLength: 4096\n")), SCALE, replicas=2)
    printed = json.dumps(object_tree(first))
    edited = printed.replace('"minAvailable": 0', '"minAvailable": 1')
    assert edited != printed
    after = again(first, edited)
    assert [owner(after, f"spec.{name}") for name in ("minAvailable", "contextLength", "replicas", "concurrency")] == [
        "fleetctl", "fleetctl", SCALE, None,
    ]  # fmt: skip
    # A line that was removed, and that this manager applied, returns to its default; one of another stays.
    without = again(
        first, printed.replace('"contextLength": 4096, ', "").replace('"replicas": 2, ', "")
    )
    assert (owner(without, "spec.contextLength"), without.spec.replicas) == (None, 2)


def test_an_object_without_manifests_is_adopted() -> None:
    obj = made(deployment(meta="  labels: {a: b}\n", rest="  concurrency: 9\n"))
    after = again(with_metadata(obj, managed_fields=()), deployment(replicas=3))
    assert (after.spec.concurrency, after.spec.replicas, after.metadata.labels) == ("Auto", 3, {})


def test_an_adopted_object_keeps_fields_of_verbs() -> None:
    obj = changed_by(made(deployment()), SCALE, replicas=5, concurrency=9)
    [_, scaled] = obj.metadata.managed_fields
    bare = with_metadata(obj, managed_fields=(scaled,))
    merged_object = merged(bare, deployment(replicas=2))
    assert clashes(merged_object.conflicts) == [("spec.replicas", SCALE, 5, 2)]
    assert again(bare, deployment(replicas=5)).spec.concurrency == 9


def test_two_manifests_share_an_object_until_they_disagree() -> None:
    first = made(deployment(replicas=2, rest="  concurrency: 9\n"))
    both = again(first, deployment(replicas=2), manager="gitsource/a")
    assert both.spec.concurrency == 9
    merged_object = merged(both, deployment(replicas=3), manager="gitsource/a")
    assert clashes(merged_object.conflicts) == [("spec.replicas", "fleetctl", 2, 3)]
    taken = again(both, deployment(replicas=3), manager="gitsource/a", force=True)
    assert taken.spec.replicas == 3
    # The manager that lost the field gets a conflict and does not take it back silently.
    lost = merged(taken, deployment(replicas=2, rest="  concurrency: 9\n"))
    assert clashes(lost.conflicts) == [("spec.replicas", "gitsource/a", 3, 2)]


def test_a_field_stays_while_another_manifest_has_it() -> None:
    text = deployment(rest="  concurrency: 9\n")
    both = again(made(text), text, manager="gitsource/a")
    assert again(both, deployment()).spec.concurrency == 9


SCALED = "  autoscaling: {minReplicas: 1, maxReplicas: 3}\n"


def test_a_mapping_removed_by_another_stays_removed() -> None:
    obj = changed_by(made(deployment(rest=SCALED)), "fleetctl-edit", autoscaling=None)
    merged_object = merged(obj, deployment(rest=SCALED))
    assert [field_conflict.path for field_conflict in merged_object.kept_by_others] == [
        "spec.autoscaling"
    ]
    more = SCALED.replace("3", "4")
    assert [conflict.path for conflict in merged(obj, deployment(rest=more)).conflicts] == [
        "spec.autoscaling"
    ]
    forced = again(obj, deployment(rest=more), force=True)
    assert forced.spec.autoscaling is not None
    assert forced.spec.autoscaling.max_replicas == 4


def test_a_required_field_stays_while_another_keeps_its_mapping() -> None:
    obj = made(deployment(rest=SCALED))
    assert obj.spec.autoscaling is not None
    wider = obj.spec.autoscaling.model_copy(update={"min_replicas": 2})
    after = again(changed_by(obj, "fleetctl-edit", autoscaling=wider), deployment())
    assert after.spec.autoscaling is not None
    assert after.spec.autoscaling.min_replicas == 2


def test_fields_that_are_invalid_together_are_refused_at_their_place() -> None:
    obj = made(deployment(rest="  contextLength: 8192\n"))
    model_deployment = changed_by(obj, "fleetctl-edit", kv_cache=KvCache(window=4096))
    with pytest.raises(ManifestErrors) as caught:
        merged(model_deployment, deployment(rest="  contextLength: 2048\n"))
    assert str(caught.value).startswith(
        "standard input:6:1: ModelDeployment/qwen: spec: is invalid together with fields that others set in the store: "
        "kvCache.window is 4096"
    )


SOURCE = (
    f"{HEAD}kind: GitSource\nmetadata: {{name: a}}\nspec:\n  repository: https://x.example/y.git\n"
)


def test_a_default_gives_way_to_another_form_of_the_field() -> None:
    obj = merged(None, SOURCE).obj
    after = merged(obj, f"{SOURCE}  reference: {{tag: v1}}\n").obj
    assert isinstance(after, GitSource)
    assert (after.spec.reference.branch, after.spec.reference.tag) == (None, "v1")


def test_null_is_an_applied_value() -> None:
    obj = made(deployment(rest="  queueDepth: 7\n"))
    after = again(obj, deployment(rest="  queueDepth: null\n"))
    assert after.spec.queue_depth is None
    assert owner(after, "spec.queueDepth") == "fleetctl"


def test_long_texts_are_stored_as_a_hash() -> None:
    text = deployment(meta=f"  annotations: {{a: {'x' * 5000}}}\n")
    obj = made(text)
    [said] = obj.metadata.managed_fields
    assert len(said.applied) < 300
    assert again(obj, text) is obj
    assert again(obj, deployment()).metadata.annotations == {}


def test_a_manifest_can_be_withdrawn() -> None:
    text = deployment(meta="  labels: {a: b}\n", rest="  concurrency: 9\n")
    obj = labelled(made(text), a="b", x="y")
    after = ownership.withdraw_manifest(obj, "fleetctl")
    assert (after.metadata.labels, after.spec.concurrency) == ({"x": "y"}, "Auto")
    assert [field.manager for field in after.metadata.managed_fields] == ["fleetctl-label"]
    assert after.spec.model.path == "models/qwen"
    assert ownership.withdraw_manifest(after, "fleetctl") is after


def test_an_apply_leaves_fields_to_the_source_that_has_them() -> None:
    obj = made(deployment(rest="  concurrency: 9\n"), manager="gitsource/a")
    assert again(obj, deployment(rest="  concurrency: 9\n")) is obj
    mine = again(obj, deployment(meta="  labels: {a: b}\n"))
    assert owner(mine, "metadata.labels.a") == "fleetctl"
    assert owner(mine, "spec.concurrency") == "gitsource/a"
    assert again(mine, deployment(meta="  labels: {a: b}\n")) is mine
    assert [field.manager for field in again(mine, deployment()).metadata.managed_fields] == [
        "gitsource/a"
    ]
    lost = merged(obj, deployment(replicas=5))
    assert [(conflict.path, conflict.applier) for conflict in lost.conflicts] == [
        ("spec.replicas", "gitsource/a")
    ]


def test_a_released_manifest_leaves_its_values() -> None:
    obj = made(deployment(rest="  concurrency: 9\n"))
    after = ownership.release_manifest(obj, "fleetctl")
    assert (after.spec.concurrency, after.metadata.managed_fields) == (9, ())
    assert ownership.release_manifest(after, "fleetctl") is after


def annotated(obj: ModelDeployment, cause: str, at: datetime) -> ModelDeployment:
    """Return the deployment as `fleetctl annotate` leaves it."""
    after = with_metadata(obj, annotations={CHANGE_CAUSE: cause})
    return ownership.record_update(obj, after, "fleetctl-annotate", at)


def changed_at(obj: ModelDeployment, at: datetime, **spec: Any) -> ModelDeployment:
    return changed_by(obj, "fleetctl-patch", at, **spec)


def test_a_change_cause_belongs_to_one_version() -> None:
    noted = annotated(made(deployment()), "longer", LATER + timedelta(minutes=1))
    scaled = changed_at(noted, LATER + timedelta(minutes=2), replicas=7)
    longer = changed_at(scaled, LATER + timedelta(minutes=3), context_length=1024)
    # Written before the change, it is the cause of the change.
    assert longer.metadata.annotations == {CHANGE_CAUSE: "longer"}
    undone = changed_at(longer, LATER + timedelta(minutes=4), context_length=2048)
    assert undone.metadata.annotations == {}
    assert all("change-cause" not in f for e in undone.metadata.managed_fields for f in e.fields)
    assert changed_at(longer, LATER, replicas=8).metadata.annotations != {}


def test_an_apply_does_not_carry_a_change_cause_over_to_the_next_version() -> None:
    noted = annotated(made(deployment()), "longer", LATER + timedelta(minutes=1))
    longer = changed_at(noted, LATER + timedelta(minutes=3), context_length=1024)
    assert again(longer, deployment(replicas=9)).metadata.annotations != {}
    assert again(longer, deployment(rest="  concurrency: 9\n")).metadata.annotations == {}
    # A cause in the manifest is repeated by its author.
    why = deployment(meta=f"  annotations: {{{CHANGE_CAUSE}: faster}}\n")
    model_deployment = again(again(longer, why, force=True), why + "  concurrency: 9\n")
    assert model_deployment.metadata.annotations == {CHANGE_CAUSE: "faster"}
    assert again(model_deployment, deployment()).metadata.annotations == {}


def test_an_apply_without_a_set_keeps_the_set() -> None:
    there = with_metadata(made(deployment()), annotations={APPLY_SET: "a"})
    assert again(there, deployment(replicas=4)).metadata.annotations == {APPLY_SET: "a"}


DOCUMENT = Document(source="any", root=YamlNode(mark=Mark(line=1, column=1), content={}))

every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(k, id=k.name) for k in kinds.KINDS if k.written_by_users]
)
many = settings(
    max_examples=samples(12, quick=3),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


LABELS = st.dictionaries(st.sampled_from(["team", "lab/rack"]), st.sampled_from(["a", "b"]))


@cache
def manifests(kind: Kind) -> st.SearchStrategy[ApiObject]:
    """Return an object as manifests may declare it: same name, no fleet fields, defaults left out if allowed."""
    spec = objects(kind.type.model_fields["spec"].annotation)  # type: ignore[arg-type]  # each kind has one
    return st.builds(partial(_as_a_file_has_it, kind), spec, LABELS)


def _as_a_file_has_it(kind: Kind, spec: ApiModel, labels: dict[str, str]) -> ApiObject:
    for is_sparse in (True, False):
        said = json.loads(spec.model_dump_json(by_alias=True, exclude_defaults=is_sparse))
        tree = {"kind": kind.name, "metadata": {"name": "a", "labels": labels}, "spec": said}
        try:
            return kind.type.model_validate_json(json.dumps(tree))
        except ValidationError:
            continue  # a mapping with only default values may need one of them in the text
    raise AssertionError("what a dump says can be read")


def applied(
    existing: ApiObject | None, manifest: ApiObject, *, force: Force = False
) -> MergedObject:
    item = LoadedObject(obj=manifest, document=DOCUMENT)
    return ownership.merge_manifest(existing, item, manager="me", force=force, now=NOW, uid="u")


def printed(there: ApiObject, manager: str) -> MergedObject:
    """Return the object after the apply of what `fleetctl get -o yaml` prints of it."""
    tree = object_tree(there)
    document = Document(source="-", root=DOCUMENT.root, tree=tree)
    obj = type(there).model_validate_json(
        json.dumps({k: v for k, v in tree.items() if k != "status"})
    )
    item = LoadedObject(obj=obj, document=document)
    return ownership.merge_manifest(there, item, manager=manager, force=False, now=NOW, uid="u")


def in_turn(*manifest: ApiObject) -> ApiObject:
    """Return the object after all manifests were applied, without other writers."""
    there: ApiObject | None = None
    for api_object in manifest:
        merged = applied(there, api_object)
        assert (merged.conflicts, merged.kept_by_others) == ((), ())
        there = merged.obj
    assert there is not None
    return there


def given_part(value: object, full: Any) -> Any:
    """Return the fields of a dumped value that were given; `full` is the dump with defaults, without None."""
    if isinstance(value, BaseModel) and isinstance(full, dict):
        names = {
            (field.alias or name): name
            for name, field in type(value).model_fields.items()
            if name in value.model_fields_set
        }
        return {key: given_part(getattr(value, name), full.get(key)) for key, name in names.items()}
    if isinstance(value, dict) and isinstance(full, dict):
        return {key: given_part(one, full.get(key)) for key, one in value.items()}
    return full


@every_kind
@many
@given(data=st.data())
def test_applied_fields_are_those_given(kind: Kind, data: st.DataObject) -> None:
    obj = data.draw(manifests(kind))
    full = obj.model_dump(mode="json", by_alias=True, exclude_none=True)
    expected = given_part(spec_of(obj), full["spec"]) if "spec" in obj.model_fields_set else {}
    assert declaration.applied_fields(obj)["spec"] == expected


def content(obj: ApiObject) -> tuple[object, ...]:
    return spec_of(obj), obj.metadata.labels, obj.metadata.annotations


@every_kind
@settings(many, max_examples=samples(12, quick=1))
@given(data=st.data())
def test_any_manifest_can_be_applied_over_any_other(kind: Kind, data: st.DataObject) -> None:
    first, second, other = (data.draw(manifests(kind)) for _ in range(3))
    alone(first, second)
    beside_another(first, second, edited(in_turn(first), other))


def alone(first: ApiObject, second: ApiObject) -> None:
    """Without other writers, the merged object equals the manifest."""
    there = in_turn(first, second)
    assert content(there) == content(second)
    assert applied(there, second).obj is there


def edited(there: ApiObject, other: ApiObject) -> ApiObject:
    """Return the object as an editor of another user leaves it."""
    labelled = with_metadata(there, labels={**there.metadata.labels, "theirs": "x"})
    after = labelled.model_copy(update={"spec": spec_of(other)})
    return ownership.record_update(there, after, "edit", NOW)


def beside_another(first: ApiObject, second: ApiObject, there: ApiObject) -> None:
    # Output of `get -o yaml` changes neither values nor owners, whoever applies it.
    for manager in ("me", "edit", "new"):
        assert printed(there, manager).obj is there
    # Applying the same manifest again undoes nobody's change.
    same = applied(there, first)
    assert same.conflicts == ()
    assert content(same.obj) == content(there)
    assert all(clash.owner == "edit" for clash in same.kept_by_others)
    # With force, every field of the manifest is applied, unless the fields are invalid together.
    with contextlib.suppress(ManifestErrors):
        forced = applied(there, second, force=True)
        assert (forced.conflicts, forced.kept_by_others) == ((), ())
        assert three_way.matches(
            declaration.applied_fields(second), declaration.declarable_fields(forced.obj)
        )
    # Withdrawing the manifest keeps the fields of others.
    after = ownership.withdraw_manifest(there, "me")
    assert after.metadata.labels["theirs"] == "x"
    assert [entry.manager for entry in after.metadata.managed_fields] == ["edit"]
