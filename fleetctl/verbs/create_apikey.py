"""`fleetctl create apikey`: what is no object in a manifest, because it is a secret."""

import hashlib
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import click
from pydantic import ValidationError

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import reader
from machinery.clock import SystemClock
from manifests.suggestions import nearest
from schemas import duration
from schemas.deployment import ModelDeployment, served_names
from schemas.kinds import by_alias
from schemas.records import API_KEY_MARKER, ApiKey
from schemas.route import ModelRoute
from store import codec, keys
from store.errors import ConflictError, UnavailableError
from store.port import ModRevisionGuard, Put, Transport

_FLAGS = {"models": "--model"}


@click.command()
@click.argument("name")
@click.option(
    "--model",
    "models",
    multiple=True,
    help="A name that it may ask for, as clients write it; may be repeated (else all).",
)
@click.option("--admin", is_flag=True, help="Also for the gateways' admin API.")
@click.option(
    "--requests-per-minute",
    type=click.IntRange(min=1),
    help="How many it may make at all gateways together.",
)
@click.option(
    "--tokens-per-minute",
    type=click.IntRange(min=1),
    help="Prompts and answers, at all gateways together.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    help="How many requests may be under way at once, at each gateway.",
)
@click.option(
    "--expires",
    metavar="30d|12h|2027-01-01",
    help="After how long, or from which day on (UTC), it is refused (else never).",
)
@store_options
def apikey(name: str, **options: Any) -> None:
    """Make an API key, and print it: this once, for nobody can find it out later.

    Only the key goes to standard output: `KEY=$(fleetctl create apikey ci)`.
    """
    now = SystemClock().now()
    secret = API_KEY_MARKER + secrets.token_urlsafe(32)
    made = _build_key(name, secret, options, now)
    run(_write(made, options))
    click.echo(f"apikey/{name} created. It is shown only this once:", err=True)
    click.echo(secret)


def _build_key(name: str, secret: str, options: dict[str, Any], now: datetime) -> ApiKey:
    try:
        return ApiKey(
            name=name,
            hash=hashlib.sha256(secret.encode()).hexdigest(),
            created=now,
            expires=None if options["expires"] is None else parse_expiry(options["expires"], now),
            models=tuple(dict.fromkeys(options["models"])),
            is_admin=options["admin"],
            requests_per_minute=options["requests_per_minute"],
            tokens_per_minute=options["tokens_per_minute"],
            concurrency=options["concurrency"],
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        flag = _FLAGS.get(field, field.upper())
        raise click.UsageError(
            f"{flag}: {first['input']!r} cannot be used: {first['msg']}"
        ) from error


def parse_expiry(text: str, now: datetime) -> datetime:
    """Return when a key ends that was given `30d`, `12h`, `2027-01-01` or a moment such as 2027-01-01T12:00Z.

    Raises:
        click.UsageError: it is none of that, or in the past.

    """
    found = _parse_expiry(text, now)
    if found is None:
        raise click.UsageError(
            f"--expires: {text!r} is neither a time such as 30d or 12h nor a day such as 2027-01-01"
        )
    if found <= now:
        raise click.UsageError(f"--expires: {text} is not in the future")
    return found


def _parse_expiry(text: str, now: datetime) -> datetime | None:
    try:
        if re.fullmatch(r"[0-9]{1,5}d", text):
            return now + timedelta(days=int(text[:-1]))
        if re.fullmatch(r"[0-9hms]+", text) and text[-1] in "hms":
            return now + timedelta(seconds=duration.parse(text))
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
            day = date.fromisoformat(text)
            return datetime(day.year, day.month, day.day, tzinfo=UTC)
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


async def _write(key: ApiKey, options: dict[str, Any]) -> None:
    async with open_store(options) as transport:
        # Before it is made: once it is, nothing may keep it from being printed.
        warnings = await unserved_warnings(transport, key.models)
        stored, value = keys.named(keys.API_KEY_PREFIX, key.name), codec.encode(key)
        try:
            guard = ModRevisionGuard(key=stored, mod_revision=0)
            await transport.commit([guard], [Put(key=stored, value=value)])
        except ConflictError as error:
            raise FleetctlError(
                f"there is an apikey {key.name} already, and nobody can show it again. Choose another name, or "
                f"revoke it first: fleetctl delete apikey {key.name}"
            ) from error
        except UnavailableError as error:
            # The answer was lost, not the deed, if it is ours that is there.
            if not error.ambiguous or not await _is_there(transport, stored, value):
                raise
    for warning in warnings:
        click.echo(warning, err=True)


async def unserved_warnings(transport: Transport, models: Sequence[str]) -> list[str]:
    """Return what to say of names that nobody serves: they may be mistyped, or still to be declared."""
    if not models:
        return []
    known: set[str] = set()
    for alias in ("modeldeployments", "modelroutes"):
        kind = by_alias(alias)
        assert kind is not None
        for one in await reader.read(transport, kind, ()):
            if isinstance(one, ModelDeployment):
                known.update(served_names(one))
            elif isinstance(one, ModelRoute):
                known.add(one.spec.model)
    found = []
    for name in models:
        if name not in known:
            near = nearest(name, sorted(known))
            hint = f" Did you mean {near}?" if near else ""
            found.append(f"warning: no deployment or route serves the name {name} yet.{hint}")
    return found


async def _is_there(transport: Transport, key: str, value: bytes) -> bool:
    item = await transport.get(key)
    return item is not None and item.value == value
