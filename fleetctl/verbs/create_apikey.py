"""`fleetctl create apikey`: creates an API key. API keys are secrets, so they are not declared in manifests."""

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
    help="Model name that the key may use. Can be repeated (default: all).",
)
@click.option("--admin", is_flag=True, help="Allow the admin API of the gateways.")
@click.option(
    "--requests-per-minute",
    type=click.IntRange(min=1),
    help="Rate limit of requests, over all gateways together.",
)
@click.option(
    "--tokens-per-minute",
    type=click.IntRange(min=1),
    help="Rate limit of prompt and output tokens, over all gateways together.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    help="Limit of concurrent requests at each gateway.",
)
@click.option(
    "--expires",
    metavar="30d|12h|2027-01-01",
    help="Time to live, or the day (UTC) from which the key is refused (default: never).",
)
@store_options
def apikey(name: str, **options: Any) -> None:
    """Create an API key and print it. The key cannot be shown again.

    Only the key is written to standard output: `KEY=$(fleetctl create apikey ci)`.
    """
    now = SystemClock().now()
    secret = API_KEY_MARKER + secrets.token_urlsafe(32)
    made = _build_key(name, secret, options, now)
    run(_write(made, options))
    click.echo(f"apikey/{name} created. The key is shown only once:", err=True)
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
            f"{flag}: {first['input']!r} is not valid: {first['msg']}"
        ) from error


def parse_expiry(text: str, now: datetime) -> datetime:
    """Return the time of `30d`, `12h`, `2027-01-01` or a time such as 2027-01-01T12:00Z.

    Raises:
        click.UsageError: the text is of another form, or in the past.

    """
    found = _parse_expiry(text, now)
    if found is None:
        raise click.UsageError(
            f"--expires: {text!r} is neither a duration such as 30d or 12h nor a day such as 2027-01-01"
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
        # Before the key is stored: afterwards nothing may prevent it from being printed.
        warnings = await unserved_warnings(transport, key.models)
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
            if not error.ambiguous or not await _is_there(transport, stored, value):
                raise
    for warning in warnings:
        click.echo(warning, err=True)


async def unserved_warnings(transport: Transport, models: Sequence[str]) -> list[str]:
    """Return warnings about names that no deployment or route serves."""
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
