"""`fleetctl get`: formats, selection, errors and imports."""

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from manifests.load import load_objects
from store import keys
from store.errors import UnavailableError
from store.etcd.connect import connect
from store.port import Delete, Put, Transport
from tests.support.fleet import Done, Fleet
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.waiting import until

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
# Long ago, so that ages do not depend on the time of the test.
LONG_AGO = b'"creationTimestamp":"2000-01-01T00:00:00Z"'


@pytest.fixture(scope="module")
async def fleet(shared_fleet: MemoryFleet, shared_transport: Transport) -> MemoryFleet:
    """Return a store with some objects in it, which no test changes."""
    await shared_fleet.applied(MANIFESTS)
    await shared_transport.commit(
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
                value=b'{"name":"ci","hash":"00ff","created":"2000-01-01T00:00:00Z","models":["qwen"],"role":"user"}',
            ),
        ],
    )
    return shared_fleet


async def good(fleet: MemoryFleet, *words: str) -> str:
    done = await fleet.ctl("get", *words)
    assert (done.code, done.err) == (0, "")
    return done.out


async def test_a_table_is_printed_as_in_kubectl(fleet: MemoryFleet) -> None:
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


async def test_several_kinds_have_separate_tables(fleet: MemoryFleet) -> None:
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


async def test_printed_objects_can_be_applied(fleet: MemoryFleet, tmp_path: Path) -> None:
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


async def test_templates(fleet: MemoryFleet, tmp_path: Path) -> None:
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


async def test_derived_labels_are_printed_but_not_applied(
    fleet: MemoryFleet, tmp_path: Path
) -> None:
    labels = json.loads(await good(fleet, "node/mac-1", "-o", "json"))["metadata"]["labels"]
    assert labels == {"fleet/node": "mac-1", "lab": "x"}
    path = "jsonpath={.items[*].metadata.labels.fleet/deployment}"
    assert await good(fleet, "ep", "-l", "fleet/deployment=qwen", "-o", path) == "qwen"
    file = tmp_path / "node.yaml"
    file.write_text(await good(fleet, "node/mac-1", "-o", "yaml"))
    (loaded,) = load_objects([str(file)])
    assert loaded.obj.metadata.labels == {"lab": "x"}


async def test_the_objects_in_files(fleet: MemoryFleet, tmp_path: Path) -> None:
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


async def test_empty_fields_can_be_selected_by(fleet: MemoryFleet) -> None:
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
async def test_selection_and_order(
    fleet: MemoryFleet, words: tuple[str, ...], names: list[str]
) -> None:
    out = await good(fleet, "md", *words, "-o", "name")
    assert [line.partition("/")[2] for line in out.splitlines()] == names


async def test_api_keys_are_printed_without_hashes(fleet: MemoryFleet) -> None:
    table = (await good(fleet, "apikeys")).splitlines()
    assert table[1].split()[:6] == ["ci", "qwen", "-", "-", "-", table[1].split()[5]]
    key = json.loads(await good(fleet, "ak/ci", "-o", "json"))
    assert int(key["metadata"].pop("resourceVersion")) > 0
    assert key == {
        "apiVersion": "fleet/v1alpha1",
        "kind": "ApiKey",
        "metadata": {"name": "ci", "creationTimestamp": "2000-01-01T00:00:00Z"},
        "spec": {"models": ["qwen"], "role": "user"},
    }
    assert await good(fleet, "ak", "-o", "jsonpath={.items[*].metadata.name}") == "ci"
    chosen = ("--field-selector", "metadata.name=ci,spec.role!=admin")
    assert await good(fleet, "ak", *chosen, "-o", "name") == "apikey/ci\n"
    assert await good(fleet, "apikeys", "-o", "name") == "apikey/ci\n"


async def test_missing_names_do_not_hide_others(fleet: MemoryFleet) -> None:
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


async def test_an_empty_result_is_not_an_error(fleet: MemoryFleet) -> None:
    done = await fleet.ctl("get", "rep,sg")
    assert done == Done(code=0, out="", err="no replicas or shardgroups found\n")
    chosen = await fleet.ctl("get", "md", "-l", "team=nobody")
    assert chosen == Done(code=0, out="", err="no modeldeployments found\n")


async def test_an_invalid_custom_columns_file_is_an_error(
    fleet: MemoryFleet, tmp_path: Path
) -> None:
    (tmp_path / "columns").write_text("NAME TEAM\n.metadata.name\n")
    done = await fleet.ctl("get", "md", "-o", f"custom-columns-file={tmp_path / 'columns'}")
    assert done.code == 1
    assert "expected a line with titles and a line with as many paths" in done.err


async def test_get_imports_nothing_slow(shared: Fleet) -> None:
    """`get` reads trees: pydantic's models and servers' libraries take several times as long to import."""
    code = (
        "import sys\n"
        "from fleetctl.__main__ import main\n"
        "main(standalone_mode=False)\n"
        "heavy = ('pydantic', 'aiohttp', 'fastapi', 'ruamel', 'tabulate', 'rich')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)\n"
    )
    words = ("get", "md", "-o", "yaml", "--etcd", str(shared.etcd.address))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert out.startswith(b"apiVersion: v1\n")
    assert err == b"[]\n"


