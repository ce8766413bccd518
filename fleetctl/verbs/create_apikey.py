"""`fleetctl create apikey`: creates an API key. API keys are secrets, so they are not declared in manifests."""

import re
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import click
from pydantic import ValidationError

from fleetctl.cli.arguments import reason_option
from fleetctl.cli.connect import open_store, store_options
from fleetctl.fleets import api_keys
from fleetctl.objects import reader
from machinery.clock import SystemClock
from manifests.suggestions import nearest
from schemas import duration
from schemas.deployment import ModelDeployment, served_names
from schemas.kinds import by_alias
from schemas.records import ROLES, ApiKey, ModelLimits, Role
from schemas.route import ModelRoute
from store.port import Transport

_FLAGS = {"models": "--model", "model_limits": "--limit"}
_LIMITS = {
    "requests-per-minute": "requests_per_minute",
    "tokens-per-minute": "tokens_per_minute",
    "concurrency": "concurrency",
}
_HELP = """Create an API key and print it. The key cannot be shown again.

Only the key is written to standard output: `KEY=$(fleetctl create apikey ci)`.

\b
Roles; each includes those before it:
  user      models
  viewer    also reads the admin API: requests, queues, Macs
  operator  also operates gateways
  admin     everything
"""


@click.command(help=_HELP)
@click.argument("name")
@click.option(
    "--model",
    "models",
    multiple=True,
    help="Model name that the key may use. Can be repeated (default: all).",
)
@click.option("--role", type=click.Choice(ROLES), help="Rights at gateways (default: user).")
@click.option("--admin", is_flag=True, help="Same as --role admin.")
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
    "--limit",
    "limits",
    multiple=True,
    metavar="MODEL,LIMIT=N,...",
    help="Limits for one model name, below those of the key: qwen,requests-per-minute=10,tokens-per-minute=5000,"
    "concurrency=2. Can be repeated.",
)
@click.option(
    "--expires",
    metavar="30d|12h|2027-01-01",
    help="Time to live, or the day (UTC) from which the key is refused (default: never).",
)
@reason_option
@store_options
async def apikey(name: str, **options: Any) -> None:
    """Create an API key and print it. The key cannot be shown again."""
    secret = api_keys.new_secret()
    made = _build_key(name, secret.hash, options, SystemClock().now())
    async with open_store(options) as transport:
        # Before the key is stored: afterwards nothing may prevent it from being printed.
        warnings = await name_warnings(transport, made.models, tuple(made.model_limits))
        if note := await api_keys.unrequired_note(transport):
            warnings.append(f"warning: {note}")
        await api_keys.create(transport, made)
    for warning in warnings:
        click.echo(warning, err=True)
    click.echo(f"apikey/{name} created. The key is shown only once:", err=True)
    click.echo(secret.text)


def _build_key(name: str, hash_: str, options: dict[str, Any], now: datetime) -> ApiKey:
    role, limits = _role(options), dict(parse_limit(text) for text in options["limits"])
    if len(limits) < len(options["limits"]):
        raise click.UsageError(
            "--limit: a model is named twice; write all its limits into one flag"
        )
    try:
        return ApiKey(
            name=name,
            hash=hash_,
            created=now,
            expires=None if options["expires"] is None else parse_expiry(options["expires"], now),
            models=tuple(dict.fromkeys(options["models"])),
            role=role,
            requests_per_minute=options["requests_per_minute"],
            tokens_per_minute=options["tokens_per_minute"],
            concurrency=options["concurrency"],
            model_limits=limits,
        )
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:
            raise click.UsageError(
                f"--limit: {first['msg'].removeprefix('Value error, ')}"
            ) from error
        field = str(first["loc"][0])
        flag = _FLAGS.get(field, field.upper())
        raise click.UsageError(
            f"{flag}: {first['input']!r} is not valid: {first['msg']}"
        ) from error


