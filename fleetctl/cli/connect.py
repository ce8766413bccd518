"""The options that name a fleet, and the connection to its store.

Every verb imports this module: expensive imports (an event loop, pydantic, TLS) are made in the functions that use them.
"""

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from fleetctl.cli import errors
from fleetctl.cli.program import ConnectionOption
from fleetctl.cli.resolve import resolve_options
from insight.errors import ProcessError
from machinery.clock import SystemClock
from machinery.files import is_locked
from machinery.options import options as flag_options
from schemas.wire.identity_files import find_identity_files
from store.errors import (
    EditRefusedError,
    StoreError,
    UnavailableError,
    UndecodableError,
)
from store.etcd.address import EtcdAddress
from store.etcd.flags import ETCD_OPTIONS, address_from_flags, etcd_options
from store.reads import StoreReader

if TYPE_CHECKING:  # its import takes 8 ms, and `get` needs only store.reads
    from store.port import Transport

# In a data folder of `fleetctl up --join`.
# Held by the supervisor of the fleet in a data folder.
LOCK = "lock"
_ADMIN_PASSWORD, _ADMIN_IDENTITY = Path("passwords", "admin.env"), Path("identities", "admin")
_API_KEY = Path("passwords", "api-key")

T = TypeVar("T")
Command = Callable[..., Any]


def store_options(command: Command) -> Command:
    """Add the flags that choose the fleet: --context, --data-dir, --etcd and the other --etcd flags, --identity-dir."""
    cls, etcd = ConnectionOption, flag_options("FLEET", *ETCD_OPTIONS, cls=ConnectionOption)
    return _context(
        _data_dir(_identity_dir(etcd(_resolve_context(command)), cls=cls), cls=cls), cls=cls
    )


def with_store(command: Command) -> Command:
    """Add `store_options`; the command, a coroutine function, gets the open store as its first argument."""

    @wraps(command)
    async def with_transport(*args: Any, **options: Any) -> None:
        async with open_store(options) as transport:
            await command(transport, *args, **options)

    return store_options(with_transport)


def process_options(command: Command) -> Command:
    """Add `store_options` and --gateway-ca, for commands that connect to the fleet's processes.

    The command receives `gateway_ca` (a path or None); `fleetctl.fleets.dialer` reads it.
    """
    ca = click.option(
        "--gateway-ca",
        cls=ConnectionOption,
        envvar="FLEET_GATEWAY_CA",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="CA certificate of gateways that serve HTTPS (PEM; default: those of the system).",
    )
    return store_options(ca(command))


def gateway_options(command: Command) -> Command:
    """Add `process_options`, --gateway and `api_key_options`, for commands that use a gateway.

    The command receives `gateway` (URLs; none: look them up in the store).
    """
    return process_options(
        gateway_option(
            "Gateway to use; repeat it for several, which are tried in turn (default: the gateways of the fleet).",
            cls=ConnectionOption,
        )(api_key_options(command))
    )


class _GatewayUrls(click.ParamType[str]):
    """URLs of gateways; in the environment variable and in a value several are separated by commas."""

    name = "url"
    envvar_list_splitter = ","


def gateway_option(
    text: str, *, cls: type[click.Option] = click.Option
) -> Callable[[Command], Command]:
    """Return the decorator for --gateway; the command receives the texts for `arguments.parse_urls`."""
    return click.option(
        "--gateway",
        cls=cls,
        envvar="FLEET_GATEWAY",
        multiple=True,
        type=_GatewayUrls(),
        metavar="URL",
        help=text,
    )


def api_key_options(command: Command) -> Command:
    """Add --api-key-file. A key itself is taken from the environment only.

    The command receives `api_key_file` (a path or None) and `api_key` (or ""), at most one of which is set;
    `fleetctl.fleets.gateways.read_api_key` returns the key.
    """
    file = click.option(
        "--api-key-file",
        cls=ConnectionOption,
        envvar="FLEET_API_KEY_FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with the API key, if the gateway requires one; or set FLEET_API_KEY.",
    )
    key = click.option(
        "--api-key", envvar="FLEET_API_KEY", default="", hidden=True, callback=_refuse_key_in_flag
    )
    return file(key(command))


