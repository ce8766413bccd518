"""Creating objects: everything is checked before the first is written, and none is written over another."""

from collections.abc import Callable, Sequence

from fleetctl.errors import FleetctlError
from machinery.clock import Clock
from manifests import plan
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import Loaded
from manifests.observe import Observed, observe
from manifests.plan import How, Write
from manifests.validate import validate
from schemas.meta import ApiObject
from store import codec, objects
from store.errors import ConflictError, UnavailableError
from store.port import Transport

Tell = Callable[[ApiObject], None]


async def create_all(
    transport: Transport,
    loaded: Sequence[Loaded],
    clock: Clock,
    *,
    manager: str,
    tell: Tell,
    is_dry: bool = False,
) -> None:
    """Create objects, in the order in which they need each other; `tell` hears of each that was.

    Raises:
        ManifestErrors: one is there already, or something else stands against one; nothing was written.
        FleetctlError: somebody else created one meanwhile; those told of were written.
        StoreError: the store did not answer; those told of were written.

    """
    seen = await observe(transport, [item.key for item in loaded])
    problems = [*_there(loaded, seen), *validate(loaded, seen.known), *plan.refusals(loaded, {})]
    if problems:
        raise ManifestErrors(problems)
    changes = plan.plan_changes(loaded, {}, now=clock.now(), how=How(manager=manager))
    for wave in plan.waves(changes):
        for batch in wave:
            for obj in [write.obj for write in batch] if is_dry else await _write(transport, batch):
                tell(obj)


def _there(loaded: Sequence[Loaded], seen: Observed) -> list[ManifestError]:
    return [_taken(item) for item in loaded if item.key in seen.objects]


def _taken(item: Loaded) -> ManifestError:
    name = f"{item.key.kind.lower()}/{item.key.name}"
    hint = f"`fleetctl apply` and `fleetctl edit {name}` change it, `fleetctl replace` makes it exactly this"
    return item.document.problem(("metadata", "name"), f"{name} is there already", hint)


async def _write(transport: Transport, batch: Sequence[Write]) -> list[ApiObject]:
    """Write all of a batch in one transaction; return them as they are in the store."""
    wanted = [write.obj for write in batch]
    try:
        guards = [codec.unchanged(obj) for obj in wanted]
        revision = await transport.commit(guards, [codec.put_spec(obj) for obj in wanted])
    except ConflictError as error:
        names = [f"{obj.kind.lower()}/{obj.name}" for obj in wanted if await _get(transport, obj)]
        raise FleetctlError(
            f"{', '.join(names) or 'one of them'} was created by somebody else meanwhile; `fleetctl apply` changes "
            "what is there"
        ) from error
    except UnavailableError as error:
        # The answer was lost, not the deed, if they are ours that are there.
        found = [await _get(transport, obj) for obj in wanted] if error.ambiguous else []
        uids = [obj.metadata.uid for obj in found if obj is not None]
        if uids != [obj.metadata.uid for obj in wanted]:
            raise
        return [obj for obj in found if obj is not None]
    return [codec.with_version(obj, revision) for obj in wanted]


async def _get(transport: Transport, obj: ApiObject) -> ApiObject | None:
    return await objects.get(transport, type(obj), obj.name)
