"""What is left of a source that is gone: its objects stay, and are nobody's. Writes; never deletes an object."""

from machinery.clock import Clock
from manifests import applyset
from reconciler.gitops.due import manager_of, set_name, source_of
from schemas import kinds
from schemas.applyset import ApplySet
from schemas.meta import ApiObject
from store import codec, keys
from store.errors import NotFoundError
from store.mutate import mutate
from store.port import Transport


async def orphans(transport: Transport) -> list[str]:
    """Return the sources of which there are sets of objects."""
    items = (await transport.list(keys.APPLY_SET_PREFIX)).items
    found = (source_of(codec.decode(ApplySet, item).manager) for item in items)
    return sorted({name for name in found if name is not None})


async def release(transport: Transport, clock: Clock, source: str) -> int:
    """Let go of what came from a source; return how many objects there were.

    Raises:
        StoreError: the store did not answer; doing it again goes on.

    """
    name, manager = set_name(source), manager_of(source)
    held = await applyset.read(transport, name)
    if held.manager != manager:
        return 0
    released = 0

    def let_go(obj: ApiObject) -> ApiObject | None:
        if applyset.set_of(obj) != name:
            return None
        entries = tuple(e for e in obj.metadata.managed_fields if e.manager != manager)
        metadata = obj.metadata.model_copy(update={"managed_fields": entries})
        return applyset.claimed(obj.model_copy(update={"metadata": metadata}), "")

    for key in held.members:
        kind = kinds.by_name(key.kind)
        if kind is None:
            continue
        try:
            await mutate(transport, clock, kind.type, key.name, let_go)
        except NotFoundError:
            continue
        released += 1
    await applyset.change(transport, clock, name, manager, lambda _: {})
    return released
