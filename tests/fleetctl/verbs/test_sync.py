"""`fleetctl sync` in a pipe; with a real reconciler and repository: test_gitops.py."""

import pytest

from fleetctl.verbs.sync import sync_trouble
from schemas.gitsource import SYNC_REQUESTED, GitSource, GitSourceStatus
from schemas.meta import Condition, ConditionStatus
from store import codec, keys, objects
from store.port import Put, Transport
from tests.support.fleet import Fleet
from tests.support.fleetctl_stream import streaming
from tests.support.reconciler_gitops import source
from tests.support.terminal import terminal
from tests.support.waiting import until_async


def status_of(word: str, reason: str, *, is_ready: bool = False) -> GitSourceStatus:
    ready = Condition(
        type="Ready", status=ConditionStatus("True" if is_ready else "False"), reason=reason,
        message="so it is", observed_generation=1,
    )  # fmt: skip
    return GitSourceStatus(observed_generation=1, last_sync=word, conditions=(ready,))


async def answer(transport: Transport, name: str, reason: str) -> None:
    """Answer as a reconciler does."""

    async def request() -> str | None:
        obj = await objects.get(transport, GitSource, name)
        return obj.metadata.annotations.get(SYNC_REQUESTED) if obj is not None else None

    word = await until_async(request, limit_s=40, what="sync")
    status = status_of(word, reason, is_ready=reason == "Applied")
    put = Put(key=keys.status_key("GitSource", name), value=codec.encode(status))
    await transport.commit([], [put])


@pytest.mark.ci
@pytest.mark.etcd
async def test_each_problem_is_printed_once_in_a_pipe(shared: Fleet, transport: Transport) -> None:
    await shared.applied(source("away", "https://git.invalid/r"))
    async with streaming(shared, "sync", "away") as piped:
        for reason in ("Unreachable", "TimedOut"):
            await answer(transport, "away", reason)
            assert await piped.line() == f"gitsource/away: {reason}: so it is\n"
        await answer(transport, "away", "Unreachable")
        await answer(transport, "away", "Applied")
        assert await piped.line() == "gitsource/away so it is\n"
        assert await piped.ended() == 0


@pytest.mark.etcd
async def test_a_terminal_shows_the_progress_in_one_line(
    shared: Fleet, transport: Transport
) -> None:
    await shared.applied(source("shown", "https://git.invalid/r"))
    async with terminal("sync", "shown", "--etcd", str(shared.etcd.address)) as shown:
        await shown.until("\r\x1b[Kgitsource/shown: waiting for the reconciler")
        await answer(transport, "shown", "Unreachable")
        await shown.until("\r\x1b[Kgitsource/shown: Unreachable: so it is")
        await answer(transport, "shown", "Applied")
        await shown.until("\r\x1b[Kgitsource/shown so it is\r\n")
        assert await shown.ended() == 0


@pytest.mark.parametrize(
    ("word", "reason", "is_told"),
    [
        ("now", "Unreachable", True),
        ("before", "Unreachable", False),
        ("before", "DependencyNotReady", True),
    ],
)
def test_conditions_of_earlier_requests_are_ignored(
    word: str, reason: str, *, is_told: bool
) -> None:
    declared = GitSource.model_validate(
        {"metadata": {"name": "a", "generation": 1}, "spec": {"repository": "https://x/r"}}
    )
    git_source = declared.model_copy(update={"status": status_of(word, reason)})
    assert (sync_trouble(git_source, "now") is not None) is is_told