class Watching:
    """A running `fleetctl get -w`, and its output."""

    def __init__(self, process: asyncio.subprocess.Process, lines: asyncio.StreamReader) -> None:
        self._process = process
        self._lines = lines

    async def line(self) -> str:
        async with asyncio.timeout(60):
            return (await self._lines.readline()).decode().replace("\r\n", "\n")

    async def lines(self, count: int) -> list[str]:
        return [await self.line() for _ in range(count)]

    async def interrupted(self) -> int:
        """Press Ctrl-C; return the exit code."""
        self._process.send_signal(signal.SIGINT)
        async with asyncio.timeout(30):
            return await self._process.wait()


@asynccontextmanager
async def watching(etcd: str, *words: str, on_terminal: bool = False) -> AsyncIterator[Watching]:
    lines = asyncio.StreamReader()
    ours, theirs = pty.openpty() if on_terminal else os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleetctl", "get", *words, "--etcd", etcd), stdout=theirs
    )
    os.close(theirs)
    loop = asyncio.get_running_loop()
    reading, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(ours, "rb", buffering=0)
    )
    try:
        yield Watching(process, lines)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        reading.close()


def pool(name: str, nodes: int | None = None) -> list[Put]:
    spec = b'{"kind":"NodePool","metadata":{"name":"%s"},"spec":{"nodes":[]}}' % name.encode()
    puts = [Put(key=keys.spec_key("NodePool", name), value=spec)]
    if nodes is not None:
        status = (
            b'{"nodes":%d,"conditions":[{"type":"Ready","status":"True","reason":"x"}]}' % nodes
        )
        puts.append(Put(key=keys.status_key("NodePool", name), value=status))
    return puts


@pytest.mark.timeout(240)
async def test_each_change_is_printed_once_in_aligned_columns(
    shared: Fleet, transport: Transport
) -> None:
    await transport.commit([], [*pool("a-long-name", 3), *pool("b")])
    etcd = str(shared.etcd.address)
    async with AsyncExitStack() as stack:
        table, events, names, columns = [
            await stack.enter_async_context(watching(etcd, "np", "-w", *words, on_terminal=not n))
            for n, words in enumerate(
                (
                    (),
                    ("--output-watch-events", "--no-headers"),
                    ("-o", "name"),
                    ("-o", "custom-columns=NAME:.metadata.name,N:.status.nodes"),
                )
            )
        ]
        assert await table.lines(3) == [
            "NAME          READY     NODES   AGE\n",
            "a-long-name   True      3       <unknown>\n",
            "b             Unknown   ?       <unknown>\n",
        ]
        assert (await events.line()).split() == ["ADDED", "a-long-name", "True", "3", "<unknown>"]
        assert (await events.line()).split() == ["ADDED", "b", "Unknown", "?", "<unknown>"]
        assert await names.lines(2) == ["nodepool/a-long-name\n", "nodepool/b\n"]
        assert (await columns.lines(3))[2] == "b             <none>\n"
        # The lease of a node does not concern a watch of pools.
        await transport.commit([], [Put(key=keys.node_lease_key("x"), value=b"{}")])
        await transport.commit([], pool("b", 12))
        assert await table.line() == "b             True      12      <unknown>\n"
        assert await events.line() == "MODIFIED   b             True      12      <unknown>\n"
        assert await columns.line() == "b             12\n"
        await transport.commit([], [Delete(key=keys.spec_key("NodePool", "b"))])
        assert (await table.line()).split()[0] == "b"
        assert (await events.line()).split()[:2] == ["DELETED", "b"]
        assert await table.interrupted() == 130


async def _counting(transport: Transport, heard: asyncio.Event) -> None:
    """Change a pool repeatedly until the watch prints it: nothing reports when a watch is established."""
    for number in count(1):
        with suppress(UnavailableError):
            await transport.commit([], pool("new", number))
        with suppress(TimeoutError):
            await asyncio.wait_for(heard.wait(), 0.2)
            return


async def _next_number(watch: Watching, transport: Transport) -> int:
    """Return the number of nodes of the first object that is printed from now on."""
    heard = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(_counting(transport, heard))
        name, number = (await watch.line()).split()
        heard.set()
    assert name == "new"
    return int(number)


@pytest.mark.timeout(240)
async def test_watch_only_and_an_outage_of_etcd(tmp_path: Path) -> None:
    async with TcpEtcd(tmp_path) as etcd, AsyncExitStack() as stack:
        transport = connect(etcd.address)
        stack.push_async_callback(transport.close)
        await transport.commit([], pool("old", 1))
        words = ("np", "--watch-only", "-o", 'jsonpath={.metadata.name} {.status.nodes}{"\\n"}')
        watch = await stack.enter_async_context(watching(etcd.url, *words))
        assert await _next_number(watch, transport) >= 1
        pid = etcd.supervisor.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not etcd.supervisor.running, what="etcd's end")
        await etcd.start()
        assert await _next_number(watch, transport) >= 1
        assert await watch.interrupted() == 130
