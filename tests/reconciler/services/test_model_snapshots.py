"""The leader pins hub models: once, with reasons, and with tokens for the nodes that fetch."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pydantic import SecretStr

from machinery.clock import SystemClock
from models.hub.errors import ModelMissingError
from models.hub.hub_settings import HubSettings
from models.hub.model_hub import is_commit
from schemas.deployment import ModelDeployment, Preload, Revision
from schemas.meta import HUB_REFRESHED_AT, RESTARTED_AT, Condition, ConditionStatus, find_condition
from schemas.model_snapshot import ModelSnapshot
from schemas.records import HubToken
from schemas.replica import MODEL_PRESENT, RankStatus, Replica
from store import codec, keys, objects
from store.memory import MemoryTransport
from store.port import Put
from tests.support import reconciler_world
from tests.support.hub import COMMIT, REPO, StandInHub
from tests.support.hub_repositories import FOLDER, hub_deployment, servable_files
from tests.support.modelscope import StandInModelScope
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.waiting import until_async
from tests.support.world import GEOMETRY, with_metadata, with_spec

CLOCK = SystemClock()
MOVED = "ab" * 20


@asynccontextmanager
async def leading(hub: StandInHub) -> AsyncIterator[MemoryTransport]:
    """Run a leader on a store with a node that has inspected the pinned model."""
    store = MemoryTransport(CLOCK)
    status = node_status("a")
    reports = tuple(
        status.models[0].model_copy(update={"path": path, "geometry": GEOMETRY})
        for path in (FOLDER, FOLDER.replace(COMMIT[:12], MOVED[:12]))
    )
    await store.commit(
        [], [put_node("a", status.model_copy(update={"models": reports})), put_lease("a")]
    )
    async with hub.serve(), reconciler_world.leading(store):
        yield store


async def write(store: MemoryTransport, found: ModelDeployment) -> None:
    await store.commit([], [codec.put_spec(found)])


async def snapshot(store: MemoryTransport, commit: str) -> ModelSnapshot:
    async def look() -> ModelSnapshot | None:
        item = await store.get(keys.named(keys.SNAPSHOT_PREFIX, "qwen"))
        found = None if item is None else codec.decode(ModelSnapshot, item)
        return found if found is not None and found.commit == commit else None

    return await until_async(look, what=f"a snapshot of {commit}")


async def replica(store: MemoryTransport, commit: str = COMMIT) -> Replica:
    async def look() -> Replica | None:
        found = await objects.list_all(store, Replica)
        return next((one for one in found if one.spec.model.folder.endswith(commit[:12])), None)

    return await until_async(look, what=f"a replica of {commit}")


async def said(store: MemoryTransport, type_: str, reason: str) -> Condition:
    async def look() -> Condition | None:
        obj = await objects.get(store, ModelDeployment, "qwen")
        status = None if obj is None else obj.status
        match = None if status is None else find_condition(status.conditions, type_)
        return match if match is not None and match.reason == reason else None

    return await until_async(look, what=f"{type_} with {reason}")


async def put_token(store: MemoryTransport, hub: StandInHub) -> None:
    """Let the hub ask for a token that the store has."""
    hub.token = "hf_secret"
    secret = SecretStr(hub.token)
    token = HubToken(name="t", endpoint=hub.endpoint, token=secret, created=CLOCK.now())
    key = keys.named(keys.HUB_TOKEN_PREFIX, "t")
    await store.commit([], [Put(key=key, value=codec.encode(token))])


def hub_with_model() -> StandInHub:
    return StandInHub(repos={REPO: servable_files()}, branches={"main": COMMIT, "dev": MOVED})


async def test_a_branch_is_pinned_once_and_moves_only_when_a_person_asks() -> None:
    hub = hub_with_model()
    async with leading(hub) as store:
        asked = hub_deployment(hub.endpoint)
        await write(store, asked)
        await snapshot(store, COMMIT)
        placed = await replica(store)
        assert placed.spec.model.folder == FOLDER
        assert REPO in placed.spec.served_names

        hub.branches["main"] = MOVED
        restarted = {RESTARTED_AT: "2026-01-01T00:00:00Z"}
        await write(store, with_metadata(asked, annotations=restarted, generation=2))

        async def observed() -> bool:
            found = await objects.get(store, ModelDeployment, "qwen")
            return found is not None and found.status is not None and found.status.revision == 2

        await until_async(observed, what="the second revision")
        assert len(hub.requests("GET", "/revision/main")) == 1

        notes = {HUB_REFRESHED_AT: "2026-01-01T00:00:00Z"}
        await write(store, with_metadata(asked, annotations=notes, generation=3))
        await snapshot(store, MOVED)

        async def revised() -> bool:
            found = await objects.list_all(store, Revision)
            return any(
                revision.spec.content.model.folder.endswith(MOVED[:12]) for revision in found
            )

        await until_async(revised, what="a revision of the moved branch")


async def test_a_model_is_served_as_before_while_its_next_revision_cannot_be_resolved() -> None:
    hub = hub_with_model()
    async with leading(hub) as store:
        await write(store, hub_deployment(hub.endpoint))
        before = await replica(store)
        await write(store, hub_deployment(hub.endpoint, revision="absent"))

        await said(store, "ModelResolved", "NotFound")
        after = await replica(store)
        assert after.metadata.uid == before.metadata.uid
        assert after.spec.template == before.spec.template


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (403, "GatedRepo", "Gated"),
        (401, "", "Unauthorized"),
        (404, "RepoNotFound", "NotFound"),
        (429, "", "RateLimited"),
        (500, "", "SourceUnreachable"),
    ],
)
async def test_a_refusal_of_the_hub_is_a_condition_with_its_reason(
    status: int, code: str, reason: str
) -> None:
    hub = hub_with_model()
    hub.faults.status, hub.faults.error_code, hub.faults.failures = status, code, 1000
    async with leading(hub) as store:
        await write(store, hub_deployment(hub.endpoint))
        condition = await said(store, "Available", reason)
        assert "127.0.0.1" in condition.message
        assert await objects.get(store, Replica, "qwen-0") is None


async def report_model(store: MemoryTransport, missing_bytes: int) -> None:
    """Report what node a lacks of the model."""
    status = node_status("a")
    report = status.models[0].model_copy(
        update={"path": FOLDER, "geometry": GEOMETRY, "missing_bytes": missing_bytes}
    )
    await store.commit([], [put_node("a", status.model_copy(update={"models": (report,)}))])


async def test_a_preload_is_assigned_with_a_token_and_shows_in_the_status() -> None:
    """No replica is wanted; the token goes when the node has the files, and the preload with its field."""
    hub = hub_with_model()
    async with leading(hub) as store:
        await report_model(store, 7 << 30)
        await put_token(store, hub)
        asked = hub_deployment(hub.endpoint)
        asked = with_spec(asked, replicas=0, preload=Preload(nodes=1))
        await write(store, asked)
        preload, grant = keys.preload_key("a", "qwen"), keys.hub_grant_key("a", "qwen")

        async def state() -> tuple[bool, bool, str]:
            obj = await objects.get(store, ModelDeployment, "qwen")
            status = None if obj is None else obj.status
            one = None if status is None else find_condition(status.conditions, "Preloaded")
            has = [await store.get(key) is not None for key in (preload, grant)]
            return has[0], has[1], "" if one is None else one.message

        async def is_fetching() -> bool:
            return await state() == (
                *(True, True),
                "0 of 1 nodes have the files; the others lack 7.0 GiB",
            )

        async def is_whole() -> bool:
            return await state() == (True, False, "1 of 1 nodes have the files")

        async def is_over() -> bool:
            return await state() == (False, False, "")

        await until_async(is_fetching, what="the preload")
        await report_model(store, 0)
        await until_async(is_whole, what="the end of the fetch")
        await write(store, with_metadata(with_spec(asked, preload=None), generation=2))
        await until_async(is_over, what="the end of the preload")
        assert await objects.list_all(store, Replica) == []


async def test_only_the_fetching_node_gets_the_token_and_only_until_it_has_the_model() -> None:
    hub = hub_with_model()
    async with leading(hub) as store:
        await put_token(store, hub)
        await write(store, hub_deployment(hub.endpoint))
        placed = await replica(store)
        grant = keys.hub_grant_key("a", "qwen")

        async def granted() -> bool:
            return await store.get(grant) is not None

        async def revoked() -> bool:
            return await store.get(grant) is None

        await until_async(granted, what="the grant")
        assert len((await store.list(keys.HUB_GRANT_PREFIX)).items) == 1
        present = Condition(type=MODEL_PRESENT, status=ConditionStatus.TRUE, reason="Present")
        report = RankStatus(replica_uid=placed.metadata.uid, node="a", conditions=(present,))
        await store.commit(
            [], [Put(key=keys.rank_key("a", "qwen-0", 0), value=codec.encode(report))]
        )
        await until_async(revoked, what="the end of the grant")


async def test_a_model_of_modelscope_is_pinned_by_its_contents_with_its_branch() -> None:
    hub = StandInModelScope(repos={REPO: servable_files()})
    async with leading(hub) as store:
        await write(store, hub_deployment(hub.endpoint, revision="master", source="modelscope"))

        async def look() -> ModelSnapshot | None:
            item = await store.get(keys.named(keys.SNAPSHOT_PREFIX, "qwen"))
            return None if item is None else codec.decode(ModelSnapshot, item)

        model_snapshot = await until_async(look, what="a snapshot")
        pinned = model_snapshot.pinned
        assert (pinned.source, pinned.branch) == ("modelscope", "master")
        assert is_commit(pinned.revision)
        hub.repos[REPO]["config.json"] += b" "
        settings = HubSettings()
        async with settings.open() as factory:
            with pytest.raises(ModelMissingError, match="rollout refresh"):
                await factory(pinned, "").files(REPO, pinned.revision)
            moved = await factory(model_snapshot.source, "").resolve(REPO, "master")
        refreshed = await objects.get(store, ModelDeployment, "qwen")
        assert refreshed is not None
        annotations = {**refreshed.metadata.annotations, HUB_REFRESHED_AT: "now"}
        await write(store, with_metadata(refreshed, annotations=annotations))
        assert (await snapshot(store, moved)).pinned.branch == "master"
