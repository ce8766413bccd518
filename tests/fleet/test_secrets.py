"""Every secret of a fleet is used, and appears nowhere but where it lies: canaries are looked for in all channels.

`tests/nodeagent/engines/test_group_launch.py` and `tests/machinery/test_environment.py` are the short versions.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import psutil
import pytest
from typing_extensions import override

from insight import process_client
from insight.errors import ProcessRefusedError
from insight.tickets import issue_ticket
from machinery import processes
from machinery.environment import environment_without_secrets
from schemas.formation import EpochSecret
from schemas.replica import Replica
from store import codec, keys, objects
from store.etcd import users
from store.etcd.connect import connect
from store.port import Transport
from tests.support.canaries import leaks, parts_of
from tests.support.commands import run_module
from tests.support.fleet import Done, Fleet, from_scratch
from tests.support.gitrepo import Repository, pool
from tests.support.ports import free_port
from tests.support.reconciler_git_servers import over_http
from tests.support.reconciler_gitops import ready, source
from tests.support.store_tcp_etcd import TcpEtcd

pytestmark = [pytest.mark.full, pytest.mark.etcd, pytest.mark.mlx, pytest.mark.timeout(300)]

GIT_PASSWORD = "canary-git-password-4711"
WEBHOOK_SECRET = "canary-webhook-secret-4711-of-a-decent-length"
HUB_TOKEN = "canary-hub-token-4711"
WRONG_KEY = "sk-fleet-canary-of-a-wrong-key-4711"
NODES = ("node-1", "node-2")
SHARDED = """
apiVersion: fleet/v1alpha1
kind: ShardGroup
metadata: {name: pair}
spec:
  members: [{node: node-1}, {node: node-2}]
  size: 2
---
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: big}
spec: {model: {path: tiny}, sharding: pair, contextLength: 512}
"""
# Their own files; etcd has passwords as hashes, and the secret of a group in clear (docs/operations/security.md).
ALLOWED = ("passwords", "secrets", "etcd", "backup")


class RealFleet(Fleet):
    """A fleet without forks, whose command lines and environments are those that a user's would be."""

    @override
    def restart(self, name: str) -> None:
        module, words = self._commands[name]
        variables = {**environment_without_secrets(), "HF_TOKEN": HUB_TOKEN}
        command = [sys.executable, "-m", module, *words, "--log-level", "debug"]
        log = self.log(name)
        self._children[name] = processes.spawn(command, log=log, environment=variables)

    async def run(self, *words: str, stdin: bytes = b"") -> Done:
        """Run fleetctl as an administrator, without a fork."""
        who = ("--etcd", str(self.etcd.address), *self._password_of("admin"))
        code, out, err = await from_scratch((*words, *who), stdin)
        assert code == 0, err.decode() + self.words()
        return Done(code=code, out=out.decode(), err=err.decode())

    def pids(self) -> set[int]:
        """Return all processes of the fleet that run now, engines included."""
        roots = [child.record.pid for child in self._children.values()]
        found = {pid for node in NODES for pid in self.engine_pids(node)} | set(roots)
        for pid in list(found):
            try:
                found |= {process.pid for process in psutil.Process(pid).children(recursive=True)}
            except psutil.Error:
                continue
        return found


@dataclass(slots=True)
class Witness:
    """Argv and environment of the fleet's processes and of this test's commands, as other users see them."""

    fleet: RealFleet
    argv: set[str] = field(default_factory=set)
    inherited: dict[int, str] = field(default_factory=dict)
    """The environment of each process that the test did not start itself."""
    core_limits: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look at all processes ten times a second inside the context: some live for less than a second."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._watch())
            yield
            task.cancel()

    async def _watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(0.1)

    def look(self) -> None:
        mine = {process.pid for process in psutil.Process().children(recursive=True)}
        started = {child.record.pid for child in self.fleet._children.values()}
        for pid in self.fleet.pids() | mine:
            try:
                self.argv.add(" ".join(psutil.Process(pid).cmdline()))
                if pid not in started:
                    self.inherited[pid] = Path(f"/proc/{pid}/environ").read_text(errors="replace")
            except (psutil.Error, OSError):
                continue

    def look_at_limits(self) -> None:
        for pid in self.fleet.pids():
            text = Path(f"/proc/{pid}/limits").read_text()
            (line,) = [line for line in text.splitlines() if line.startswith("Max core file size")]
            self.core_limits.add(" ".join(line.split()[4:6]))


