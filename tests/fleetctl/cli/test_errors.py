"""Invalid input: a clear message, the right exit code, and nothing written."""

import os
import signal
from pathlib import Path

import pytest

from fleetctl.cli.errors import from_store_error
from store.errors import PermissionDeniedError
from tests.support.fleet import Fleet, fleetctl
from tests.support.fleetctl_runner import MemoryFleet

GOOD = "apiVersion: fleet/v1alpha1\nkind: ModelDeployment\nmetadata: {name: a}\n"
SPEC = "spec: {model: {path: m}}\n"

# A manifest, and the words that its error must contain: the place, the problem and the cure.
BAD = [
    pytest.param("a: [1,\n", ["standard input:", "is not YAML"], id="not-yaml"),
    pytest.param("\tkind: x\n", ["standard input:1:1", "tab"], id="tab"),
    pytest.param(
        GOOD + "spec: {model: {path: m}, replicas: two}\n",
        ["standard input:4:", "ModelDeployment/a", "spec.replicas", "integer", '"two"'],
        id="wrong-type",
    ),
    pytest.param(
        GOOD.replace("ModelDeployment", "ModelDeploymnet") + SPEC,
        ["standard input:2:7", "ModelDeploymnet", "ModelDeployment"],
        id="unknown-kind",
    ),
    pytest.param(
        GOOD + "spec: {model: {path: m}, replica: 2}\n",
        ["spec.replica", "unknown", "replicas"],
        id="unknown-field",
    ),
    pytest.param(
        "apiVersion: fleet/v1alpha1\nkind: ShardGroup\nmetadata: {name: g}\n"
        "spec: {members: [{node: a}, {node: b}], reservation: Exclusiv}\n",
        ["spec.reservation", "Exclusiv", "Exclusive"],
        id="unknown-enum",
    ),
    pytest.param(
        f"{GOOD}{SPEC}---\n{GOOD}{SPEC}",
        ["ModelDeployment/a", "first at standard input:1"],
        id="duplicate-names",
    ),
    pytest.param(
        "apiVersion: fleet/v1alpha1\nkind: Replica\nmetadata: {name: a}\nspec: {}\n",
        ["Replica", "reconciler"],
        id="a-kind-of-the-fleet's",
    ),
    pytest.param(
        GOOD + "spec: {model: {path: ../etc}}\n", ["spec.model.path", "'..'"], id="traversal"
    ),
]


@pytest.mark.etcd
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("text", "expected"), BAD)
async def test_a_bad_manifest_writes_nothing(
    shared_fleet: MemoryFleet, tmp_path: Path, text: str, expected: list[str]
) -> None:
    before = await revision(shared_fleet)
    # A valid object next to the invalid one is not written either.
    good = "apiVersion: fleet/v1alpha1\nkind: NodePool\nmetadata: {name: p}\nspec: {nodes: [n]}\n"
    (tmp_path / "good.yaml").write_text(good)
    done = await shared_fleet.ctl(
        "apply", "-f", str(tmp_path / "good.yaml"), "-f", "-", stdin=text.encode()
    )
    assert done.code == 1
    assert done.err.startswith("error: nothing was written:")
    for word in expected:
        assert word in done.err
    assert await revision(shared_fleet) == before


async def revision(fleet: MemoryFleet) -> int:
    return (await fleet.store.status()).revision


@pytest.mark.timeout(180)
async def test_a_manifest_of_a_hundred_megabytes_is_refused_quickly(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    done = await fleetctl("apply", "-f", str(path), "--etcd", "unix:/nowhere")
    assert done.code == 1
    assert "huge.yaml" in done.err
    assert "104,857,600 bytes; the limit is 4,194,304 bytes" in done.err


@pytest.mark.timeout(180)
async def test_empty_manifests() -> None:
    done = await fleetctl("apply", "-f", "-", "--etcd", "unix:/nowhere")
    assert done.code == 1
    assert "standard input" in done.err


@pytest.mark.timeout(180)
async def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    for name in ("missing.yaml", "empty", "loop.yaml"):
        done = await fleetctl("apply", "-f", str(tmp_path / name), "--etcd", "unix:/nowhere")
        assert done.code == 1
        assert name in done.err
        assert done.err.count("\n") < 5


@pytest.mark.timeout(180)
@pytest.mark.parametrize("etcd", ["unix:/nowhere/sock", "http://127.0.0.1:1"])
async def test_etcd_unreachable(etcd: str) -> None:
    done = await fleetctl("get", "nodes", "--etcd", etcd)
    assert done.code == 1
    assert done.err.startswith("error: etcd at ")
    assert "Is the fleet up?" in done.err


@pytest.mark.etcd
@pytest.mark.timeout(180)
async def test_etcd_that_does_not_answer(store: Fleet) -> None:
    pid = store.etcd.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        done = await store.ctl("get", "nodes", limit_s=20)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert done.code == 1
    assert "no answer" in done.err


@pytest.mark.timeout(180)
async def test_no_fleet() -> None:
    done = await fleetctl("get", "nodes")
    assert done.code == 1
    assert "`fleetctl up` starts a fleet" in done.err


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("get", "nodse"), "did you mean nodes?"),
        (("get", "nodes/a", "b"), "KIND/NAME"),
        (("get", "nodes", "-o", "yml"), "yaml"),
        (("wait", "md/a", "--for=ready"), "condition=Available"),
        (("wait", "md/a", "--for=delete", "--timeout=soon"), "30s"),
        (("delete",), "which objects? Give KIND NAME"),
        (("delete", "md"), "Give their names"),
        (("apply",), "--filename"),
        (("aply",), "aply"),
        (("get", "md", "--etcd", "ftp://x"), "http://HOST:PORT"),
    ],
)
async def test_misused_flags(words: tuple[str, ...], expected: str) -> None:
    done = await fleetctl(*words)
    assert done.code == 2
    assert expected in done.err


def test_a_denial_says_how_to_become_an_administrator() -> None:
    """Fleets of `up --join` give identities, fleets with an etcd of their own have users."""
    told = str(from_store_error(PermissionDeniedError("etcd denies this")))
    assert "`fleetctl token create --role admin`" in told
    assert "`fleetctl init-auth`" in told
