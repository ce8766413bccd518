"""Tests of `manifests.plan` and `manifests.diff`: changes, their order and their transactions."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from manifests import diff, ownership, plan
from manifests.diff import FieldChange
from manifests.errors import ManifestErrors
from manifests.load import LoadedObject
from manifests.trees import Tree
from schemas import kinds
from schemas.deployment import ModelDeployment
from schemas.meta import RESTARTED_AT, ApiObject, ObjectKey
from store import codec
from tests.support.manifests_texts import deployment, in_pool, pool, read, route
from tests.support.world import with_metadata

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)


def stored(text: str, **metadata: object) -> ApiObject:
    """Return the object as the store would hold it."""
    [item] = read(text)
    merged = ownership.merge_manifest(
        None, item, manager="fleetctl", force=False, now=NOW, uid="u-1"
    )
    return with_metadata(merged.obj, resource_version="7", **metadata)


def planned(text: str, *existing: ApiObject) -> list[plan.Change]:
    there: dict[ObjectKey, ApiObject] = {ObjectKey(obj.kind, obj.name): obj for obj in existing}
    return plan.plan_changes(read(text), there, now=LATER)


def test_explicit_defaults_change_only_the_applied_fields() -> None:
    before = stored(deployment())
    text = deployment(rest="  concurrency: Auto\n  placement: {}\n", meta="  labels: {}\n")
    [change] = planned(text, before)
    assert isinstance(change, plan.ConfiguredObject)
    assert diff.diff_text(before, change.obj) == ""
    assert change.obj.metadata.generation == before.metadata.generation
    assert planned(text, change.obj) == [plan.UnchangedObject(obj=change.obj)]


def test_a_new_spec_increments_the_generation_and_keeps_metadata() -> None:
    before = stored(deployment(), generation=4, finalizers=("x",))
    [change] = planned(deployment(replicas=3), before)
    assert isinstance(change, plan.ConfiguredObject)
    assert isinstance(change.obj, ModelDeployment)
    assert change.obj.spec.replicas == 3
    [said] = change.obj.metadata.managed_fields
    assert '"replicas":3' in said.applied
    meta = before.metadata.model_copy(update={"generation": 5, "managed_fields": (said,)})
    assert change.obj.metadata == meta
    assert codec.unchanged_guard(change.obj).mod_revision == 7


def test_new_labels_keep_the_generation() -> None:
    before = stored(deployment(meta="  labels: {old: a}\n"), generation=4)
    [change] = planned(deployment(meta="  labels: {new: b}\n"), before)
    assert isinstance(change, plan.ConfiguredObject)
    assert (change.obj.metadata.generation, change.obj.metadata.labels) == (4, {"new": "b"})


def test_a_status_is_never_written_or_compared() -> None:
    before = stored(deployment())
    assert isinstance(before, ModelDeployment)
    tree: dict[str, Tree] = json.loads(before.model_dump_json(by_alias=True))
    tree["status"] = {"replicas": 1}
    with_status = ModelDeployment.model_validate_json(json.dumps(tree))
    assert planned(deployment(), with_status) == [plan.UnchangedObject(obj=with_status)]
    assert diff.diff_text(with_status, before) == ""
    [change] = planned(deployment(replicas=2), with_status)
    assert isinstance(change.obj, ModelDeployment)
    assert change.obj.status is None


def test_the_order_contains_every_user_kind() -> None:
    assert set(plan.ORDER) == {kind.name for kind in kinds.KINDS if kind.written_by_users}


def test_referenced_objects_are_written_first() -> None:
    changes = planned(route() + deployment(rest=in_pool()) + pool())
    assert [change.obj.kind for change in changes] == ["NodePool", "ModelDeployment", "ModelRoute"]


def test_uids_are_derived_and_differ_for_successors() -> None:
    first = plan.uid_of("NodePool", "a", NOW)
    assert first == plan.uid_of("NodePool", "a", NOW)
    others = {
        plan.uid_of("NodePool", "a", LATER),
        plan.uid_of("NodePool", "b", NOW),
        plan.uid_of("ShardGroup", "a", NOW),
    }
    assert len({first, *others}) == 4


LARGE = f"  annotations: {{a: {'x' * 300_000}}}\n"


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        pytest.param(route() + deployment(rest=in_pool()) + pool(), [[3]], id="one-transaction"),
        pytest.param("".join(deployment(f"m-{n}") for n in range(250)) + pool(), [[1], [100, 100, 50]], id="waves"),
        pytest.param("".join(deployment(f"m-{n}", meta=LARGE) for n in range(5)), [[2, 2, 1]], id="large-objects"),
    ],
)  # fmt: skip
def test_objects_are_waves_of_transactions(text: str, sizes: list[list[int]]) -> None:
    waves = plan.plan_waves(planned(text))
    assert [[len(batch) for batch in wave] for wave in waves] == sizes


def test_without_writes_there_is_no_transaction() -> None:
    assert plan.plan_waves([]) == []
    assert plan.plan_waves(planned(deployment(), stored(deployment()))) == []


def problems(loaded: list[LoadedObject], *existing: ApiObject) -> list[str]:
    there: dict[ObjectKey, ApiObject] = {ObjectKey(obj.kind, obj.name): obj for obj in existing}
    return [str(problem) for problem in plan.find_refusals(loaded, there)]


def test_an_object_that_is_being_deleted_is_refused() -> None:
    gone = stored(deployment(), deletion_timestamp=NOW)
    assert problems(read(deployment()), gone) == [
        "standard input:5:9: ModelDeployment/qwen: metadata.name: is being deleted. Wait for it, "
        "then apply again: fleetctl wait modeldeployment/qwen --for=delete"
    ]


def test_an_object_too_large_for_the_store_is_refused() -> None:
    with pytest.raises(ManifestErrors) as caught:
        planned(deployment(meta=f"  annotations: {{a: {'x' * 2**20}}}\n"))
    message = str(caught.value)
    assert message.startswith("standard input:2:1: ModelDeployment/qwen: takes 1,0")
    assert message.endswith(
        " bytes in the store; at most 716,800 are allowed. Shorten its annotations"
    )


def test_a_difference_names_every_field() -> None:
    before = stored(deployment(meta="  labels: {a: b}\n", rest="  servedNames: [x]\n"))
    [after] = read(
        deployment(
            replicas=2, meta="  labels: {c: d}\n", rest="  servedNames: [x, y]\n" + in_pool()
        )
    )
    difference = diff.diff(before, after.obj)
    assert difference
    assert difference.changes == (
        FieldChange(path="metadata.labels.a", old="b", new=None),
        FieldChange(path="metadata.labels.c", old=None, new="d"),
        FieldChange(path="spec.servedNames", old=["x"], new=["x", "y"]),
        FieldChange(path="spec.replicas", old=1, new=2),
        FieldChange(path="spec.placement.pools", old=[], new=["studio"]),
    )


@pytest.mark.parametrize(("old", "new"), [("", "  labels: {c: d}\n"), ("  labels: {c: d}\n", "")])
def test_an_added_or_removed_mapping_is_listed_by_its_fields(old: str, new: str) -> None:
    [after] = read(deployment(meta=new))
    [change] = diff.diff(stored(deployment(meta=old)), after.obj).changes
    assert change.path == "metadata.labels.c"


def test_items_of_lists_are_compared_one_by_one() -> None:
    before = stored(route(backends="[{deployment: qwen}, {deployment: b}]"))
    [after] = read(route(backends="[{deployment: qwen, weight: 9}, {deployment: b}]"))
    assert diff.diff(before, after.obj).changes == (
        FieldChange(path="spec.backends[0].weight", old=1, new=9),
    )


NOTED = {"note": "x", RESTARTED_AT: "2026-01-01T00:00:00Z"}


def test_annotations_of_verbs_are_kept() -> None:
    before = stored(deployment(meta="  annotations: {note: x}\n"), annotations=NOTED)
    [same] = planned(deployment(meta="  annotations: {note: x}\n"), before)
    assert isinstance(same, plan.UnchangedObject)
    [change] = planned(deployment(meta="  annotations: {note: z}\n"), before)
    assert change.obj.metadata.annotations == {**NOTED, "note": "z"}
    [after] = read(deployment())
    difference = diff.diff(before, after.obj)
    assert difference.changes == (FieldChange(path="metadata.annotations.note", old="x", new=None),)
    assert "restarted-at" not in "".join(
        line for line in diff.diff_text(before, after.obj).splitlines() if line[0] in "+-"
    )


def test_annotations_of_verbs_may_be_repeated_but_not_changed() -> None:
    before = stored(deployment(meta="  annotations: {note: x}\n"), annotations=NOTED)
    said = f"  annotations: {{{RESTARTED_AT}: '2026-01-01T00:00:00Z', note: x}}\n"
    assert problems(read(deployment(meta=said)), before) == []
    assert isinstance(planned(deployment(meta=said), before)[0], plan.UnchangedObject)
    older = deployment(meta=f"  annotations: {{{RESTARTED_AT}: '2025-01-01T00:00:00Z'}}\n")
    assert problems(read(older), before) == [
        'standard input:6:37: ModelDeployment/qwen: metadata.annotations["fleet/restarted-at"]: is '
        "written by fleetctl's verbs, and is currently 2026-01-01T00:00:00Z. Remove it from the manifest: the current value is kept"
    ]
    [message] = problems(read(older), stored(deployment()))
    assert "and is currently not set. Remove it" in message
    assert problems(read(older)) == []


def test_a_new_object_differs_in_every_field() -> None:
    [after] = read(pool())
    assert [change.path for change in diff.diff(None, after.obj).changes] == [
        "apiVersion",
        "kind",
        "metadata.name",
        "spec.nodes",
        "spec.priority",
    ]
    assert diff.diff_text(None, after.obj).startswith(
        "--- /dev/null\n+++ NodePool/studio (applied)\n@@ -0,0 +1,8 @@\n+apiVersion: fleet/v1alpha1\n"
    )


def test_the_text_is_a_unified_diff() -> None:
    [after] = read(deployment(replicas=2))
    assert diff.diff_text(stored(deployment()), after.obj) == (
        "--- ModelDeployment/qwen (now)\n"
        "+++ ModelDeployment/qwen (applied)\n"
        "@@ -7,7 +7,7 @@\n"
        "     path: models/qwen\n"
        "     adapters: []\n"
        "   servedNames: []\n"
        "-  replicas: 1\n"
        "+  replicas: 2\n"
        "   contextLength: 4096\n"
        "   concurrency: Auto\n"
        "   prefixes: []\n"
    )
