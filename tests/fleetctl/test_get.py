"""`fleetctl get` on a real etcd: every format, every way of choosing, what it says of mistakes, and what it imports."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from manifests.load import load_objects
from store import keys
from store.port import Put, Transport
from tests.support.fleet import Done, Fleet, fleetctl
from tests.support.store_tcp_etcd import TcpEtcd

pytestmark = pytest.mark.etcd

MANIFESTS = """
apiVersion: fleet/v1alpha1
kind: NodePool
metadata: {name: studio}
spec: {nodes: [mac-1]}
---
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: qwen, labels: {team: a, lab.io/rack: "7"}}
spec: {model: {path: qwen3}, servedNames: [standard], replicas: 2, placement: {pools: [studio]}}
---
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: llama-10, labels: {team: b}}
spec: {model: {path: llama}}
---
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: llama-2}
spec: {model: {path: llama}, replicas: 3}
"""
# Long ago, so that ages are of this test's making.
LONG_AGO = b'"creationTimestamp":"2000-01-01T00:00:00Z"'


@pytest.fixture(scope="module")
async def fleet(shared: Fleet, transport: Transport) -> Fleet:
    """Return a store with some objects in it, which no test changes."""
    await shared.applied(MANIFESTS)
    await transport.commit(
        [],
        [
            Put(
                key=f"{keys.ENDPOINT_PREFIX}mac-1/qwen-0",
                value=b'{"apiVersion":"fleet/v1alpha1","kind":"Endpoint","metadata":{"name":"qwen-0"},"spec":'
                b'{"deployment":"qwen","node":"mac-1","url":"http://10.0.0.5:4100","servedNames":["qwen","standard"]}}',
            ),
            Put(
                key=keys.spec_key("Node", "mac-1"),
                value=b'{"apiVersion":"fleet/v1alpha1","kind":"Node","metadata":{"name":"mac-1","uid":"n1","labels":{"lab":"x"},'
                + LONG_AGO
                + b'},"spec":{"draining":true}}',
            ),
            Put(key=keys.node_lease_key("mac-1"), value=b"{}"),
            Put(
                key=f"{keys.API_KEY_PREFIX}ci",
                value=b'{"name":"ci","hash":"00ff","created":"2000-01-01T00:00:00Z","models":["qwen"]}',
            ),
        ],
    )
    return shared


async def good(fleet: Fleet, *words: str) -> str:
    done = await fleet.ctl("get", *words)
    assert (done.code, done.err) == (0, "")
    return done.out


async def test_a_table_is_as_kubectl_prints_it(fleet: Fleet) -> None:
    out = await good(fleet, "endpoints")
    assert out == (
        "NAME     NODE    URL                    SERVED NAMES\n"
        "qwen-0   mac-1   http://10.0.0.5:4100   qwen,standard\n"
    )
    assert await good(fleet, "ep", "--no-headers") == (
        "qwen-0   mac-1   http://10.0.0.5:4100   qwen,standard\n"
    )
    lines = (await good(fleet, "md", "-L", "team,lab.io/rack", "--show-labels")).splitlines()
    assert lines[0].split() == ["NAME", "READY", "AVAILABLE", "AGE", "TEAM", "RACK", "LABELS"]
    assert lines[1].split()[4:] == ["b", "team=b"]
    assert lines[2].split()[4:] == ["<none>"]
    assert lines[3].split()[4:] == ["a", "7", "lab.io/rack=7,team=a"]
    node = (await good(fleet, "nodes", "-o", "wide")).splitlines()
    assert node[1].split()[:2] == ["mac-1", "Ready,Draining"]


async def test_several_kinds_have_a_table_each(fleet: Fleet) -> None:
    out = await good(fleet, "ep,np", "--no-headers")
    first, between, second = out.splitlines()
    assert first.split()[0] == "endpoint/qwen-0"
    assert between == ""
    assert second.split()[0] == "nodepool/studio"
    names = "modeldeployment/qwen\nnode/mac-1\nmodeldeployment/llama-2\n"
    assert sorted(
        (await good(fleet, "md/qwen", "node/mac-1", "md/llama-2", "-o", "name")).split()
    ) == sorted(names.split())
    of_all = (await good(fleet, "all", "-o", "name")).split()
    assert of_all == [
        *("modeldeployment/llama-10", "modeldeployment/llama-2", "modeldeployment/qwen"),
        *("nodepool/studio", "node/mac-1", "endpoint/qwen-0"),
    ]
    assert (await good(fleet, "md", "qwen", "llama-2", "-o", "name")).split() == [
        *("modeldeployment/qwen", "modeldeployment/llama-2")
    ]
    assert (await good(fleet, "np", "--show-kind", "--no-headers")).startswith("nodepool/studio ")


async def test_whole_objects_are_printed_as_they_can_be_applied(
    fleet: Fleet, tmp_path: Path
) -> None:
    one = json.loads(await good(fleet, "md/qwen", "-o", "json"))
    assert list(one) == ["apiVersion", "kind", "metadata", "spec"]
    assert "managedFields" not in one["metadata"]
    several = json.loads(await good(fleet, "md", "-o", "json"))
    assert (several["kind"], len(several["items"])) == ("List", 3)
    assert one in several["items"]
    nothing = json.loads(await good(fleet, "replicas", "-o", "json"))
    assert nothing == {"apiVersion": "v1", "kind": "List", "items": []}
    text = await good(fleet, "md/qwen", "-o", "yaml")
    assert text.startswith(
        "apiVersion: fleet/v1alpha1\nkind: ModelDeployment\nmetadata:\n  name: qwen\n"
    )
    file = tmp_path / "qwen.yaml"
    file.write_text(text)
    assert len(load_objects([str(file)])) == 1
    managed = json.loads(await good(fleet, "md/qwen", "-o", "json", "--show-managed-fields"))
    assert [entry["manager"] for entry in managed["metadata"]["managedFields"]] == ["fleetctl"]


async def test_templates(fleet: Fleet, tmp_path: Path) -> None:
    template = '{range .items[*]}{.metadata.name}{"\\t"}{.spec.replicas}{"\\n"}{end}'
    expected = "llama-10\t1\nllama-2\t3\nqwen\t2\n"
    assert await good(fleet, "md", "-o", f"jsonpath={template}") == expected
    assert await good(fleet, "md/qwen", "-o", "jsonpath={.spec.model.path}") == "qwen3"
    (tmp_path / "template").write_text(template)
    assert await good(fleet, "md", "-o", f"jsonpath-file={tmp_path / 'template'}") == expected
    table = "NAME       TEAM     NAMES\nllama-10   b        <none>\nllama-2    <none>   <none>\nqwen       a        "
    columns = "NAME:.metadata.name,TEAM:metadata.labels.team,NAMES:{.spec.servedNames[*]}"
    assert await good(fleet, "md", "-o", f"custom-columns={columns}") == f"{table}standard\n"
    (tmp_path / "columns").write_text("NAME TEAM\n.metadata.name .metadata.labels.team\n")
    file = f"custom-columns-file={tmp_path / 'columns'}"
    assert await good(fleet, "md/qwen", "-o", file, "--no-headers") == "qwen   a\n"


async def test_what_one_selects_by_is_printed_and_is_not_loaded_again(
    fleet: Fleet, tmp_path: Path
) -> None:
    labels = json.loads(await good(fleet, "node/mac-1", "-o", "json"))["metadata"]["labels"]
    assert labels == {"fleet/node": "mac-1", "lab": "x"}
    path = "jsonpath={.items[*].metadata.labels.fleet/deployment}"
    assert await good(fleet, "ep", "-l", "fleet/deployment=qwen", "-o", path) == "qwen"
    file = tmp_path / "node.yaml"
    file.write_text(await good(fleet, "node/mac-1", "-o", "yaml"))
    (loaded,) = load_objects([str(file)])
    assert loaded.obj.metadata.labels == {"lab": "x"}


async def test_what_manifests_hold_is_shown(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "some.yaml").write_text(MANIFESTS)
    names = await good(fleet, "-f", str(tmp_path), "-R", "-o", "name")
    assert names.split() == [
        *("nodepool/studio", "modeldeployment/qwen"),
        *("modeldeployment/llama-10", "modeldeployment/llama-2"),
    ]
    one = MANIFESTS.encode().split(b"---")[1]
    done = await fleet.ctl("get", "-f", "-", "-o", "jsonpath={.metadata.name}", stdin=one)
    assert done == Done(code=0, out="qwen", err="")
    absent = one.replace(b"name: qwen", b"name: qwem")
    done = await fleet.ctl("get", "-f", "-", stdin=absent)
    said = 'error: modeldeployments "qwem" not found; did you mean qwen?\n'
    assert done == Done(code=1, out="", err=said)


async def test_fields_that_are_empty_everywhere_can_be_selected_by(fleet: Fleet) -> None:
    for field in ("spec.deployment!=x", "metadata.labels.nobody!=a", "status.readyReplicas!=1"):
        done = await fleet.ctl("get", "md,rep", "--field-selector", field, "-o", "name")
        assert (done.code, len(done.out.split())) == (0, 3), done.err


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("-l", "team=a"), ["qwen"]),
        (("-l", "team in (a,b)"), ["llama-10", "qwen"]),
        (("-l", "!team"), ["llama-2"]),
        (("--field-selector", "spec.model.path=llama,metadata.name!=llama-2"), ["llama-10"]),
        (("--sort-by", ".metadata.name"), ["llama-2", "llama-10", "qwen"]),
        (("--sort-by", "{.spec.replicas}"), ["llama-10", "qwen", "llama-2"]),
        (("--sort-by", "metadata.labels.team"), ["llama-2", "qwen", "llama-10"]),
    ],
)
async def test_choosing_and_sorting(fleet: Fleet, words: tuple[str, ...], names: list[str]) -> None:
    out = await good(fleet, "md", *words, "-o", "name")
    assert [line.partition("/")[2] for line in out.splitlines()] == names


async def test_keys_are_printed_like_objects_without_their_hashes(fleet: Fleet) -> None:
    table = (await good(fleet, "apikeys")).splitlines()
    assert table[1].split()[:6] == ["ci", "qwen", "-", "-", "-", table[1].split()[5]]
    key = json.loads(await good(fleet, "ak/ci", "-o", "json"))
    assert int(key["metadata"].pop("resourceVersion")) > 0
    assert key == {
        "apiVersion": "fleet/v1alpha1",
        "kind": "ApiKey",
        "metadata": {"name": "ci", "creationTimestamp": "2000-01-01T00:00:00Z"},
        "spec": {"models": ["qwen"]},
    }
    assert await good(fleet, "ak", "-o", "jsonpath={.items[*].metadata.name}") == "ci"
    chosen = ("--field-selector", "metadata.name=ci,spec.isAdmin!=true")
    assert await good(fleet, "ak", *chosen, "-o", "name") == "apikey/ci\n"
    assert await good(fleet, "apikeys", "-o", "name") == "apikey/ci\n"


async def test_names_that_nobody_has_hide_no_others(fleet: Fleet) -> None:
    done = await fleet.ctl("get", "md", "qwem", "qwen", "nobody", "-o", "name")
    assert done == Done(
        code=1,
        out="modeldeployment/qwen\n",
        err='error: modeldeployments "qwem" not found; did you mean qwen?\n'
        'error: modeldeployments "nobody" not found\n',
    )
    ignored = await fleet.ctl("get", "md/qwem", "md/qwen", "-o", "name", "--ignore-not-found")
    assert ignored == Done(code=0, out="modeldeployment/qwen\n", err="")
    alone = await fleet.ctl("get", "node/nobody", "-o", "json")
    assert alone == Done(code=1, out="", err='error: nodes "nobody" not found\n')


async def test_nothing_is_no_error(fleet: Fleet) -> None:
    done = await fleet.ctl("get", "rep,sg")
    assert done == Done(code=0, out="", err="no replicas or shardgroups found\n")
    chosen = await fleet.ctl("get", "md", "-l", "team=nobody")
    assert chosen == Done(code=0, out="", err="no modeldeployments found\n")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("md", "-A"), 2, "fleets have no namespaces"),
        (("md", "-n", "default"), 2, "fleets have no namespaces"),
        (("mdd",), 2, "did you mean modeldeployments?"),
        (("md,",), 2, "a kind is empty"),
        (("md,,np",), 2, "a kind is empty"),
        (("md", ""), 2, "a name is empty"),
        ((), 2, "say what to show: KIND"),
        (("md", "-R"), 2, "give -f as well"),
        (("md", "-f", "/nowhere.yaml"), 2, "with -f, not both"),
        (("-f", "/nowhere.yaml"), 1, "/nowhere.yaml"),
        (("rep", "-o", "jsonpath={.items[0].metadata.name}"), 1, "array index out of bounds: index 0, length 0"),
        (("md", "--field-selector", "spec.replcas=1"), 1, "not supported: spec.replcas; did you mean spec.replicas?"),
        (("ep", "--field-selector", "spec.nod=mac-1"), 1, "did you mean spec.node?"),
        (("np,md", "--field-selector", "spec.model.pat=a"), 1, "did you mean spec.model.path?"),
        (("np,md", "--field-selector", "spec.model=a"), 1, "spec.model holds several values"),
        (("gs", "--field-selector", "status.conditions.type=Ready"), 1, "status.conditions holds several"),
        (("ak", "--field-selector", "spec.hash=a"), 1, "field label not supported: spec.hash"),
        (("all", "qwen"), 2, "`all` takes no names"),
        (("md/", "-o", "name"), 2, "md/ names nothing"),
        (("md/a", "b"), 2, "KIND/NAME KIND/NAME..., not both"),
        (("md", "qwen", "-l", "a=b"), 2, "not both"),
        (("md", "qwen", "--field-selector", "spec.a=b"), 2, "--field-selector, not both"),
        (("md", "-o", "jsn"), 2, "did you mean json?"),
        (("md", "-o", "yaml=x"), 2, "there is no output format 'yaml=x'"),
        (("md", "-o", "jsonpath"), 2, "-o jsonpath needs a value"),
        (("md", "-o", "jsonpath=.metadata.name"), 1, "write {.metadata.name}"),
        (("md", "-o", "jsonpath={.a"), 1, "expected }"),
        (("md", "-o", "jsonpath-file=/nowhere"), 1, "-o jsonpath-file=/nowhere: the file cannot be read"),
        (("md", "-o", "custom-columns=A"), 1, "'A' needs a title and a path"),
        (("md", "-o", "custom-columns=A:.b["), 1, "at character"),
        (("md", "--sort-by", ".spec.colour"), 1, "none of the objects has such a field"),
        (("md", "--field-selector", "colour=red"), 1, "write FIELD=value"),
        (("md", "--field-selector", "spec.servedNames=a"), 1, "holds several values"),
        (("md", "-l", "a b"), 1, "key notin (a,b)"),
        (("md", "-o", "name", "--show-labels"), 2, "--show-labels is for tables"),
        (("md", "--output-watch-events"), 2, "is for -w"),
        (("md,np", "-w"), 2, "one kind can be watched at a time"),
        (("apikeys", "-w"), 2, "API keys cannot be watched"),
        (("apikeys", "-l", "a=b"), 2, "API keys have no labels"),
    ],
)  # fmt: skip
async def test_mistakes_are_explained(
    fleet: Fleet, words: tuple[str, ...], code: int, said: str
) -> None:
    done = await fleet.ctl("get", *words)
    assert (done.code, done.out) == (code, ""), done.err
    assert said in done.err


async def test_a_custom_columns_file_of_another_form_is_refused(
    fleet: Fleet, tmp_path: Path
) -> None:
    (tmp_path / "columns").write_text("NAME TEAM\n.metadata.name\n")
    done = await fleet.ctl("get", "md", "-o", f"custom-columns-file={tmp_path / 'columns'}")
    assert done.code == 1
    assert "expected a line with titles and a line with as many paths" in done.err


async def test_it_imports_nothing_that_takes_long(fleet: Fleet) -> None:
    """Reading without pydantic, an event loop and gRPC is what makes it quick: see bench/cli.py."""
    code = (
        "import sys\n"
        "from fleetctl.__main__ import main\n"
        "main(standalone_mode=False)\n"
        "heavy = ('asyncio', 'pydantic', 'grpc', 'aiohttp', 'orjson', 'ssl', 'ruamel', 'tabulate', 'rich',\n"
        "         'importlib.metadata', 'typing_extensions', 'hashlib')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)\n"
    )
    words = ("get", "md", "-o", "yaml", "--etcd", str(fleet.etcd.address))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert out.startswith(b"apiVersion: v1\n")
    assert err == b"[]\n"


async def test_what_the_quick_way_does_not_understand_the_whole_way_decides(tmp_path: Path) -> None:
    async with TcpEtcd(tmp_path, "--enable-grpc-gateway=false") as etcd:
        done = await fleetctl("get", "md", "--etcd", etcd.url)
        assert done == Done(code=0, out="", err="no modeldeployments found\n")
