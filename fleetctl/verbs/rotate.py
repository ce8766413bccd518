"""`fleetctl rotate apikey`: replaces the secret of an API key. The earlier one stays valid for an overlap."""

from datetime import datetime, timedelta
from typing import Any

import click

from fleetctl.cli.arguments import parse_duration, reason_option
from fleetctl.cli.connect import with_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import api_keys
from machinery.clock import SystemClock
from schemas.records import MAX_PREVIOUS_SECRETS, ApiKey, PreviousSecret
from store import codec, keys
from store.errors import ConflictError, UnavailableError
from store.port import ModRevisionGuard, Put, Transport

_MAX_OVERLAP = timedelta(days=365)
_HELP = """Replace the secret of an API key, and print the new one. It cannot be shown again.

\b
  KEY=$(fleetctl rotate apikey ci)              the earlier secret is valid for another day
  fleetctl rotate apikey ci --overlap 0s        it is refused at once, for example because it leaked
  fleetctl rotate apikey ci --end-overlap       end the overlap now; no new secret

Name, rights and limits stay. All secrets of a key share its limits. Only the new secret is written to standard output.
"""


@click.command(help=_HELP)
@click.argument("what", nargs=-1, metavar="apikey NAME")
@click.option(
    "--overlap",
    metavar="24h|7d|0s",
    help="Time for which earlier secrets stay valid; 0s refuses all of them at once (default: 24h).",
)
@click.option(
    "--end-overlap",
    is_flag=True,
    help="Refuse the earlier secrets at once, and make no new one.",
)
@reason_option
@with_store
async def rotate(
    transport: Transport, what: tuple[str, ...], overlap: str | None, end_overlap: bool, **_: Any
) -> None:
    """Replace the secret of an API key, and print the new one. It cannot be shown again."""
    names = api_keys.parse_names(what)
    if names is None or len(names) != 1:
        raise click.UsageError("expected one API key: apikey NAME or apikey/NAME")
    if end_overlap:
        if overlap is not None:
            raise click.UsageError("give --overlap, or --end-overlap, but not both")
        ended = await _change(transport, names[0], None, timedelta(0))
        count = f"{len(ended.previous)} earlier secret{'s' if len(ended.previous) != 1 else ''}"
        click.echo(f"apikey/{names[0]}: {count if ended.previous else 'no earlier secret'} ended")
        return
    lasting, secret = parse_overlap(overlap or "24h"), api_keys.new_secret()
    before = await _change(transport, names[0], secret.hash, lasting)
    until = SystemClock().now() + lasting
    told = (
        "Its earlier secrets are refused from now on."
        if not lasting
        else f"The earlier secret is valid until {min(until, before.expires or until):%Y-%m-%d %H:%M} UTC."
    )
    click.echo(f"apikey/{names[0]} rotated. {told} The new key is shown only once:", err=True)
    click.echo(secret.text)


def parse_overlap(text: str) -> timedelta:
    """Return the duration of `24h`, `7d` or `0s`.

    Raises:
        click.UsageError: the text is of another form, or the time too long.

    """
    overlap_s = parse_duration(text, "--overlap")
    if overlap_s > _MAX_OVERLAP.total_seconds():
        raise click.UsageError(f"--overlap: {text} is longer than {_MAX_OVERLAP.days}d")
    return timedelta(seconds=overlap_s)


def rotated(key: ApiKey, hash_: str | None, overlap: timedelta, now: datetime) -> ApiKey:
    """Return the key with a new secret (None: the present one), and its earlier secrets until their overlaps end. Pure.

    Raises:
        FleetctlError: the key is expired, or has as many earlier secrets as it can.

    """
    if hash_ is None:
        return key.model_copy(update={"previous": ()})
    if key.expires is not None and key.expires <= now:
        raise FleetctlError(
            f"apikey/{key.name} expired on {key.expires:%Y-%m-%d %H:%M} UTC, and so would a new secret of it. Create "
            "another key: fleetctl create apikey NAME"
        )
    if not overlap:
        return key.model_copy(update={"hash": hash_, "previous": ()})
    secrets = tuple(secret for secret in key.previous if secret.expires > now)
    if len(secrets) >= MAX_PREVIOUS_SECRETS:
        raise FleetctlError(
            f"apikey/{key.name} has {len(secrets)} earlier secrets that are still valid, and can have no more. End them "
            f"first: fleetctl rotate apikey {key.name} --end-overlap"
        )
    newest = PreviousSecret(hash=key.hash, expires=now + overlap)
    return key.model_copy(update={"hash": hash_, "previous": (newest, *secrets)})


async def _change(transport: Transport, name: str, hash_: str | None, overlap: timedelta) -> ApiKey:
    """Rotate the key; return it as it was."""
    stored = keys.named(keys.API_KEY_PREFIX, name)
    await api_keys.read(transport, (name,))  # an unknown name is refused with the nearest
    item = await transport.get(stored)
    if item is None:
        raise _changed_meanwhile(name)
    before = codec.decode(ApiKey, item)
    value = codec.encode(rotated(before, hash_, overlap, SystemClock().now()))
    try:
        guard = ModRevisionGuard(key=stored, mod_revision=item.mod_revision)
        await transport.commit([guard], [Put(key=stored, value=value)])
    except ConflictError as error:
        raise _changed_meanwhile(name) from error
    except UnavailableError as error:
        # The write succeeded, and only its answer was lost, if the stored key is ours.
        if not error.ambiguous or not await api_keys.is_stored(transport, stored, value):
            raise
    return before


def _changed_meanwhile(name: str) -> FleetctlError:
    return FleetctlError(f"apikey/{name} was changed by another client; run the command again")
