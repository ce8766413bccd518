"""Tokens for hubs and external servers: read from a file or standard input, stored, replaced and deleted."""

import re
import sys
from pathlib import Path
from typing import Any, Final

import click
from pydantic import TypeAdapter, ValidationError

from fleetctl.cli.connect import open_store
from fleetctl.cli.errors import FleetctlError
from machinery import process_secrets
from schemas.meta import ObjectName
from schemas.records import ExternalKey, HubToken
from store import codec, keys
from store.errors import ConflictError
from store.port import Delete, ModRevisionGuard, Put

_NAME: Final = TypeAdapter(ObjectName)
_MAX_BYTES: Final = 500
_PREFIXES: Final = {"hubtoken": keys.HUB_TOKEN_PREFIX, "externalkey": keys.EXTERNAL_KEY_PREFIX}


def check_name(name: str) -> None:
    """Refuse what is no name of an object. Raises click.UsageError."""
    try:
        _NAME.validate_python(name)
    except ValidationError as error:
        raise click.UsageError(f"NAME: {name!r}: {error.errors()[0]['msg']}") from error


def read_token(file: str) -> str:
    """Return the token in a file or on standard input.

    Raises:
        FleetctlError: the file cannot be read, others may read it, or it has no token.

    """
    where = "standard input" if file == "-" else file
    try:
        raw = (
            sys.stdin.buffer.read(_MAX_BYTES + 1)
            if file == "-"
            else process_secrets.read_secret_file(Path(file).expanduser())
        )
    except process_secrets.OpenSecretError as error:
        raise FleetctlError(str(error)) from error
    except OSError as error:
        raise FleetctlError(f"{where} cannot be read: {error.strerror or error}") from error
    text = raw.decode(errors="replace").strip()
    if not re.fullmatch(r"[!-~]{1,500}", text):
        raise FleetctlError(
            f"{where} holds no token: expected one word of at most {_MAX_BYTES} characters, such as hf_..."
        )
    return text


async def store_token(kind: str, made: HubToken | ExternalKey, options: dict[str, Any]) -> None:
    """Store the token, or replace the one of its name. `kind`: hubtoken or externalkey.

    Raises:
        FleetctlError: another client changed it meanwhile.

    """
    key = keys.named(_PREFIXES[kind], made.name)
    async with open_store(options) as transport:
        before = await transport.get(key)
        guard = ModRevisionGuard(key=key, mod_revision=before.mod_revision if before else 0)
        try:
            await transport.commit([guard], [Put(key=key, value=codec.encode(made))])
        except ConflictError as error:
            raise FleetctlError(
                f"{kind}/{made.name} was changed by another client; run the command again"
            ) from error


async def remove_token(kind: str, name: str, options: dict[str, Any]) -> None:
    """Delete the token. Raises FleetctlError if there is none. `kind`: hubtoken or externalkey."""
    key = keys.named(_PREFIXES[kind], name)
    async with open_store(options) as transport:
        if await transport.get(key) is None:
            raise FleetctlError(f"there is no {kind} {name}")
        await transport.commit([], [Delete(key=key)])