def _role(options: dict[str, Any]) -> Role:
    role: Role = options["role"] or ("admin" if options["admin"] else "user")
    if options["admin"] and role != "admin":
        raise click.UsageError(
            f"--admin is the same as --role admin, and --role {role} is given too"
        )
    return role


def parse_limit(text: str) -> tuple[str, ModelLimits]:
    """Return the model and its limits in `MODEL,requests-per-minute=10,concurrency=2`.

    The model ends at the first comma, because names may contain colons, but no commas.

    Raises:
        click.UsageError: the text is of another form.

    """
    model, *parts = text.split(",")
    if not model or not parts:
        raise click.UsageError(
            f"--limit: {text!r} is not of the form MODEL,LIMIT=N,... such as qwen,requests-per-minute=10"
        )
    found: dict[str, int] = {}
    for part in parts:
        name, _, number = part.partition("=")
        if name not in _LIMITS:
            near = nearest(name, sorted(_LIMITS))
            hint = f"did you mean {near}?" if near else f"there are {', '.join(_LIMITS)}"
            raise click.UsageError(f"--limit: {text!r} has no limit {name!r}; {hint}")
        if _LIMITS[name] in found:
            raise click.UsageError(f"--limit: {text!r} has {name} twice")
        if not re.fullmatch(r"[0-9]{1,10}", number) or int(number) < 1:
            raise click.UsageError(f"--limit: {name} must be a number from 1, and is {number!r}")
        found[_LIMITS[name]] = int(number)
    return model, ModelLimits(**found)


def parse_expiry(text: str, now: datetime) -> datetime:
    """Return the time of `30d`, `12h`, `2027-01-01` or a time such as 2027-01-01T12:00Z.

    Raises:
        click.UsageError: the text is of another form, or in the past.

    """
    expiry = _parse_expiry(text, now)
    if expiry is None:
        raise click.UsageError(
            f"--expires: {text!r} is neither a duration such as 30d or 12h nor a day such as 2027-01-01"
        )
    if expiry <= now:
        raise click.UsageError(f"--expires: {text} is not in the future")
    return expiry


def _parse_expiry(text: str, now: datetime) -> datetime | None:
    try:
        if re.fullmatch(r"[0-9]{1,5}d", text):
            return now + timedelta(days=int(text[:-1]))
        if re.fullmatch(r"[0-9hms]+", text) and text[-1] in "hms":
            return now + timedelta(seconds=duration.parse(text))
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
            day = date.fromisoformat(text)
            return datetime(day.year, day.month, day.day, tzinfo=UTC)
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


async def name_warnings(
    transport: Transport, models: Sequence[str], limited: Sequence[str] = ()
) -> list[str]:
    """Return warnings about names that nothing serves, and about other names of models whose name is limited."""
    if not models and not limited:
        return []
    known: set[str] = set()
    found = []
    for alias in ("modeldeployments", "modelroutes"):
        kind = by_alias(alias)
        assert kind is not None
        for api_object in await reader.read(transport, kind, ()):
            if isinstance(api_object, ModelDeployment):
                names = served_names(api_object)
                known.update(names)
                found += _uncovered_warnings(names, models, limited)
            elif isinstance(api_object, ModelRoute):
                known.add(api_object.spec.model)
    for name in dict.fromkeys((*models, *limited)):
        if name not in known:
            near = nearest(name, sorted(known))
            hint = f" Did you mean {near}?" if near else ""
            found.append(f"warning: no deployment or route serves the name {name} yet.{hint}")
    return found


def _uncovered_warnings(
    names: Sequence[str], models: Sequence[str], limited: Sequence[str]
) -> list[str]:
    """Return a warning if the key may use a model whose name is limited by another name."""
    covered = [name for name in names if name in limited]
    others = [name for name in names if name not in limited and (not models or name in models)]
    if not covered or not others:
        return []
    return [
        f"warning: the limit of {covered[0]} does not cover the model's other names: {', '.join(others)}. Limit them "
        "too, or name the models that the key may use with --model"
    ]
