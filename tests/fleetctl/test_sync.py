"""`fleetctl sync`, `suspend` and `resume` against a real store and, for `sync`, a leader that follows a repository."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleetctl.verbs.sync import sync_trouble
from schemas.gitsource import SYNC_REQUESTED, GitSource, GitSourceStatus
from schemas.meta import Condition, ConditionStatus
from store import codec, keys, objects
from store.port import Delete, Put, Transport
from tests.fleetctl.streaming import streaming
from tests.support.fleet import Fleet
from tests.support.gitrepo import Repository, pool
from tests.support.reconciler_gitops import leading
from tests.support.terminal import terminal
from tests.support.waiting import until_async

pytestmark = pytest.mark.etcd

SOURCE = """\
apiVersion: fleet/v1alpha1
kind: GitSource
metadata:
  name: {name}
spec:
  repository: {url}
  interval: 24h
"""


async def told(
    transport: Transport, name: str, truth: ConditionStatus, reason: str, *, limit_s: float = 40
) -> None:
    """Answer `fleetctl sync` as a reconciler does."""

    async def asked() -> GitSource | None:
        found = await objects.get(transport, GitSource, name)
        return found if found is not None and SYNC_REQUESTED in found.metadata.annotations else None

    source = await until_async(asked, limit_s=limit_s, what="sync")
    ready = Condition(
        type="Ready",
        status=truth,
        reason=reason,
        message="so it is",
        observed_generation=source.metadata.generation,
    )
    word = source.metadata.annotations[SYNC_REQUESTED]
    status = GitSourceStatus(observed_generation=1, last_sync=word, conditions=(ready,))
    key = keys.status_key("GitSource", name)
    await transport.commit([], [Put(key=key, value=codec.encode(status))])


@pytest.fixture
async def away(shared: Fleet, transport: Transport) -> AsyncIterator[None]:
    """Declare a source that no reconciler looks at; another test counts on there being none."""
    await shared.applied(SOURCE.format(name="away", url="https://git.invalid/r"))
    yield
    gone = keys.spec_key("GitSource", "away"), keys.status_key("GitSource", "away")
    await transport.commit([], [Delete(key=key) for key in gone])


@pytest.mark.usefixtures("away")
async def test_a_pipe_is_told_once_what_is_waited_for(shared: Fleet, transport: Transport) -> None:
    async with streaming(shared, "sync", "away") as piped:
        for reason in ("Unreachable", "TimedOut"):
            await told(transport, "away", ConditionStatus.FALSE, reason)
            assert await piped.line() == f"gitsource/away: {reason}: so it is\n"
        await told(transport, "away", ConditionStatus.FALSE, "Unreachable")
        await told(transport, "away", ConditionStatus.TRUE, "Applied")
        assert await piped.line() == "gitsource/away so it is\n"
        assert await piped.ended() == 0


@pytest.mark.usefixtures("away")
async def test_a_person_sees_what_is_waited_for(shared: Fleet, transport: Transport) -> None:
    async with terminal("sync", "away", "--etcd", str(shared.etcd.address)) as shown:
        await shown.until("\r\x1b[Kgitsource/away: waiting for the reconciler to look")
        await told(transport, "away", ConditionStatus.FALSE, "Unreachable")
        await shown.until("\r\x1b[Kgitsource/away: Unreachable: so it is")
        await told(transport, "away", ConditionStatus.TRUE, "Applied")
        end = await shown.until("gitsource/away so it is\r\n")
        assert end.endswith("\r\x1b[Kgitsource/away so it is\r\n")
        assert await shown.ended() == 0


def test_older_news_is_no_trouble() -> None:
    for word, reason, is_told in (
        ("now", "Unreachable", True),
        ("before", "Unreachable", False),
        ("before", "DependencyNotReady", True),
    ):
        ready = Condition(
            type="Ready", status=ConditionStatus.FALSE, reason=reason, observed_generation=1
        )
        source = GitSource.model_validate(
            {
                "metadata": {"name": "a", "generation": 1},
                "spec": {"repository": "https://git.invalid/r"},
            }
        ).model_copy(update={"status": GitSourceStatus(last_sync=word, conditions=(ready,))})
        assert (sync_trouble(source, "now") is not None) is is_told


async def test_sync_waits_for_the_newest_commit(
    shared: Fleet, transport: Transport, tmp_path: Path
) -> None:
    repo = Repository(tmp_path / "r.git")
    first = repo.commit({"a.yaml": pool("a")})
    none = await shared.ctl("sync")
    assert (none.code, none.err) == (
        1,
        "error: there is no GitSource. Apply a manifest of that kind, as in examples/gitops/\n",
    )
    await shared.applied(SOURCE.format(name="fleet", url=repo.url))
    nobody = await shared.ctl("sync", "--timeout=1s")
    assert (nobody.code, nobody.err) == (
        1,
        "gitsource/fleet was not looked at in time: does a reconciler lead? "
        "`fleetctl doctor` looks\n",
    )
    async with leading(transport, tmp_path / "leader"):
        done = await shared.ctl("sync", "gs/fleet")
        assert (done.code, done.out) == (
            0,
            f"gitsource/fleet main@{first} is applied: 1 object\n",
        )
        repo.commit({"a.yaml": pool("a").replace("priority", "prio")})
        bad = await shared.ctl("sync", "fleet")
        assert (bad.code, bad.out) == (1, "")
        assert bad.err == (
            "gitsource/fleet is stalled (BrokenManifests): a.yaml:8:3: NodePool/a: spec.prio: "
            f"unknown field. Did you mean priority? main@{first} stays applied\n"
        )
        shown = await shared.ctl("get", "gs")
        assert shown.code == 0, shown.err
        assert "fleet" in shown.out
        suspended = await shared.ctl("suspend", "gs/fleet")
        assert suspended.out == "gitsource/fleet suspended\n"
        refused = await shared.ctl("sync", "fleet")
        assert (refused.code, refused.err) == (
            1,
            "error: gitsource/fleet is suspended; run: fleetctl resume gs/fleet\n",
        )
        again = await shared.ctl("suspend", "fleet")
        assert again.out == "gitsource/fleet already suspended\n"
        resumed = await shared.ctl("resume", "fleet")
        assert resumed.out == "gitsource/fleet resumed\n"
        mended = repo.commit({"a.yaml": pool("a")})
        done = await shared.ctl("sync")
        assert (done.code, done.out) == (
            0,
            f"gitsource/fleet main@{mended} is applied: 1 object\n",
        )
    wrong = await shared.ctl("sync", "node/a")
    assert (wrong.code, "node/a is no GitSource; write NAME or gs/NAME" in wrong.err) == (2, True)
    gone = await shared.ctl("sync", "flet")
    assert gone.code == 1
    assert "fleet" in gone.err