def _refuse_key_in_flag(context: click.Context, parameter: click.Parameter, key: str) -> str:
    if context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE:
        raise click.UsageError(
            "--api-key is not supported: every user of this machine can read a command line, for example with ps. "
            "Write the key to a file and pass it with --api-key-file, FLEET_API_KEY_FILE or the context "
            "(`fleetctl config set-context NAME --api-key-file FILE`); or set FLEET_API_KEY"
        )
    return key


def data_dir_option(command: Command) -> Command:
    """Add --data-dir (the folder of a fleet that `fleetctl up` runs on this machine) and --context."""
    return _context(_data_dir(_resolve_context(command)))


def cluster_options(command: Command) -> Command:
    """Add --context, --identity-dir and the --etcd flags, for commands that need the user's own etcd."""
    return _context(_identity_dir(etcd_options(_resolve_context(command))))


def _identity_dir(command: Command, *, cls: type[click.Option] = click.Option) -> Command:
    return click.option(
        "--identity-dir",
        cls=cls,
        envvar="FLEET_IDENTITY_DIR",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder with your certificate of the fleet: commands prove by it who you are, and dial only processes that do.",
    )(command)


def _data_dir(command: Command, *, cls: type[click.Option] = click.Option) -> Command:
    return click.option(
        "--data-dir",
        cls=cls,
        envvar="FLEET_DATA_DIR",
        type=click.Path(file_okay=False, path_type=Path),
        default=default_data_dir,
        show_default="the user's data folder",
        help="Data folder of a fleet that `fleetctl up` runs on this machine.",
    )(command)


def default_data_dir() -> Path:
    """Return the data folder that `fleetctl up` uses by default."""
    import platformdirs  # noqa: PLC0415 - not needed when a flag or a context names the folder

    return Path(platformdirs.user_data_dir("mlx-fleet"))


def _context(command: Command, *, cls: type[click.Option] = click.Option) -> Command:
    return click.option(
        "--context",
        cls=cls,
        default=None,
        help="Context to use: the name of a fleet in `fleetctl config`.",
    )(command)


def _resolve_context(command: Command) -> Command:
    """Fill in the command's options from the context. The command may be a coroutine function."""

    @wraps(command)
    def with_context(*args: Any, context: str | None, **options: Any) -> Any:
        result = command(*args, **_with_local_files(resolve_options(options, context)))
        return run(result) if inspect.iscoroutine(result) else result

    return with_context


def etcd_address(options: dict[str, Any]) -> EtcdAddress:
    """Return the address of the store: --etcd, else the embedded etcd of the data folder."""
    from machinery.unix_sockets import SocketFolderError  # noqa: PLC0415 - not needed with --etcd
    from store.etcd.member import sockets  # noqa: PLC0415 - the same

    if options["etcd"]:
        identity = find_identity_files(options.get("identity_dir"))
        return address_from_flags(options, identity=identity)
    try:
        local = EtcdAddress(socket=sockets.client_socket(etcd_dir(options["data_dir"])))
    except SocketFolderError as error:
        raise errors.FleetctlError(str(error)) from error
    return address_from_flags(options, default=local)


def _with_local_files(options: dict[str, Any]) -> dict[str, Any]:
    """Add the administrator's password, identity and API key of a data folder that has them (`fleetctl up --join`).

    A password, an identity or a key that a flag, the environment or the context gives comes first.
    """
    if "data_dir" not in options or options.get("etcd"):
        return options
    folder, found = data_folder(options["data_dir"]), dict(options)
    given = ("etcd_user", "etcd_password", "etcd_password_file")
    password, identity = folder / _ADMIN_PASSWORD, folder / _ADMIN_IDENTITY
    if "etcd_user" in options and not any(options[name] for name in given) and password.exists():
        found["etcd_password_file"] = password
    if "identity_dir" in options and options["identity_dir"] is None and identity.exists():
        found["identity_dir"] = identity
    # Never for a gateway that is named: it may be of another fleet.
    needs_key = "api_key_file" in options and not (options["api_key_file"] or options["api_key"])
    if needs_key and not options.get("gateway") and (folder / _API_KEY).exists():
        found["api_key_file"] = folder / _API_KEY
    return found