@asynccontextmanager
async def secret_fleet(root: Path) -> AsyncIterator[RealFleet]:
    """Run two agents, a gateway that asks for keys, and a reconciler with Git's secrets; etcd has users."""
    await run_module(
        "tests.support.tiny_model",
        *(str(root / "models" / "tiny"), "--arch", "qwen2", "--layers", "3", "--heads", "6"),
        *("--kv-heads", "6", "--hidden", "96", "--endless"),
    )
    webhook, password = root / "secrets" / "webhook", root / "secrets" / "127.0.0.1" / "token"
    for file, text in ((webhook, WEBHOOK_SECRET), (password, GIT_PASSWORD)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.write_text(text)
    async with TcpEtcd(root / "etcd", "--bcrypt-cost=4") as etcd:
        fleet = RealFleet(root, root / "models", etcd=etcd)
        fleet.passwords = root / "passwords"
        words = ("--etcd", etcd.url, "--etcd-prefix", "/lab", "--out", str(fleet.passwords))
        for step in (("--prepare", "--node", "node-1", "--node", "node-2"), ("--enable",)):
            code, _, err = await from_scratch(("init-auth", *step, *words), b"")
            assert code == 0, err
        admin = users.read_credentials(fleet.passwords / "admin.env")
        who = {"username": admin.user, "password": admin.password, "prefix": "/lab"}
        etcd.address = replace(etcd.address, **who)  # type: ignore[arg-type]
        try:
            git = ("--git-dir", str(root / "git"), "--git-credentials", str(root / "secrets"))
            hook = ("--api-port", str(free_port()), "--git-webhook-secret-file", str(webhook))
            fleet.start_reconciler(*git, *hook)
            for name in NODES:
                fleet.start_agent(name)
            fleet.start_gateway("--auth", "on")
            await fleet.joined(len(NODES))
            yield fleet
        finally:
            await fleet.stop()


async def test_no_secret_leaves_its_place(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "secrets" / "r.git")
    commit = repo.commit({"a.yaml": pool("from-git")})
    async with secret_fleet(tmp_path) as fleet:
        witness = Witness(fleet)
        store = connect(fleet.etcd.address)
        async with witness.watching(), aclosing_store(store):
            with over_http(repo.repo, password=GIT_PASSWORD) as url:
                given = "  credentials: {username: anna, passwordFile: token}\n"
                await fleet.run("apply", "-f", "-", stdin=source("home", url, given).encode())
                await ready(store, "home", commit)
            canaries = {
                "git password": GIT_PASSWORD,
                "webhook secret": WEBHOOK_SECRET,
                "hub token": HUB_TOKEN,
                "wrong API key": WRONG_KEY,
                **passwords(fleet),
                **await use_the_gateway(fleet),
                **await use_tickets(store),
            }
            await push(fleet)
            await fleet.run("apply", "-f", "-", stdin=SHARDED.encode())
            await fleet.run("wait", "modeldeployment/big", "--for=condition=Available")
            (replica,) = await objects.list_all(store, Replica)
            places = [keys.epoch_secret_key(rank.node, replica.name) for rank in replica.spec.ranks]
            item = await store.get(places[0])
            assert item is not None
            group = {"group secret": codec.decode(EpochSecret, item).secret}
            assert all(len(value) >= 16 for value in (canaries | group).values())
            witness.look_at_limits()
            shown = await outputs(fleet, tmp_path)
            dump = await everything_in(store)
        assert len(witness.inherited) > 4
        every = canaries | group
        assert leaks(every, [("argv", "\n".join(witness.argv))]) == []
        inherited = {f"environment of {pid}": text for pid, text in witness.inherited.items()}
        assert leaks(every, inherited.items()) == []
        assert leaks(every, shown.items()) == []
        assert sorted(leaks(every, dump.items())) == sorted(
            f"group secret in {place}" for place in places
        )
        assert leaks(every, files_of(tmp_path)) == []
        assert witness.core_limits == {"0 0"}


@asynccontextmanager
async def aclosing_store(store: Transport) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await store.close()


def passwords(fleet: RealFleet) -> dict[str, str]:
    assert fleet.passwords is not None
    files = {file.stem: file for file in fleet.passwords.glob("*.env")}
    nodes = {f"node-{name}" for name in NODES}
    assert set(files) == {"admin", "dashboard", "gateway", "reconciler", "root", *nodes}
    return {name: users.read_credentials(file).password for name, file in files.items()}


async def use_the_gateway(fleet: RealFleet) -> dict[str, str]:
    """Make an API key and use it, and one that is wrong; return it."""
    key = (await fleet.run("create", "apikey", "ci")).out.strip()
    async with aiohttp.ClientSession() as session:
        for one, wanted in ((WRONG_KEY, 401), (key, 200)):
            headers = {"authorization": f"Bearer {one}"}
            async with asyncio.timeout(30):
                status = 0
                while status != wanted:
                    async with session.get(f"{fleet.url}/v1/models", headers=headers) as answer:
                        status = answer.status
                    await asyncio.sleep(0.1)
    return {"API key": key}


async def use_tickets(store: Transport) -> dict[str, str]:
    """Read an agent's log, with a good ticket and a wrong one; return the secret."""
    address = await process_client.find_agent(store, NODES[0])
    async with issue_ticket(store, address.key) as bearer:
        log = await process_client.fetch(address, "/v1/logs/agent", bearer=bearer, params={})
        assert log
        id_, _, secret = bearer.partition(".")
        with pytest.raises(ProcessRefusedError):
            await process_client.fetch(
                address, "/v1/logs/agent", bearer=f"{id_}.{WRONG_KEY}", params={}
            )
    return {"ticket": secret}


async def push(fleet: RealFleet) -> None:
    """Send a push with GitLab's token, and one with a wrong token."""
    words = fleet._commands["reconciler"][1]
    url = f"http://127.0.0.1:{words[words.index('--api-port') + 1]}/hooks/git"
    body = {"ref": "refs/heads/main", "project": {"git_http_url": "https://example.com/x.git"}}
    async with aiohttp.ClientSession() as session:
        for token, is_good in ((WRONG_KEY, False), (WEBHOOK_SECRET, True)):
            headers = {"x-gitlab-token": token, "x-gitlab-event": "Push Hook"}
            async with session.post(url, json=body, headers=headers) as answer:
                assert (answer.status < 300) == is_good, await answer.text()


async def outputs(fleet: RealFleet, folder: Path) -> dict[str, str]:
    """Return what the commands print and write about the fleet."""
    kinds = "nodes,nodepools,modeldeployments,replicas,shardgroups,gitsources,events,apikeys"
    commands: list[tuple[str, ...]] = [
        ("get", kinds, "-o", form) for form in ("yaml", "json", "wide")
    ]
    commands += [("describe", kind) for kind in ("replicas", "nodes", "gitsources", "apikeys")]
    commands += [("get", "replicas", "-o", "jsonpath={.items[*].spec.formation}"), ("doctor",)]
    shown = {}
    for words in commands:
        who = ("--etcd", str(fleet.etcd.address), *fleet._password_of("admin"))
        _, out, err = await from_scratch((*words, *who), b"")
        shown[" ".join(words)] = (out + err).decode()
    assert '"formation"' in shown[" ".join(commands[1])]  # of a group, whose secret is elsewhere
    bundle, backup = folder / "bundle.tar.gz", folder / "backup"
    await fleet.run("support-bundle", "-o", str(bundle))
    await fleet.run("backup", str(backup))
    return {**shown, **dict(parts_of(bundle, backup))}


async def everything_in(store: Transport) -> dict[str, str]:
    """Return all keys of the fleet that an administrator may read."""
    everything: dict[str, str] = {}
    async with aclosing(store.pages(f"{keys.ROOT}/")) as pages:
        async for page in pages:
            everything |= {item.key: item.value.decode(errors="replace") for item in page.items}
    return everything


def files_of(root: Path) -> Iterable[tuple[str, str]]:
    """Yield every file that the fleet wrote, such as logs, except those in which the secrets lie."""
    for path in root.rglob("*"):
        inside = path.relative_to(root)
        if path.is_file() and inside.parts[0] not in (*ALLOWED, "models"):
            yield str(inside), path.read_bytes().decode(errors="replace")
