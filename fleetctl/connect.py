"""From a command's flags to an open store, and from its coroutine to an exit code."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import platformdirs
from click.core import ParameterSource

from fleetctl import errors
from store.codec import UndecodableError
from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.flags import address, etcd_options
from store.etcd.member.sockets import SocketFolderError, client_socket
from store.port import Transport

T = TypeVar("T")


def data_dir_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --data-dir: the folder of a fleet that `fleetctl up` runs on this machine."""
    return click.option(
        "--data-dir",
        envvar="FLEET_DATA_DIR",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path(platformdirs.user_data_dir("mlx-fleet")),
        show_default=True,
        help="Folder of the fleet that `fleetctl up` runs on this machine.",
    )(command)


def store_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags that say which fleet is meant."""
    return data_dir_option(etcd_options(command))


def one_target(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with one store in them: a flag is stronger than an environment variable.

    A forgotten FLEET_ETCD must not lead to another store than the one on the command line.
    """
    context = click.get_current_context()
    said = {
        name
        for name in ("etcd", "data_dir")
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    if len(said) == 2:
        raise click.UsageError("give --etcd or --data-dir: they are two stores")
    return {**options, "etcd": ()} if said == {"data_dir"} else options


def find(options: dict[str, Any]) -> EtcdAddress:
    """Return where the store is: what --etcd says, else the fleet of the data folder."""
    options = one_target(options)
    try:
        local = EtcdAddress(socket=client_socket(etcd_dir(options["data_dir"])))
    except SocketFolderError as error:
        raise errors.FleetctlError(str(error)) from error
    return address(options, default=local)


def etcd_dir(data_dir: Path) -> Path:
    """Return where the embedded etcd of a data folder lives."""
    return data_dir.expanduser().absolute() / "etcd"


@asynccontextmanager
async def opened(options: dict[str, Any]) -> AsyncIterator[Transport]:
    """Open the store for the length of a command."""
    transport = connect(find(options))
    try:
        yield transport
    finally:
        await transport.close()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; the store's failures and strange documents become refusals."""
    try:
        return asyncio.run(main)
    except StoreError as error:
        raise errors.of_store(error) from error
    except UndecodableError as error:
        raise errors.FleetctlError(str(error)) from error
    except KeyboardInterrupt:
        raise errors.InterruptedByUser("interrupted") from None
