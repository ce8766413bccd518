"""The verb `fleetctl export`: clean manifests that recreate the same objects in an empty fleet."""

import json
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetctl.verbs.export import plan_files, stale_files
from manifests.declaration import clean_manifest, is_bare
from manifests.trees import spec_of
from manifests.yaml import core_schema
from schemas.kinds import KINDS
from schemas.meta import APPLY_SET, CHANGE_CAUSE, RESTARTED_AT, ApiObject, ObjectMeta
from schemas.node import Node, NodeSpec
from schemas.pools import NodePool, NodePoolSpec, NodeSelector, ReservedResources
from tests.fleetctl.conftest import Golden
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.manifests_texts import read
from tests.support.sampling import samples
from tests.support.schemas_strategies import objects
from tests.support.world import deployment

EXAMPLES = Path(__file__).parents[3] / "examples" / "manifests"
THEIRS = [kind for kind in KINDS if kind.written_by_users]


def pool(**fields: object) -> NodePool:
    return NodePool(metadata=ObjectMeta(name="p"), spec=NodePoolSpec(**fields))  # type: ignore[arg-type]  # each test its own


@settings(max_examples=samples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_manifest_contains_every_declared_field(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(THEIRS))
    obj = data.draw(objects(kind.type))
    assert isinstance(obj, ApiObject)
    [loaded_object] = read(core_schema.dump(clean_manifest(obj)))
    assert spec_of(loaded_object.obj) == spec_of(obj)
    assert loaded_object.obj.metadata.labels == obj.metadata.labels


def test_defaults_and_managed_fields_are_left_out() -> None:
    notes = {RESTARTED_AT: "now", APPLY_SET: "gitsource/a", CHANGE_CAUSE: "faster", "owner": "me"}
    meta = ObjectMeta(name="qwen", annotations=notes, uid="u", generation=3, finalizers=("a",))
    obj = deployment().model_copy(update={"metadata": meta})
    assert clean_manifest(obj)["metadata"] == {
        "name": "qwen",
        "annotations": {CHANGE_CAUSE: "faster", "owner": "me"},
    }
    assert "rollout" not in json.dumps(clean_manifest(obj))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        pytest.param(pool(selector=NodeSelector()), {"selector": {}}, id="every-mac"),
        pytest.param(
            pool(nodes=("a",), reserved=ReservedResources(memory="0")),
            {"nodes": ["a"], "reserved": {"memory": "0", "disk": "0"}, "priority": 0},
            id="a-default-that-must-be-said",
        ),
    ],
)
def test_a_meaningful_default_is_kept(spec: NodePool, says: dict[str, object]) -> None:
    assert clean_manifest(spec)["spec"] == says


def test_files_are_named_by_kind_and_name_with_notes_on_omissions() -> None:
    bare = Node(metadata=ObjectMeta(name="mac-1"))
    node = Node(metadata=ObjectMeta(name="mac-2"), spec=NodeSpec(unschedulable=True))
    of_git = pool(nodes=("a",))
    of_git = of_git.model_copy(
        update={"metadata": ObjectMeta(name="p", annotations={APPLY_SET: "gitsource/berlin"})}
    )
    files, notes = plan_files([bare, node, of_git])
    assert [str(file.path) for file in files] == ["nodepools/p.yaml", "nodes/mac-2.yaml"]
    assert files[1].text == (
        "apiVersion: fleet/v1alpha1\nkind: Node\nmetadata:\n  name: mac-2\nspec:\n  unschedulable: true\n"
    )
    assert notes == [
        "nodepool/p belongs to gitsource/berlin; apply it from there, or the change is refused",
        "left out: 1 node, which has no labels, taints or settings of their own",
    ]
    assert is_bare(bare)
    there = ["nodes/mac-2.yaml", "nodes/old.yaml", "docs/a.yaml", "nodes/README.md"]
    assert stale_files(map(PurePosixPath, there), files) == [PurePosixPath("nodes/old.yaml")]


async def test_a_format_is_no_folder(
    fleet: MemoryFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-o yaml` is a format in every other command, and must not fill a folder of that name."""
    monkeypatch.chdir(tmp_path)
    await fleet.ctl("apply", "-f", str(EXAMPLES))
    done = await fleet.ctl("export", "-o", "yaml")
    assert (done.code, list(tmp_path.iterdir())) == (2, [])
    assert "manifests are YAML, and are printed without -o" in done.err
    assert (await fleet.ctl("export", "-o", "./yaml")).code == 0
    assert (tmp_path / "yaml" / "modeldeployments" / "qwen.yaml").is_file()


async def test_an_export_is_no_difference_and_keeps_comments(golden: Golden) -> None:
    await golden("worlds/export", EXAMPLES=str(EXAMPLES))


async def test_an_export_recreates_the_fleet(fleet: MemoryFleet, tmp_path: Path) -> None:
    other, folder = MemoryFleet(), str(tmp_path / "out")
    for ctl, words, code in (
        (fleet.ctl, ("apply", "-f", str(EXAMPLES)), 0),
        (fleet.ctl, ("export", "-o", folder), 0),
        (other.ctl, ("diff", "-R", "-f", folder), 1),
        (other.ctl, ("apply", "-R", "-f", folder), 0),
        (other.ctl, ("diff", "-f", str(EXAMPLES)), 0),
    ):
        done = await ctl(*words)
        assert done.code == code, done.out + done.err
