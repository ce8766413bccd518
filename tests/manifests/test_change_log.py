"""The audit log: every write has its record in the same transaction, with what differs and without secrets."""

import pytest

from insight.changes import ChangeFilter, RecordedChange, list_changes, object_text
from machinery.clock import SystemClock
from manifests.change_log import AuditedTransport, ChangeAuthor
from manifests.change_records import fit_fields
from schemas.change import ChangedField, ChangeRecord
from schemas.gitsource import SYNC_REQUESTED, GitSource
from store import codec, keys
from store.errors import ConflictError
from store.memory import MemoryTransport
from store.mutate import mutate
from store.port import Delete, ModRevisionGuard, Put
from tests.support.world import deployment, with_metadata

CLOCK = SystemClock()
AUTHOR = ChangeAuthor(user="anna@studio", manager="fleetctl", reason="a busy evening")


@pytest.fixture
def memory() -> MemoryTransport:
    return MemoryTransport(CLOCK)


@pytest.fixture
def audited(memory: MemoryTransport) -> AuditedTransport:
    return AuditedTransport(memory, CLOCK, AUTHOR)


async def changes(memory: MemoryTransport, **wanted: str) -> list[RecordedChange]:
    return await list_changes(memory, ChangeFilter(**wanted))  # type: ignore[arg-type]


async def test_a_write_and_its_record_have_one_revision(
    memory: MemoryTransport, audited: AuditedTransport
) -> None:
    created = await audited.commit([], [codec.put_spec(deployment(name="qwen"))])
    (change,) = await changes(memory)
    assert (change.revision, change.record.user, change.record.reason) == (
        created,
        "anna@studio",
        AUTHOR.reason,
    )
    assert object_text(change.record.objects[0]) == "create modeldeployment/qwen"
    item = await memory.get(keys.spec_key("ModelDeployment", "qwen"))
    assert item is not None
    assert item.mod_revision == created


async def test_requests_of_tools_are_hidden(
    memory: MemoryTransport, audited: AuditedTransport
) -> None:
    source = GitSource.model_validate_json(
        '{"metadata":{"name":"fleet"},"spec":{"repository":"https://git.example.com/fleet.git"}}'
    )
    await memory.commit([], [codec.put_spec(source)])

    def asked(marks: dict[str, str]) -> GitSource:
        return with_metadata(source, annotations=marks)

    for marks in ({SYNC_REQUESTED: "1"}, {SYNC_REQUESTED: "1", "team": "x"}):
        await mutate(audited, CLOCK, GitSource, "fleet", lambda _, m=marks: asked(m))  # type: ignore[misc]
    (shown,) = await changes(memory)
    assert "annotations.team" in object_text(shown.record.objects[0])
    assert len(await list_changes(memory, ChangeFilter(has_requests=True))) == 2


async def test_an_update_names_the_fields_that_differ(
    memory: MemoryTransport, audited: AuditedTransport
) -> None:
    seen = await memory.commit([], [codec.put_spec(deployment(name="qwen"))])
    kind = type(deployment(name="qwen"))

    def scale(now: object) -> object:
        return deployment(name="qwen", replicas=3)

    await mutate(audited, CLOCK, kind, "qwen", scale)  # type: ignore[arg-type]
    (change,) = await changes(memory)
    (about,) = change.record.objects
    assert object_text(about) == "update modeldeployment/qwen: spec.replicas 1 -> 3"
    assert about.from_revision == seen


async def test_a_deletion_that_waits_for_replicas_is_a_deletion_alone(
    memory: MemoryTransport, audited: AuditedTransport
) -> None:
    await memory.commit([], [codec.put_spec(deployment(name="qwen"))])
    kind = type(deployment(name="qwen"))

    def mark(now: object) -> object:
        return with_metadata(deployment(name="qwen"), deletion_timestamp=CLOCK.now())

    await mutate(audited, CLOCK, kind, "qwen", mark)  # type: ignore[arg-type]
    (change,) = await changes(memory)
    assert object_text(change.record.objects[0]) == "delete modeldeployment/qwen"


