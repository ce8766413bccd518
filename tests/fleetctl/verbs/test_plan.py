"""plan and explain placement without a reconciler: output, and that nothing is written."""

import json
from pathlib import Path

import pytest

from insight.placement import node_tables
from reconciler.deployments.explain import NodeExplanation
from schemas import sizes
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeSpec, Taint
from store import codec
from store.port import Transport
from tests.support.fleetctl_manifests import put_replica
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.hub import REPO, StandInHub
from tests.support.hub_repositories import servable_files
from tests.support.model_folders import ADAPTER_CONFIG as ADAPTER
from tests.support.model_folders import ADAPTER_TENSORS as TENSORS
from tests.support.model_folders import CONFIG, safetensors
from tests.support.modelscope import StandInModelScope
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.world import deployment

pytestmark = pytest.mark.timeout(120)

TAINT = Taint(key="owner", value="anna", effect="NoSchedule")


@pytest.fixture(scope="module")
async def fleet(shared_fleet: MemoryFleet, shared_transport: Transport) -> MemoryFleet:
    """Return a fleet of six nodes, one of which runs one of two replicas of qwen."""
    for name, gib, chip, spec in (
        ("mac-1", 24, "Apple M4", NodeSpec()),
        ("mac-2", 16, "Apple M4 Pro", NodeSpec()),
        ("mac-3", 8, "Apple M4", NodeSpec(unschedulable=True)),
        ("mac-4", 8, "Apple M4", NodeSpec()),
        ("mac-5", 8, "Apple M4", NodeSpec(taints=(TAINT,))),
        ("mac-6", 2, "Apple M4", NodeSpec()),
    ):
        node = Node(metadata=ObjectMeta(name=name, uid=f"uid-{name}", generation=1), spec=spec)
        status = node_status(name, memory_gib=gib, chip=chip)
        await shared_transport.commit([], [codec.put_spec(node), put_node(name, status)])
        if name != "mac-4":
            await shared_transport.commit([], [put_lease(name)])
    owner = deployment(name="qwen", replicas=2)
    await shared_transport.commit([], [codec.put_spec(owner), put_replica(owner, 0, "mac-1")])
    return shared_fleet


REFUSED = (
    "1 too small even when empty (need 2.8 GiB, the largest has 2.0 GiB), 1 cordoned, 1 NotReady, 1 tainted (it has the taint "
    "owner=anna:NoSchedule, which spec.placement.tolerations does not name)"
)
EXPLAINED = f"""\
modeldeployment/qwen: 1 of 2 replicas are placed; for one more, 2/6 nodes fit: {REFUSED}

Nodes that fit, best first:
NODE    SCORE   SPEED x10   POOL x10   TAINTS x20   HEADROOM x20   SIBLINGS x50   SPREADING x40   MOVEMENT x5   NEED      FREE       PREFERRED   REPLICAS
mac-2   83.7    33          0          100          82             100            100             0             2.8 GiB   16.0 GiB   yes         -
mac-1   66.6    15          0          100          84             50             100             0             2.8 GiB   23.0 GiB   yes         qwen-0

Nodes that do not fit:
NODE    REASON               NEED      HAVE      REPLICAS   MESSAGE
mac-3   NodeCordoned         -         -         -          it is cordoned (spec.unschedulable)
mac-4   NodeNotReady         -         -         -          its agent does not renew its lease
mac-5   NodeTainted          -         -         -          it has the taint owner=anna:NoSchedule, which spec.placement.tolerations does not name
mac-6   InsufficientMemory   2.8 GiB   2.0 GiB   -          needs 2.8 GiB (weights 2.0 GiB, KV cache 32.0 MiB for 1 x 1024 tokens, activations 62.5 MiB, process 768 MiB), has 2.0 GiB free of 2.0 GiB

On mac-2 it would use 2.8 GiB: weights 2.0 GiB, KV cache 32.0 MiB for 1 x 1024 tokens, activations 62.5 MiB, process 768 MiB
"""