def etcd_dir(data_dir: Path) -> Path:
    """Return the folder of the embedded etcd in a data folder."""
    return data_folder(data_dir) / "etcd"


def data_folder(data_dir: Path) -> Path:
    """Return the absolute path of a data folder."""
    return data_dir.expanduser().absolute()


@asynccontextmanager
async def open_store(
    options: dict[str, Any], *, is_recorded: bool = True
) -> AsyncIterator["Transport"]:
    """Open the store for the duration of a command. Writes of objects are recorded for `fleetctl changes`.

    Commands that write nothing may save the import of the record (`is_recorded`), half of that of the transport.
    """
    from store.etcd.connect import connect  # noqa: PLC0415 - `get` does not need it

    store_address = etcd_address(options)
    transport = connect(store_address)
    try:
        yield _recorded(transport, store_address.username, options) if is_recorded else transport
    except UnavailableError as error:
        socket = store_address.socket
        if socket is None or options["etcd"] or (socket.exists() and not error.absent):
            raise
        folder = data_folder(options["data_dir"])
        if is_locked(folder / LOCK):
            text = _describe_stopped_etcd(folder)
            raise UnavailableError(text, ambiguous=error.ambiguous) from error
        if socket.exists():
            raise
        raise UnavailableError(
            f"no fleet runs in {folder}", ambiguous=error.ambiguous, absent=True
        ) from error
    finally:
        await transport.close()


def _describe_stopped_etcd(folder: Path) -> str:
    """Say that the fleet of a data folder runs without its etcd, and what to do."""
    import shutil  # noqa: PLC0415 - only for this error

    from machinery.state_disk import is_almost_full  # noqa: PLC0415 - as above
    from schemas import quantity  # noqa: PLC0415 - as above

    usage = shutil.disk_usage(folder)
    is_full = is_almost_full(usage.free, usage.total, was=False)
    remedy = (
        f"Its disk is almost full, with {quantity.show(usage.free)} free: make room"
        if is_full
        else f"If this stays, {folder / 'logs' / 'up.log'} says why"
    )
    return f"the fleet in {folder} runs, but its etcd does not. `fleetctl up` starts etcd again and again. {remedy}"


def _recorded(transport: "Transport", account: str, options: dict[str, Any]) -> "Transport":
    """Return a transport that records what this command changes, with its user and reason."""
    from machinery.os_user import current_user  # noqa: PLC0415 - as above
    from manifests.change_log import AuditedTransport, ChangeAuthor  # noqa: PLC0415 - as above

    context = click.get_current_context(silent=True)
    author = ChangeAuthor(
        user=current_user(),
        account=account,
        manager="fleetctl",
        command="" if context is None else context.command_path,
        reason=options.get("reason", ""),
    )
    return AuditedTransport(transport, SystemClock(), author)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn store errors, undecodable documents and Ctrl-C into errors for users. `run` does this itself."""
    try:
        yield
    except StoreError as error:
        raise errors.from_store_error(error) from error
    except (UndecodableError, EditRefusedError, ProcessError) as error:
        raise errors.FleetctlError(str(error)) from error
    except KeyboardInterrupt:
        raise errors.InterruptedByUser("interrupted") from None


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; errors become errors for users."""
    import asyncio  # noqa: PLC0415 - `get` does not need an event loop

    results: list[T] = []

    async def keep_result() -> None:
        results.append(await main)

    with translate_errors():
        # Not as the task's result: at its end asyncio.run formats its SIGINT handler, and with it the result
        # (CPython's signal.getsignal). For 10,000 objects that takes ten seconds.
        asyncio.run(keep_result())
        return results[0]


def read_once(options: dict[str, Any], main: Callable[[StoreReader], Coroutine[Any, Any, T]]) -> T:
    """Return the result of `main`, which only reads.

    Raises:
        FleetctlError: the error of `main`, or of the store.

    """

    async def read() -> T:
        async with open_store(options, is_recorded=False) as transport:
            return await main(transport)

    return run(read())