async def test_a_refused_write_leaves_no_record(
    memory: MemoryTransport, audited: AuditedTransport
) -> None:
    put = codec.put_spec(deployment(name="qwen"))
    with pytest.raises(ConflictError):
        await audited.commit([ModRevisionGuard(key=put.key, mod_revision=7)], [put])
    assert await changes(memory) == []


async def test_secrets_are_recorded_by_name(
    memory: MemoryTransport, audited: AuditedTransport
) -> None:
    key = keys.named(keys.EXTERNAL_KEY_PREFIX, "openai")
    await audited.commit([], [Put(key=key, value=b'{"key":"sk-very-secret"}')])
    await audited.get(key)
    await audited.commit([], [Put(key=key, value=b'{"key":"sk-other-secret"}')])
    await audited.commit([], [Delete(key=key)])
    recorded_changes = await changes(memory, kind="ExternalKey", name="openai")
    assert [change.record.objects[0].verb for change in recorded_changes] == [
        "create",
        "create",
        "delete",
    ]
    items = (await memory.list(keys.CHANGE_PREFIX)).items
    assert not any(b"secret" in item.value for item in items)


async def test_what_no_user_declares_is_not_recorded(
    memory: MemoryTransport, audited: AuditedTransport
) -> None:
    for key in (
        keys.ticket_key("Node/a", "1"),
        keys.status_key("Node", "a"),
        keys.named(keys.APPLY_SET_PREFIX, "x"),
    ):
        await audited.commit([], [Put(key=key, value=b"{}")])
    assert await changes(memory) == []


async def test_a_base_that_was_not_read_is_told_by_its_revision(
    memory: MemoryTransport, audited: AuditedTransport
) -> None:
    put = codec.put_spec(deployment(name="qwen"))
    await audited.inner.commit([], [put])
    await audited.get(put.key)
    other = await memory.commit([], [codec.put_spec(deployment(name="qwen", replicas=2))])
    # The guard names a version that this process did not read: no difference can be told.
    wanted = codec.put_spec(deployment(name="qwen", replicas=3))
    await audited.commit([ModRevisionGuard(key=put.key, mod_revision=other)], [wanted])
    (change,) = await changes(memory)
    (about,) = change.record.objects
    assert (about.verb, about.from_revision, about.fields) == ("update", other, ())


async def test_filters_choose_by_object_user_and_time(
    memory: MemoryTransport, audited: AuditedTransport
) -> None:
    await audited.commit([], [codec.put_spec(deployment(name="one"))])
    bob = AuditedTransport(memory, CLOCK, ChangeAuthor(user="bob@mini", manager="dashboard"))
    await bob.commit([], [codec.put_spec(deployment(name="two"))])
    assert len(await changes(memory, user="BOB")) == 1
    assert len(await changes(memory, kind="ModelDeployment", name="one")) == 1
    assert await changes(memory, kind="NodePool") == []
    later = ChangeFilter(since_s=CLOCK.now().timestamp() + 60)
    assert await list_changes(memory, later) == []


def test_a_record_is_bounded() -> None:
    fields = [ChangedField(path=f"spec.f{n}", old="1" * 100, new="2" * 100) for n in range(100)]
    assert len(fit_fields(fields, 1 << 20)) == 40
    assert len(fit_fields(fields, 1000)) == 4
    assert fit_fields(fields, 0) == []


async def test_a_large_update_is_cut(memory: MemoryTransport, audited: AuditedTransport) -> None:
    many = deployment(name="qwen")
    changed = with_metadata(many, labels={f"label-{n}": "v" * 60 for n in range(60)})
    await memory.commit([], [codec.put_spec(many)])
    await audited.list(keys.SPEC_PREFIX)
    await audited.commit([], [codec.put_spec(changed)])
    (change,) = await changes(memory)
    (about,) = change.record.objects
    assert len(about.fields) + about.more_fields >= 1
    items = (await memory.list(keys.CHANGE_PREFIX)).items
    assert len(codec.encode(codec.decode(ChangeRecord, items[0]))) < 1 << 16
