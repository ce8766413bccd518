"""API keys in `describe`, `delete` and `rotate`. They are not API objects: secrets must not be in manifests."""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import click

from fleetctl.cli.connect import open_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects.table_context import TableContext
from fleetctl.output import printers
from fleetctl.output.printers import TableOptions
from machinery.clock import SystemClock
from manifests.suggestions import did_you_mean
from schemas.records import API_KEY_MARKER, ApiKey, GatewayLease, ModelLimits
from store import codec, keys, object_trees
from store.errors import ConflictError, UnavailableError
from store.port import Delete, ModRevisionGuard, Put, Transport
from store.reads import StoreReader


class NewSecret(NamedTuple):
    """The secret of a key, which is shown once, and the hash of it, which is stored."""

    text: str
    hash: str


def new_secret() -> NewSecret:
    """Return a new secret with 256 random bits."""
    return secret_of(API_KEY_MARKER + secrets.token_urlsafe(32))


def secret_of(text: str) -> NewSecret:
    """Return the secret with this text."""
    return NewSecret(text, hashlib.sha256(text.encode()).hexdigest())


_ALIASES = ("apikey", "apikeys", "ak")


def parse_names(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the names in `apikey NAME...` or `apikey/NAME`; None if the words name another kind."""
    first, slash, name = words[0].partition("/") if words else ("", "", "")
    if first.lower() not in _ALIASES:
        return None
    if not slash:
        return tuple(words[1:])
    if len(words) > 1:
        raise click.UsageError("expected apikey NAME NAME..., or one apikey/NAME")
    return (name,)


async def unrequired_note(store: StoreReader) -> str:
    """Return what to know about keys while no gateway requires one; "" if one does, or none runs."""
    items = (await store.list(keys.GATEWAY_LEASE_PREFIX)).items
    leases = [codec.decode(GatewayLease, item) for item in items]
    if not leases or any(lease.asks_for_keys for lease in leases):
        return ""
    return (
        "no gateway requires API keys now, so that requests without one have no limits; require them with "
        "`fleetctl up --auth on`, or --auth on of fleet-gateway"
    )


async def describe(names: tuple[str, ...], options: dict[str, Any]) -> None:
    """Print all properties of one key; the key itself is not stored."""
    if len(names) != 1:
        raise click.UsageError("expected one API key: apikey NAME or apikey/NAME")
    async with open_store(options) as transport:
        (key,) = await read(transport, names)
        note = await unrequired_note(transport)
    now = SystemClock().now()
    cells = _cells(key, now)
    rows = [
        ("Name:", key.name),
        ("Kind:", "ApiKey"),
        ("Created:", f"{_time(key.created)} ({cells['AGE']} ago)"),
        (
            "Expires:",
            "never" if key.expires is None else f"{_time(key.expires)} ({cells['EXPIRES']})",
        ),
        ("Models:", ", ".join(key.models) or "<all>"),
        ("Role:", key.role),
        ("Requests:", f"{key.requests_per_minute or 'no limit'} per minute"),
        ("Tokens:", f"{key.tokens_per_minute or 'no limit'} per minute, prompts and answers"),
        ("At once:", f"{key.concurrency or 'no limit'} at each gateway"),
        *(("For one model:", text) for text in _model_limits(key)),
        *((("Note:", note),) if note else ()),
        ("Key:", "known to its owner alone; the store has its SHA-256"),
        *(
            ("Earlier secret:", f"valid until {_time(secret.expires)}")
            for secret in key.previous
            if secret.expires > now
        ),
    ]
    click.echo(printers.align_columns(rows))


async def delete(
    names: tuple[str, ...], options: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Revoke keys; gateways refuse them within moments. Calls `say` with each deleted name (also with --dry-run)."""
    if not names:
        raise click.UsageError("no API key given; name at least one")
    async with open_store(options) as transport:
        if not options["ignore_not_found"]:
            await read(transport, names)  # refuse before the first deletion
        for name in names:
            if await revoke(transport, name, is_dry=options["dry_run"] != "none"):
                say(name)


async def read(transport: Transport, names: Sequence[str]) -> list[ApiKey]:
    """Return the named API keys, or all, sorted by name.

    Raises:
        FleetctlError: a key does not exist.

    """
    items = (await transport.list(keys.API_KEY_PREFIX)).items
    api_keys = {key.name: key for key in (codec.decode(ApiKey, item) for item in items)}
    missing = [name for name in names if name not in api_keys]
    if missing:
        hint = did_you_mean(missing[0], sorted(api_keys), "There are")
        raise FleetctlError(f"there is no apikey {missing[0]}. {hint}".rstrip(" ."))
    return (
        [api_keys[name] for name in names]
        if names
        else [api_keys[name] for name in sorted(api_keys)]
    )


async def is_stored(transport: Transport, key: str, value: bytes) -> bool:
    """Return whether the key holds the value: a write whose answer was lost has succeeded."""
    item = await transport.get(key)
    return item is not None and item.value == value


async def create(transport: Transport, key: ApiKey) -> None:
    """Store a new key.

    Raises:
        FleetctlError: there is one with its name.
        StoreError: the store does not answer, or refuses the write.

    """
    stored, value = keys.named(keys.API_KEY_PREFIX, key.name), codec.encode(key)
    try:
        guard = ModRevisionGuard(key=stored, mod_revision=0)
        await transport.commit([guard], [Put(key=stored, value=value)])
    except ConflictError as error:
        raise FleetctlError(
            f"apikey/{key.name} already exists. Choose another name, or delete it first: "
            f"fleetctl delete apikey {key.name}"
        ) from error
    except UnavailableError as error:
        # The write succeeded, and only its answer was lost, if the stored key is ours.
        if not error.ambiguous or not await is_stored(transport, stored, value):
            raise


async def revoke(transport: Transport, name: str, *, is_dry: bool = False) -> bool:
    """Delete a key; return whether it existed."""
    key = keys.named(keys.API_KEY_PREFIX, name)
    item = await transport.get(key)
    if item is None:
        return False
    if is_dry:
        return True
    try:
        guard = ModRevisionGuard(key=key, mod_revision=item.mod_revision)
        await transport.commit([guard], [Delete(key=key)])
    except ConflictError as error:
        raise FleetctlError(
            f"apikey/{name} was changed by another client; run the command again"
        ) from error
    return True


def _model_limits(key: ApiKey) -> Iterator[str]:
    for model, limits in sorted(key.model_limits.items()):
        yield f"{model}: {', '.join(_limit_texts(limits))}"


def _limit_texts(limits: ModelLimits) -> Iterator[str]:
    if limits.requests_per_minute is not None:
        yield f"{limits.requests_per_minute} requests per minute"
    if limits.tokens_per_minute is not None:
        yield f"{limits.tokens_per_minute} tokens per minute"
    if limits.concurrency is not None:
        yield f"{limits.concurrency} at once at each gateway"


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _cells(key: ApiKey, now: datetime) -> dict[str, str]:
    """Return the cells of the key in `fleetctl get`, by column."""
    tree = json.loads(key.model_dump_json(by_alias=True, exclude_none=True))
    options = TableOptions()
    (row,) = printers.rows([object_trees.api_key_tree(tree)], TableContext(now=now), options)
    return dict(zip(printers.titles("ApiKey", options), row, strict=True))
