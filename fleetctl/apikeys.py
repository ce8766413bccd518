"""API keys for people: listing, describing, deleting. They are no API objects: secrets do not belong into manifests."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import click
import orjson

from fleetctl import printers
from fleetctl.connect import opened
from fleetctl.errors import FleetctlError
from machinery.clock import SystemClock
from manifests import yamlio
from manifests.words import did_you_mean
from schemas.apikey import ApiKey
from store import codec, keys
from store.errors import ConflictError
from store.port import Delete, Transport, Unchanged

_ALIASES = ("apikey", "apikeys", "ak")
_TITLES = ("NAME", "MODELS", "REQUESTS/MIN", "TOKENS/MIN", "AT ONCE", "ADMIN", "AGE", "EXPIRES")


def names_of(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the names in `apikey NAME...` or `apikey/NAME`; None if the words mean another kind."""
    first, slash, name = words[0].partition("/") if words else ("", "", "")
    if first.lower() not in _ALIASES:
        return None
    if not slash:
        return tuple(words[1:])
    if len(words) > 1:
        raise click.UsageError("write apikey NAME NAME..., or one apikey/NAME")
    return (name,)


async def show(names: tuple[str, ...], options: dict[str, Any]) -> None:
    """Print keys as `fleetctl get` does; never their hashes."""
    if options["selector"]:
        raise click.UsageError("API keys have no labels; name those that you mean")
    async with opened(options) as transport:
        found = await read(transport, names)
    output = options["output"]
    if not found and output in ("table", "wide"):
        click.echo("no apikeys found; `fleetctl create apikey NAME` makes one", err=True)
    elif output == "name":
        click.echo("".join(f"apikey/{key.name}\n" for key in found), nl=False)
    elif output in ("json", "yaml"):
        trees = [_tree(key) for key in found]
        tree: dict[str, Any] = {"kind": "List", "items": trees}
        click.echo(_text(trees[0] if len(names) == 1 else tree, output), nl=False)
    elif found:
        now = SystemClock().now()
        titles = () if options["no_headers"] else _TITLES
        click.echo(printers.lined_up([_row(key, now) for key in found], titles))


async def describe(names: tuple[str, ...], options: dict[str, Any]) -> None:
    """Print everything about one key but the key, which nobody knows."""
    if len(names) != 1:
        raise click.UsageError("which one? Write apikey NAME or apikey/NAME")
    async with opened(options) as transport:
        (key,) = await read(transport, names)
    now = SystemClock().now()
    cells = dict(zip(_TITLES, _row(key, now), strict=True))
    rows = [
        ("Name:", key.name),
        ("Kind:", "ApiKey"),
        ("Created:", f"{_time(key.created)} ({cells['AGE']} ago)"),
        (
            "Expires:",
            "never" if key.expires is None else f"{_time(key.expires)} ({cells['EXPIRES']})",
        ),
        ("Models:", ", ".join(key.models) or "<all>"),
        ("Admin API:", "yes" if key.is_admin else "no"),
        ("Requests:", f"{key.requests_per_minute or 'any number'} per minute"),
        ("Tokens:", f"{key.tokens_per_minute or 'any number'} per minute, prompts and answers"),
        ("At once:", f"{key.concurrency or 'any number'} at each gateway"),
        ("Key:", "known to its owner alone; the store has its SHA-256"),
    ]
    click.echo(printers.lined_up(rows))


async def delete(names: tuple[str, ...], options: dict[str, Any]) -> None:
    """Revoke keys: gateways refuse them a moment later."""
    if not names:
        raise click.UsageError("which apikeys? Name them")
    async with opened(options) as transport:
        if not options["ignore_not_found"]:
            await read(transport, names)  # all of them or none
        for name in names:
            if await _delete_one(transport, name):
                click.echo(f"apikey/{name} deleted")


async def read(transport: Transport, names: Sequence[str]) -> list[ApiKey]:
    """Return the named keys, or all, by name.

    Raises:
        FleetctlError: one is not there.

    """
    items = (await transport.list(keys.API_KEY_PREFIX)).items
    found = {key.name: key for key in (codec.decode(ApiKey, item) for item in items)}
    missing = [name for name in names if name not in found]
    if missing:
        hint = did_you_mean(missing[0], sorted(found), "There are")
        raise FleetctlError(f"there is no apikey {missing[0]}. {hint}".rstrip(" ."))
    return [found[name] for name in names] if names else [found[name] for name in sorted(found)]


async def _delete_one(transport: Transport, name: str) -> bool:
    """Return whether there was one."""
    key = keys.named(keys.API_KEY_PREFIX, name)
    there = await transport.get(key)
    if there is None:
        return False
    try:
        guard = Unchanged(key=key, mod_revision=there.mod_revision)
        await transport.commit([guard], [Delete(key=key)])
    except ConflictError as error:
        raise FleetctlError(
            f"apikey/{name} was changed at the same time; run the command again"
        ) from error
    return True


def _text(tree: dict[str, Any], output: str) -> str:
    if output == "yaml":
        return yamlio.dump(tree)
    return orjson.dumps(tree, option=orjson.OPT_INDENT_2).decode() + "\n"


def _row(key: ApiKey, now: datetime) -> tuple[str, ...]:
    return (
        key.name,
        ",".join(key.models) or "<all>",
        *(
            str(limit or "-")
            for limit in (key.requests_per_minute, key.tokens_per_minute, key.concurrency)
        ),
        "yes" if key.is_admin else "",
        printers.age(key.created, now),
        _ends(key.expires, now),
    )


def _ends(expires: datetime | None, now: datetime) -> str:
    if expires is None:
        return "never"
    # As an age, but of what is still to come.
    return "expired" if expires <= now else f"in {printers.age(now, expires)}"


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _tree(key: ApiKey) -> dict[str, Any]:
    """Return the key without its hash: it is of no use to anybody, so nobody should carry it about."""
    tree: dict[str, Any] = orjson.loads(
        key.model_dump_json(by_alias=True, exclude_none=True, exclude={"hash"})
    )
    return {"kind": "ApiKey", **tree}
