"""The API key with which fleetctl on this machine calls the gateway of its local fleet (`fleetctl up` with --join or --auth on).

Its text is in the data folder, its hash in the store. The data folder holds the administrator's password for the
store as well, so that the key opens nothing more.
"""

from typing import Final

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.api_keys import NewSecret, new_secret, secret_of
from fleetctl.fleets.data_dir import DataDir
from machinery import process_secrets
from machinery.clock import Clock
from machinery.files import make_private_folder, write_atomically
from schemas.records import ApiKey
from store import codec, keys
from store.errors import ConflictError, StoreError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.port import ModRevisionGuard, Put, Transport

NAME: Final = "fleetctl-up"
"""The name of the key in the store."""


async def ensure_api_key(transport: Transport, data_dir: DataDir, clock: Clock) -> None:
    """Write the key's file, unless it exists, and store its hash, unless it is stored.

    Raises:
        FleetctlError: the file cannot be used.
        StoreError: the store did not answer.

    """
    secret = _read_or_create(data_dir)
    place = keys.named(keys.API_KEY_PREFIX, NAME)
    stored = await transport.get(place)
    if stored is not None and codec.decode(ApiKey, stored).hash == secret.hash:
        return
    record = ApiKey(name=NAME, hash=secret.hash, created=clock.now(), role="admin")
    guard = ModRevisionGuard(key=place, mod_revision=0 if stored is None else stored.mod_revision)
    try:
        await transport.commit([guard], [Put(key=place, value=codec.encode(record))])
    except ConflictError as error:
        raise FleetctlError(
            f"apikey/{NAME} was changed at the same time; run `fleetctl up` again"
        ) from error


async def prepare_api_key(etcd: EtcdAddress, data_dir: DataDir, clock: Clock) -> None:
    """Create the key in a fleet without users and identities. Raises FleetctlError."""
    transport = connect(etcd)
    try:
        await ensure_api_key(transport, data_dir, clock)
    except StoreError as error:
        raise FleetctlError(str(error)) from error
    finally:
        await transport.close()


def _read_or_create(data_dir: DataDir) -> NewSecret:
    path = data_dir.api_key
    try:
        return secret_of(process_secrets.read_secret_file(path).decode("ascii").strip())
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise FleetctlError(
            f"{path} cannot be used: {error}. Delete it, and `fleetctl up` makes a new key"
        ) from error
    secret = new_secret()
    try:
        make_private_folder(path.parent)
        write_atomically(path, f"{secret.text}\n", mode=0o600)
    except OSError as error:
        raise FleetctlError(f"{path} cannot be written: {error.strerror or error}") from error
    return secret