async def test_explain_placement(fleet: MemoryFleet, shared_transport: Transport) -> None:
    before = (await shared_transport.status()).revision
    done = await fleet.ctl("explain", "placement", "qwen")
    assert (done.code, done.out, done.err) == (0, EXPLAINED, "")
    tree = json.loads((await fleet.ctl("explain", "placement", "md/qwen", "-o", "json")).out)
    assert tree["summary"] == f"2/6 nodes fit: {REFUSED}"
    best, second, *others = tree["nodes"]
    assert (best["node"], best["fits"], best["memory"]["totalBytes"]) == ("mac-2", True, 3051880448)
    assert {"name": "siblings", "score": 50.0, "weight": 50} in second["parts"]
    assert second["replicas"] == ["qwen-0"]
    assert others[-1]["refusal"]["need"] == 3051880448
    printed = await fleet.ctl("explain", "placement", "md", "qwen", "-o", "yaml")
    assert printed.out.startswith("deployment: qwen\nsummary: ")
    assert (await shared_transport.status()).revision == before


def test_members_of_a_group_that_cannot_be_formed_are_not_said_to_fit() -> None:
    explanations = [
        NodeExplanation(node=name, room_bytes=8 * 2**30, score=50.0) for name in ("a", "b")
    ]
    text = "\n".join(node_tables(explanations, {}))
    assert "Nodes that fit" not in text
    assert "cannot take the replica as a whole" in text
    assert "0 B" not in text


PLANNED = """
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: qwen}
spec: {model: {path: qwen}, replicas: 2, contextLength: 2048, concurrency: 1}
---
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: big}
spec: {model: {path: qwen}, replicas: 4, priority: 10, resources: {memory: 14Gi}}
"""

PLACED = """\

Placement, highest priority first:
REPLICA   CHANGE     FROM    TO      CONCURRENCY   NEED       WEIGHTS   KV CACHE   ACTIVATIONS   PROCESS   WHY
big-0     new        -       mac-1   4             14.0 GiB   2.0 GiB   512 MiB    62.5 MiB      768 MiB   the override of spec.resources.memory applies
big-1     new        -       mac-2   4             14.0 GiB   2.0 GiB   512 MiB    62.5 MiB      768 MiB   the override of spec.resources.memory applies
big-2     new        -       -       -             -          -         -          -             -         no node fits
big-3     new        -       -       -             -          -         -          -             -         no node fits
qwen-0    replaced   mac-1   mac-1   1             2.9 GiB    2.0 GiB   64.0 MiB   62.5 MiB      768 MiB   it runs an older version
qwen-1    new        -       mac-1   1             2.9 GiB    2.0 GiB   64.0 MiB   62.5 MiB      768 MiB   -

modeldeployment/big: 2 replicas cannot be placed: 0/6 nodes fit: 3 short of memory (need 14.0 GiB, best has 9.0 GiB), 1 cordoned, 1 NotReady, 1 tainted (it has the taint owner=anna:NoSchedule, which spec.placement.tolerations does not name)
"""


BLOCKS = """\

Macs that change, 2 of 6:

mac-1  Apple M4, 24.0 GiB for models
- qwen-0     1.0 GiB    4%  ░░
+ big-0     14.0 GiB   58%  ███████████████████████
+ qwen-0     2.9 GiB   12%  █████
+ qwen-1     2.9 GiB   12%  █████
  free       4.3 GiB   18%  ·······

mac-2  Apple M4 Pro, 16.0 GiB for models
+ big-1     14.0 GiB   88%  ███████████████████████████████████
  free       2.0 GiB   12%  ·····
"""


