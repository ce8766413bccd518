"""`get -w`: the store looked at again whenever something moved that was asked for; breaks of the watch do not show."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import click

from fleetctl.cli.connect import open_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects.query import ObjectQuery, fetch
from fleetctl.output.render import ObjectRenderer
from machinery.clock import Clock
from store import keys
from store.errors import CompactedError, UnavailableError
from store.port import Transport

# Spec and status of one change arrive apart; one line is enough.
_SETTLE_S = 0.05
_RETRY_S = 0.5

_EXTRA_PREFIXES = {
    "Endpoint": (keys.ENDPOINT_PREFIX,),
    "Event": (keys.EVENT_PREFIX,),
    "FabricTest": (keys.FABRIC_TEST_PREFIX,),
    "Node": (keys.NODE_LEASE_PREFIX, keys.NODE_LIFE_PREFIX),
}


async def watch(
    asked: ObjectQuery,
    shown: ObjectRenderer,
    clock: Clock,
    options: dict[str, Any],
    *,
    is_silent_at_first: bool,
) -> None:
    """Print what there is and then what changes, until the user has enough; or only what changes.

    Raises:
        FleetctlError: somebody is named who is not there; StoreError: nobody answers at the beginning.

    """
    async with open_store(options) as transport:
        revision = (await transport.status()).revision
        seen = await fetch(transport, clock, asked)
        if seen.missing:
            raise FleetctlError(seen.missing[0])
        if is_silent_at_first:
            shown.note(seen)
        else:
            click.echo(shown.changes(seen), nl=False)
        async for _ in _changes(transport, clock, _prefixes(asked), revision):
            try:
                seen = await fetch(transport, clock, asked)
            except UnavailableError:
                continue  # the watch breaks, too, and comes back
            click.echo(shown.changes(seen), nl=False)


def _prefixes(asked: ObjectQuery) -> tuple[str, ...]:
    """Return what the keys begin with from which the objects are made."""
    kind = asked.targets[0].kind.name
    return (
        keys.spec_prefix(kind),
        keys.status_prefix(kind),
        *_EXTRA_PREFIXES.get(kind, ()),
    )


async def _changes(
    transport: Transport, clock: Clock, prefixes: tuple[str, ...], revision: int
) -> AsyncIterator[None]:
    """Yield whenever something below the prefixes may have changed after the revision."""
    while True:
        try:
            async with aclosing(transport.watch(f"{keys.ROOT}/", after_revision=revision)) as watch:
                async for batch in watch:
                    revision = batch.revision
                    if any(change.key.startswith(prefixes) for change in batch.changes):
                        await clock.sleep(_SETTLE_S)
                        yield
        except CompactedError:
            revision = (await transport.status()).revision
            yield
        except UnavailableError:
            await clock.sleep(_RETRY_S)
