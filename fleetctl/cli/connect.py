"""From a command's flags to an open store, and from its work to an exit code.

Every verb imports this first: what is dear (an event loop, pydantic, TLS) is imported where it is used.

Reading the store once, by the quick way if it leads there, else by the whole one.
"""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fleetctl.cli import errors
from fleetctl.cli.resolve import resolve_options
from machinery.clock import SystemClock
from store.errors import StoreError, UnavailableError, UndecodableError
from store.etcd.address import EtcdAddress
from store.etcd.flags import address_from_flags, etcd_options
from store.etcd.sync_reader import SyncReader, run_sync
from store.reads import StoreReader

if TYPE_CHECKING:  # 8 ms, and the quick way needs no more of it than store.reads
    from store.port import Transport

T = TypeVar("T")
Command = Callable[..., Any]


def store_options(command: Command) -> Command:
    """Add the flags that say which fleet is meant: --context, --data-dir, --etcd and its companions."""
    return _context(_data_dir(etcd_options(_resolve_context(command))))


def gateway_options(command: Command) -> Command:
    """Add `store_options`, --gateway and --api-key-file: for what is asked through a gateway.

    The command receives `gateway` (a URL, or "": find one in the store), `api_key_file` (a path, or None) and
    `api_key` (or ""); at most one of the two last.
    """
    return store_options(_gateway(command))


def data_dir_option(command: Command) -> Command:
    """Add --data-dir: the folder of a fleet that `fleetctl up` runs on this machine; and --context."""
    return _context(_data_dir(_resolve_context(command)))


def cluster_options(command: Command) -> Command:
    """Add --etcd and its companions, and --context: for what needs an etcd of the user's own."""
    return _context(etcd_options(_resolve_context(command)))


def _data_dir(command: Command) -> Command:
    return click.option(
        "--data-dir",
        envvar="FLEET_DATA_DIR",
        type=click.Path(file_okay=False, path_type=Path),
        default=default_data_dir,
        show_default="the user's data folder",
        help="Folder of the fleet that `fleetctl up` runs on this machine.",
    )(command)


def default_data_dir() -> Path:
    """Return the folder that `fleetctl up` uses unless another is said."""
    import platformdirs  # noqa: PLC0415 - not needed where a flag or a context says it

    return Path(platformdirs.user_data_dir("mlx-fleet"))


def _context(command: Command) -> Command:
    return click.option(
        "--context", default=None, help="Which fleet, by its name in `fleetctl config`."
    )(command)


def _gateway(command: Command) -> Command:
    options = (
        click.option(
            "--gateway",
            envvar="FLEET_GATEWAY",
            default="",
            metavar="URL",
            help="The gateway to ask (else one of the fleet's).",
        ),
        click.option(
            "--api-key-file",
            envvar="FLEET_API_KEY_FILE",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="File with the API key, where the gateway asks for one.",
        ),
        click.option(
            "--api-key",
            envvar="FLEET_API_KEY",
            default="",
            hidden=True,  # on a command line everybody on the machine could read it
        ),
    )
    for option in options:
        command = option(command)
    return command


def _resolve_context(command: Command) -> Command:
    """Have the command called with what the context says in its options."""

    @wraps(command)
    def with_context(*args: Any, context: str | None, **options: Any) -> Any:
        return command(*args, **resolve_options(options, context))

    return with_context


def etcd_address(options: dict[str, Any]) -> EtcdAddress:
    """Return where the store is: what --etcd says, else the fleet of the data folder."""
    from store.etcd.member import sockets  # noqa: PLC0415 - not needed for an etcd elsewhere

    if options["etcd"]:
        return address_from_flags(options)
    try:
        local = EtcdAddress(socket=sockets.client_socket(etcd_dir(options["data_dir"])))
    except sockets.SocketFolderError as error:
        raise errors.FleetctlError(str(error)) from error
    return address_from_flags(options, default=local)


def etcd_dir(data_dir: Path) -> Path:
    """Return where the embedded etcd of a data folder lives."""
    return data_dir.expanduser().absolute() / "etcd"


@asynccontextmanager
async def open_store(options: dict[str, Any]) -> AsyncIterator["Transport"]:
    """Open the store for the length of a command."""
    from store.etcd.connect import connect  # noqa: PLC0415 - `get` reads without it

    where = etcd_address(options)
    transport = connect(where)
    try:
        yield transport
    except UnavailableError as error:
        if where.socket is None or options["etcd"] or where.socket.exists():
            raise
        folder = options["data_dir"].expanduser().absolute()
        raise UnavailableError(f"no fleet runs in {folder}", ambiguous=error.ambiguous) from error
    finally:
        await transport.close()


@contextmanager
def translate_errors() -> Iterator[None]:
    """Have the store's failures, strange documents and Ctrl-C become refusals; `run` does so, too."""
    try:
        yield
    except StoreError as error:
        raise errors.from_store_error(error) from error
    except UndecodableError as error:
        raise errors.FleetctlError(str(error)) from error
    except KeyboardInterrupt:
        raise errors.InterruptedByUser("interrupted") from None


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; the store's failures and strange documents become refusals."""
    import asyncio  # noqa: PLC0415 - `get` works without an event loop

    found: list[T] = []

    async def kept() -> None:
        found.append(await main)

    with translate_errors():
        # Not as the task's result: at the end asyncio.run has its handler of SIGINT written out, and with it the
        # result (CPython's signal.getsignal), which are ten seconds for 10,000 objects.
        asyncio.run(kept())
    return found[0]


def read_once(options: dict[str, Any], main: Callable[[StoreReader], Coroutine[Any, Any, T]]) -> T:
    """Return what `main` makes of the store; it only reads, and may be called twice.

    The quick way wants etcd's JSON gateway and says little about what is wrong: whatever goes wrong there, the
    whole way (gRPC, several tries) decides, and its words are what the user reads.

    Raises:
        FleetctlError: what `main` raises, or the store's refusal.

    """
    with translate_errors():
        store = SyncReader(etcd_address(options), SystemClock())
        try:
            return run_sync(main(store))
        except StoreError:
            pass
        finally:
            store.close()
    return run(_read_by_grpc(options, main))


async def _read_by_grpc(
    options: dict[str, Any], main: Callable[[StoreReader], Coroutine[Any, Any, T]]
) -> T:
    async with open_store(options) as transport:
        return await main(transport)