async def test_plan_shows_differences_and_places_and_writes_nothing(
    fleet: MemoryFleet, shared_transport: Transport
) -> None:
    before = (await shared_transport.status()).revision
    done = await fleet.ctl("plan", "-f", "-", stdin=PLANNED.encode())
    assert (done.code, done.err) == (1, "")
    diff = await fleet.ctl("diff", "-f", "-", stdin=PLANNED.encode())
    assert done.out == diff.out + PLACED + BLOCKS
    assert "-  contextLength: 1024\n+  contextLength: 2048\n" in diff.out
    assert (await shared_transport.status()).revision == before


@pytest.mark.parametrize(
    ("stand_in", "source", "flag"),
    [
        (StandInHub, "huggingface", "--hub-endpoint"),
        (StandInModelScope, "modelscope", "--modelscope-endpoint"),
    ],
)
async def test_a_hub_model_is_looked_up_and_proven_before_it_is_applied(
    fleet: MemoryFleet, tmp_path: Path, stand_in: type[StandInHub], source: str, flag: str
) -> None:
    files = servable_files()
    hub = stand_in(repos={REPO: files})
    manifest = tmp_path / "hub.yaml"
    manifest.write_text(
        "apiVersion: fleet/v1alpha1\nkind: ModelDeployment\nmetadata: {name: hub}\n"
        f"spec: {{model: {{hub: {{repo: {REPO}, source: {source}}}}}, contextLength: 256}}\n"
    )
    words = ("plan", "-f", str(manifest), flag)
    async with hub.serve():
        done = await fleet.ctl(*words, hub.endpoint)
        assert done.code == 1, done.err
        (row,) = [line for line in done.out.splitlines() if line.startswith("hub-0")]
        assert row.split()[1:4] == ["new", "-", "mac-2"]
        assert "DOWNLOAD" in done.out
        fetched = sum(len(files[name]) for name in files if name != "README.md")
        assert sizes.show(fetched) in row
        assert hub.body_bytes > 0
        refused = await fleet.ctl(*words, f"{hub.endpoint}/nowhere")
        assert refused.code == 1
        assert "warning: modeldeployment/hub is not planned: NotFound: " in refused.err


async def test_draft_model_and_adapter_are_parts_of_the_proof(
    fleet: MemoryFleet, tmp_path: Path
) -> None:
    manifest = (
        b"apiVersion: fleet/v1alpha1\nkind: ModelDeployment\nmetadata: {name: fresh}\n"
        b"spec: {model: {path: tiny, adapter: law, draft: {path: small}}, contextLength: 64, "
        b"kvCache: {prefixBytes: 1Gi}}\n"
    )
    for name in ("tiny", "small"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
        (tmp_path / name / "model.safetensors").write_bytes(safetensors())
    (tmp_path / "law").mkdir()
    (tmp_path / "law" / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (tmp_path / "law" / "adapters.safetensors").write_bytes(safetensors(TENSORS))
    done = await fleet.ctl("plan", "-f", "-", "--models-dir", str(tmp_path), stdin=manifest)
    head, row = (
        next(line for line in done.out.splitlines() if line.startswith(word))
        for word in ("REPLICA", "fresh-0")
    )
    assert "PROCESS   EXTRAS" in head
    assert "prefix cache 1.0 GiB, adapter 600 B, draft model " in row
    unseen = await fleet.ctl("plan", "-f", "-", stdin=manifest)
    assert "3 yet to inspect the model" in unseen.out


AUTO = """
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: auto}
spec: {model: {path: qwen}, contextLength: 4096}
"""


async def test_the_number_of_requests_by_hardware_is_shown(
    fleet: MemoryFleet, tmp_path: Path
) -> None:
    (tmp_path / "auto.yaml").write_text(AUTO)
    done = await fleet.ctl("plan", "-f", str(tmp_path / "auto.yaml"))
    assert (done.code, done.err) == (1, "")  # as `diff`: something changes
    [row] = [line.split() for line in done.out.splitlines() if line.startswith("auto-0 ")]
    # 120 GB/s of a plain M4: 8.4 GB in a tenth of a second, less 2 GiB of weights, for 128 MiB of each request.
    assert row[3:5] == ["mac-1", "46"]
