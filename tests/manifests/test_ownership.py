"""Whose a field is, and what becomes of it when a manifest is applied over what others wrote."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from manifests import ownership
from manifests.errors import ManifestErrors
from manifests.ownership import FieldConflict, MergedObject
from manifests.three_way import Force
from schemas.deployment import KvCache, ModelDeployment
from schemas.gitsource import GitSource
from schemas.meta import APPLY_SET, RESTARTED_AT, ApiObject
from tests.manifests.making import HEAD, deployment, read, route

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
    """Return what an apply without conflicts leaves there."""
    found = merged(existing, text, **how)
    assert found.conflicts == ()
    assert isinstance(found.obj, ModelDeployment)
    return found.obj


def with_spec(obj: ModelDeployment, manager: str, **spec: Any) -> ModelDeployment:
    """Return the object as a verb leaves it."""
    changed = obj.spec.model_copy(update=spec)
    return ownership.record_update(obj, obj.model_copy(update={"spec": changed}), manager, NOW)


def with_labels(obj: ModelDeployment, manager: str, **labels: str) -> ModelDeployment:
    metadata = obj.metadata.model_copy(update={"labels": labels})
    return ownership.record_update(obj, obj.model_copy(update={"metadata": metadata}), manager, NOW)


def owner(obj: ApiObject, path: str) -> str | None:
    found = ownership.field_owner(obj, path)
    return found.manager if found is not None else None


def clashes(found: tuple[FieldConflict, ...]) -> list[tuple[str, str, object, object]]:
    return [(one.path, one.owner, one.theirs, one.ours) for one in found]


def test_what_a_manifest_says_is_its_managers() -> None:
    obj = made(deployment(meta="  labels: {a/b: c}\n", rest="  servedNames: [x]\n"))
    for path in ("spec.replicas", 'metadata.labels["a/b"]', "spec.servedNames[0]", "spec.model"):
        assert owner(obj, path) == "fleetctl"
    assert owner(obj, "spec.concurrency") is None


def test_what_a_verb_changes_is_the_verbs() -> None:
    obj = with_spec(made(deployment()), SCALE, replicas=5)
    assert owner(obj, "spec.replicas") == SCALE
    back = with_spec(obj, "fleetctl-edit", replicas=7)
    assert [entry.manager for entry in back.metadata.managed_fields] == [
        "fleetctl",
        "fleetctl-edit",
    ]
    assert owner(back, "spec") == "fleetctl-edit"


def test_a_change_of_nothing_records_nothing() -> None:
    obj = made(deployment())
    assert ownership.record_update(obj, obj, SCALE, LATER) == obj


def test_annotations_of_the_fleet_are_nobodys() -> None:
    obj = made(deployment())
    noted = obj.metadata.model_copy(update={"annotations": {RESTARTED_AT: "x"}})
    after = ownership.record_update(obj, obj.model_copy(update={"metadata": noted}), "x", LATER)
    assert after.metadata.managed_fields == obj.metadata.managed_fields
    assert again(after, deployment()) is after


def test_what_another_changed_stays_and_is_said() -> None:
    obj = with_spec(made(deployment(replicas=2)), SCALE, replicas=5)
    found = merged(obj, deployment(replicas=2))
    assert found.obj is obj
    assert found.conflicts == ()
    assert [one.kept for one in found.kept] == [
        "modeldeployment/qwen: spec.replicas stays 5, set by fleetctl-scale; the manifest says 2"
    ]


def test_what_both_changed_is_a_conflict_with_its_owner() -> None:
    obj = with_spec(made(deployment(replicas=2)), SCALE, replicas=5)
    found = merged(obj, deployment(replicas=3))
    assert clashes(found.conflicts) == [("spec.replicas", SCALE, 5, 3)]
    assert found.obj is obj


def test_what_both_changed_to_the_same_is_none() -> None:
    obj = with_spec(made(deployment(replicas=2)), SCALE, replicas=5)
    after = again(obj, deployment(replicas=5))
    assert (after.spec.replicas, after.metadata.generation) == (5, obj.metadata.generation)
    # From now on the manifest is asked again.
    assert again(after, deployment(replicas=6)).spec.replicas == 6


def test_force_takes_the_field() -> None:
    obj = with_spec(made(deployment(replicas=2)), SCALE, replicas=5)
    for text in (deployment(replicas=2), deployment(replicas=3)):
        after = again(obj, text, force=True)
        assert after.spec.replicas < 5
        assert owner(after, "spec.replicas") == "fleetctl"
        assert len(after.metadata.managed_fields) == 1


def test_drift_is_put_back_without_force_against_other_manifests() -> None:
    obj = with_spec(made(deployment(replicas=2), manager="gitsource/a"), SCALE, replicas=5)
    how: dict[str, Any] = {"manager": "gitsource/a", "force": "drift"}
    assert again(obj, deployment(replicas=2), **how).spec.replicas == 2
    other = merged(made(deployment(replicas=2)), deployment(replicas=3), **how)
    assert clashes(other.conflicts) == [("spec.replicas", "fleetctl", 2, 3)]


def test_what_is_said_no_more_goes_back_to_its_default() -> None:
    text = deployment(meta="  labels: {a: b, c: d}\n", rest="  concurrency: 9\n")
    after = again(made(text), deployment(meta="  labels: {a: b}\n"))
    assert (after.metadata.labels, after.spec.concurrency) == ({"a": "b"}, 4)


def test_what_is_said_no_more_stays_if_another_owns_it() -> None:
    text = deployment(rest="  concurrency: 9\n")
    obj = with_spec(made(text), SCALE, concurrency=7)
    found = merged(obj, deployment())
    assert (found.kept, found.conflicts) == ((), ())
    assert isinstance(found.obj, ModelDeployment)
    assert found.obj.spec.concurrency == 7


def test_labels_are_merged_by_key() -> None:
    obj = with_labels(
        made(deployment(meta="  labels: {a: b, c: d}\n")), "fleetctl-label", a="b", x="y"
    )
    found = merged(obj, deployment(meta="  labels: {a: z, c: d}\n"))
    assert found.obj.metadata.labels == {"a": "z", "x": "y"}
    assert clashes(found.kept) == [("metadata.labels.c", "fleetctl-label", None, "d")]
    assert "metadata.labels.c stays unset, set by fleetctl-label" in found.kept[0].kept


def test_no_labels_in_the_manifest_take_away_its_own_only() -> None:
    obj = with_labels(made(deployment(meta="  labels: {a: b}\n")), "fleetctl-label", a="b", x="y")
    assert again(obj, deployment()).metadata.labels == {"x": "y"}


def test_lists_are_taken_whole() -> None:
    obj = with_spec(
        made(deployment(rest="  servedNames: [x]\n")), "fleetctl-edit", served_names=("x", "y")
    )
    found = merged(obj, deployment(rest="  servedNames: [z]\n"))
    assert clashes(found.conflicts) == [("spec.servedNames", "fleetctl-edit", ["x", "y"], ["z"])]


def test_defaults_in_items_of_lists_are_no_difference() -> None:
    obj = merged(None, route()).obj
    assert merged(obj, route()).obj is obj
    spelled = route(backends="[{deployment: qwen, weight: 1}]")
    assert merged(obj, spelled).obj is obj


def test_an_object_that_nobody_applied_becomes_what_the_manifest_says() -> None:
    obj = made(deployment(meta="  labels: {a: b}\n", rest="  concurrency: 9\n"))
    bare = obj.metadata.model_copy(update={"managed_fields": ()})
    after = again(obj.model_copy(update={"metadata": bare}), deployment(replicas=3))
    assert (after.spec.concurrency, after.spec.replicas, after.metadata.labels) == (4, 3, {})


def test_an_object_that_nobody_applied_keeps_what_verbs_wrote() -> None:
    obj = with_spec(made(deployment()), SCALE, replicas=5, concurrency=9)
    [_, scaled] = obj.metadata.managed_fields
    bare = obj.model_copy(
        update={"metadata": obj.metadata.model_copy(update={"managed_fields": (scaled,)})}
    )
    found = merged(bare, deployment(replicas=2))
    assert clashes(found.conflicts) == [("spec.replicas", SCALE, 5, 2)]
    assert again(bare, deployment(replicas=5)).spec.concurrency == 9


def test_two_manifests_share_an_object_until_they_disagree() -> None:
    first = made(deployment(replicas=2, rest="  concurrency: 9\n"))
    both = again(first, deployment(replicas=2), manager="gitsource/a")
    assert both.spec.concurrency == 9
    found = merged(both, deployment(replicas=3), manager="gitsource/a")
    assert clashes(found.conflicts) == [("spec.replicas", "fleetctl", 2, 3)]
    taken = again(both, deployment(replicas=3), manager="gitsource/a", force=True)
    assert taken.spec.replicas == 3
    # Who lost it is asked, and does not take it back in silence.
    lost = merged(taken, deployment(replicas=2, rest="  concurrency: 9\n"))
    assert clashes(lost.conflicts) == [("spec.replicas", "gitsource/a", 3, 2)]


def test_what_one_manifest_says_no_more_stays_while_another_says_it() -> None:
    text = deployment(rest="  concurrency: 9\n")
    both = again(made(text), text, manager="gitsource/a")
    assert again(both, deployment()).spec.concurrency == 9


SCALED = "  autoscaling: {minReplicas: 1, maxReplicas: 3}\n"


def test_a_mapping_goes_as_a_whole() -> None:
    assert again(made(deployment(rest=SCALED)), deployment()).spec.autoscaling is None


def test_a_mapping_that_another_took_away_stays_away() -> None:
    obj = with_spec(made(deployment(rest=SCALED)), "fleetctl-edit", autoscaling=None)
    found = merged(obj, deployment(rest=SCALED))
    assert [one.path for one in found.kept] == ["spec.autoscaling"]
    more = SCALED.replace("3", "4")
    assert [one.path for one in merged(obj, deployment(rest=more)).conflicts] == [
        "spec.autoscaling"
    ]
    forced = again(obj, deployment(rest=more), force=True)
    assert forced.spec.autoscaling is not None
    assert forced.spec.autoscaling.max_replicas == 4


def test_what_must_be_there_stays_while_another_keeps_the_rest() -> None:
    obj = made(deployment(rest=SCALED))
    assert obj.spec.autoscaling is not None
    wider = obj.spec.autoscaling.model_copy(update={"min_replicas": 2})
    after = again(with_spec(obj, "fleetctl-edit", autoscaling=wider), deployment())
    assert after.spec.autoscaling is not None
    assert after.spec.autoscaling.min_replicas == 2


def test_what_does_not_go_together_is_refused_at_its_place() -> None:
    obj = made(deployment(rest="  contextLength: 8192\n"))
    kept = with_spec(obj, "fleetctl-edit", kv_cache=KvCache(window=4096))
    with pytest.raises(ManifestErrors) as caught:
        merged(kept, deployment(rest="  contextLength: 2048\n"))
    assert str(caught.value).startswith(
        "standard input:6:1: ModelDeployment/qwen: spec: does not go with what others set in the store: "
        "kvCache.window is 4096"
    )


SOURCE = (
    f"{HEAD}kind: GitSource\nmetadata: {{name: a}}\nspec:\n  repository: https://x.example/y.git\n"
)


def test_a_default_gives_way_to_another_way_to_say_the_same() -> None:
    obj = merged(None, SOURCE).obj
    after = merged(obj, f"{SOURCE}  reference: {{tag: v1}}\n").obj
    assert isinstance(after, GitSource)
    assert (after.spec.reference.branch, after.spec.reference.tag) == (None, "v1")


def test_null_is_said_too() -> None:
    obj = made(deployment(rest="  queueDepth: 7\n"))
    after = again(obj, deployment(rest="  queueDepth: null\n"))
    assert after.spec.queue_depth is None
    assert owner(after, "spec.queueDepth") == "fleetctl"


def test_long_texts_are_remembered_by_their_hash() -> None:
    text = deployment(meta=f"  annotations: {{a: {'x' * 5000}}}\n")
    obj = made(text)
    [said] = obj.metadata.managed_fields
    assert len(said.applied) < 300
    assert again(obj, text) is obj
    assert again(obj, deployment()).metadata.annotations == {}


def test_what_a_manifest_said_can_be_taken_back() -> None:
    text = deployment(meta="  labels: {a: b}\n", rest="  concurrency: 9\n")
    obj = with_labels(made(text), "fleetctl-label", a="b", x="y")
    after = ownership.withdraw_manifest(obj, "fleetctl")
    assert (after.metadata.labels, after.spec.concurrency) == ({"x": "y"}, 4)
    assert [one.manager for one in after.metadata.managed_fields] == ["fleetctl-label"]
    assert after.spec.model.path == "models/qwen"
    assert ownership.withdraw_manifest(after, "fleetctl") is after


def test_the_set_survives_an_apply_without_one() -> None:
    obj = made(deployment())
    of_set = obj.metadata.model_copy(update={"annotations": {APPLY_SET: "a"}})
    there = obj.model_copy(update={"metadata": of_set})
    assert again(there, deployment(replicas=4)).metadata.annotations == {APPLY_SET: "a"}
