"""`fleetctl sync`, `suspend` and `resume`; sync also with a real reconciler and repository."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleetctl.verbs.sync import sync_trouble
from schemas.gitsource import SYNC_REQUESTED, GitSource, GitSourceStatus
from schemas.meta import Condition, ConditionStatus
from store import codec, keys, objects
from store.port import Delete, Put, Transport
from tests.support.fleet import Fleet
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.fleetctl_stream import streaming
from tests.support.gitrepo import Repository, pool
from tests.support.reconciler_gitops import leading
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
    shared_transport: Transport,
    name: str,
    truth: ConditionStatus,
    reason: str,
    *,
    limit_s: float = 40,
) -> None:
    """Answer `fleetctl sync` as a reconciler does."""

    async def asked() -> GitSource | None:
        obj = await objects.get(shared_transport, GitSource, name)
        return obj if obj is not None and SYNC_REQUESTED in obj.metadata.annotations else None

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
    await shared_transport.commit([], [Put(key=key, value=codec.encode(status))])


@pytest.fixture
async def away(shared: Fleet, transport: Transport) -> AsyncIterator[None]:
    """Declare a source that no reconciler looks at; another test counts on there being none."""
    await shared.applied(SOURCE.format(name="away", url="https://git.invalid/r"))
    yield
    gone = keys.spec_key("GitSource", "away"), keys.status_key("GitSource", "away")
    await transport.commit([], [Delete(key=key) for key in gone])


@pytest.mark.usefixtures("away")
async def test_each_problem_is_printed_once_in_a_pipe(shared: Fleet, transport: Transport) -> None:
    async with streaming(shared, "sync", "away") as piped:
        for reason in ("Unreachable", "TimedOut"):
            await told(transport, "away", ConditionStatus.FALSE, reason)
            assert await piped.line() == f"gitsource/away: {reason}: so it is\n"
        await told(transport, "away", ConditionStatus.FALSE, "Unreachable")
        await told(transport, "away", ConditionStatus.TRUE, "Applied")
        assert await piped.line() == "gitsource/away so it is\n"
        assert await piped.ended() == 0


def test_conditions_of_earlier_requests_are_ignored() -> None:
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
    shared_fleet: MemoryFleet, shared_transport: Transport, tmp_path: Path
) -> None:
    repo = Repository(tmp_path / "r.git")
    first = repo.commit({"a.yaml": pool("a")})
    none = await shared_fleet.ctl("sync")
    assert (none.code, none.err) == (
        1,
        "error: no GitSource found. Apply a manifest of this kind; examples/gitops/ has one\n",
    )
    await shared_fleet.applied(SOURCE.format(name="fleet", url=repo.url))
    nobody = await shared_fleet.ctl("sync", "--timeout=1s")
    assert (nobody.code, nobody.err) == (
        1,
        "gitsource/fleet was not fetched in time: check that a reconciler runs, for example with "
        "`fleetctl doctor`\n",
    )
    async with leading(shared_transport, tmp_path / "leader"):
        done = await shared_fleet.ctl("sync", "gs/fleet")
        assert (done.code, done.out) == (
            0,
            f"gitsource/fleet main@{first} is applied: 1 object\n",
        )
        repo.commit({"a.yaml": pool("a").replace("priority", "prio")})
        bad = await shared_fleet.ctl("sync", "fleet")
        assert (bad.code, bad.out) == (1, "")
        assert bad.err == (
            "gitsource/fleet is stalled (BrokenManifests): a.yaml:8:3: NodePool/a: spec.prio: "
            f"unknown field. Did you mean priority? main@{first} stays applied\n"
        )
        shown = await shared_fleet.ctl("get", "gs")
        assert shown.code == 0, shown.err
        assert "fleet" in shown.out
        assert "a.yaml:8:3: NodePool/a: spec.prio: unknown field. Did you mean" in shown.out
        suspended = await shared_fleet.ctl("suspend", "gs/fleet")
        assert suspended.out == "gitsource/fleet suspended\n"
        refused = await shared_fleet.ctl("sync", "fleet")
        assert (refused.code, refused.err) == (
            1,
            "error: gitsource/fleet is suspended; run: fleetctl resume gs/fleet\n",
        )
        again = await shared_fleet.ctl("suspend", "gs", "fleet")
        assert again.out == "gitsource/fleet already suspended\n"
        resumed = await shared_fleet.ctl("resume", "gitsources", "fleet")
        assert resumed.out == "gitsource/fleet resumed\n"
        mended = repo.commit({"a.yaml": pool("a")})
        done = await shared_fleet.ctl("sync")
        assert (done.code, done.out) == (
            0,
            f"gitsource/fleet main@{mended} is applied: 1 object\n",
        )
    wrong = await shared_fleet.ctl("sync", "node/a")
    assert (wrong.code, "nodes are not gitsources; write NAME or gitsource/NAME" in wrong.err) == (
        2,
        True,
    )
    gone = await shared_fleet.ctl("sync", "flet")
    assert gone.code == 1
    assert "fleet" in gone.err
