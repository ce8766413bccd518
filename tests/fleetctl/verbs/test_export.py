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
from tests.support.fleet import Fleet
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
    made = plan_files([bare, node, of_git])
    assert [str(file.path) for file in made.files] == ["nodepools/p.yaml", "nodes/mac-2.yaml"]
    assert made.files[1].text == (
        "apiVersion: fleet/v1alpha1\nkind: Node\nmetadata:\n  name: mac-2\nspec:\n  unschedulable: true\n"
    )
    assert made.notes == (
        "nodepool/p belongs to gitsource/berlin; apply it from there, or the change is refused",
        "left out: 1 node, which has no labels, taints or settings of their own",
    )
    assert is_bare(bare)
    there = ["nodes/mac-2.yaml", "nodes/old.yaml", "docs/a.yaml", "nodes/README.md"]
    assert stale_files(map(PurePosixPath, there), made.files) == [PurePosixPath("nodes/old.yaml")]


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


async def test_round_trip(fleet: MemoryFleet, tmp_path: Path) -> None:
    """An export applied to an empty fleet leaves no difference, and exports the same files again."""
    folder = tmp_path / "out"
    done = await fleet.ctl("apply", "-f", str(EXAMPLES))
    assert done.code == 0, done.err
    done = await fleet.ctl("export", "-o", str(folder))
    assert done.code == 0, done.err
    assert f"{folder}/modeldeployments/qwen.yaml written\n" in done.out
    written = {path.relative_to(folder): path.read_text() for path in folder.rglob("*.yaml")}
    other = MemoryFleet()
    for verb, code in (("diff", 1), ("apply", 0), ("diff", 0)):
        done = await other.ctl(verb, "-R", "-f", str(folder))
        assert done.code == code, done.out + done.err
    done = await other.ctl("diff", "-f", str(EXAMPLES))
    assert done.code == 0, done.out + done.err
    done = await other.ctl("export", "-o", str(folder))
    assert all(line.endswith(" unchanged") for line in done.out.splitlines()), done.out
    assert done.code == 0, done.err
    await _edges(other, folder)
    assert {
        path.relative_to(folder): path.read_text() for path in folder.rglob("*.yaml")
    } == written


async def _edges(fleet: MemoryFleet, folder: Path) -> None:
    """Check that existing files are kept, and overwritten only with --force."""
    path = folder / "nodepools" / "studio.yaml"
    whole = path.read_text()
    await _comments_stay(fleet, folder, path)
    assert path.read_text() != whole
    path.write_text("# mine\n")
    (folder / "nodepools" / "old.yaml").write_text("# old\n")
    done = await fleet.ctl("export", "-o", str(folder))
    assert done.code == 1
    assert done.err == (
        f"error: nothing was written: {path} exists and differs from the fleet. Use --force to "
        "overwrite (comments of fields that remain are kept), or choose another folder\n"
    )
    assert path.read_text() == "# mine\n"
    done = await fleet.ctl("export", "-o", str(folder), "--force")
    assert f"{path} written\n" in done.out
    assert (
        done.err
        == f"{folder}/nodepools/old.yaml belongs to no object in the fleet; delete it if it is obsolete\n"
    )
    (folder / "nodepools" / "old.yaml").unlink()
    done = await fleet.ctl("export", "--kind", "md", "-l", "team=research")
    assert [item.obj.name for item in read(done.out)] == ["qwen"]
    done = await fleet.ctl("export", "--kind", "replicas")
    assert "the fleet writes replicas itself; export one of modeldeployments, " in done.err
    done = await fleet.ctl("export", "--force", "hostfile", "studios")
    assert "put the flags of `export hostfile` after hostfile" in done.err
    path.unlink()
    path.mkdir()
    done = await fleet.ctl("export", "-o", str(folder))
    assert done.err == f"error: cannot write {path}: Is a directory\n"
    path.rmdir()
    assert (await fleet.ctl("export", "-o", str(folder))).code == 0


async def _comments_stay(fleet: MemoryFleet, folder: Path, path: Path) -> None:
    """Check that a file with other words but the same values is left alone, and that an update keeps comments."""
    own = "# ours\n" + path.read_text().replace("spec:", "spec:  # asked for by Anna")
    path.write_text(own)
    done = await fleet.ctl("export", "-o", str(folder))
    assert (done.code, done.err) == (0, "")
    assert path.read_text() == own
    path.write_text(own.replace("priority:", "# gone\n  minChips: 3\n  priority:"))
    done = await fleet.ctl("export", "-o", str(folder), "--force")
    assert f"{path} written\n" in done.out
    assert path.read_text() == own
    assert done.err == f"{path}: comment of a field that is gone: # gone\n"


async def test_an_empty_fleet_has_nothing_to_export(shared: Fleet) -> None:
    done = await shared.ctl("export")
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: there is nothing to export: no object of these kinds is declared\n"
