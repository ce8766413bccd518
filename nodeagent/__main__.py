"""The command `fleet-nodeagent`: flags and wiring only."""

import asyncio
import fcntl
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import IO, Any, Final

import click
from pydantic import TypeAdapter, ValidationError

from identity.daemon import daemon_options, start_daemon
from identity.listeners import api_security, insecure_http_flag
from identity.metrics_access import metrics_flags
from identity.names import Role
from machinery import environment
from machinery.files import make_owner_folder
from machinery.log_flags import LEVEL_VARIABLE
from machinery.options import FOLDER, PORT, Option, options
from machinery.process_main import GRACE_S, run_until_signal
from machinery.unix_sockets import SocketFolderError
from machinery.version import version
from models import inspection
from nodeagent.agent import Agent
from nodeagent.dependencies import AgentConfig
from nodeagent.engines.addresses import EngineAddresses, make_socket_folder
from nodeagent.hardware.probe import read_machine_facts
from nodeagent.hardware.readings import HardwareError, HardwareFacts
from nodeagent.model_store.flags import model_disk_flags, model_disk_limits
from nodeagent.node.identity import Identity, IdentityError, load_or_create
from nodeagent.node.registration import NameTakenError, session_name
from nodeagent.replicas.start_queue import DEFAULT_CONCURRENCY
from schemas import quantity
from schemas.meta import Labels
from schemas.node import MemoryLimitSource, NodeStatus
from schemas.wire.engine_address import is_loopback
from store.etcd.connect import connect

_LABELS = TypeAdapter(Labels)
_LOCK = "lock"
_INSECURE_ENGINES = "--insecure-engines"


OPTIONS: Final = (
    Option(
        "--state-dir",
        "Folder for this agent's identity and engine logs.",
        type=FOLDER,
        required=True,
    ),
    Option(
        "--models-dir",
        "Folder for relative model paths, and for models that are fetched from a hub.",
        type=FOLDER,
        default=inspection.DEFAULT_MODELS_DIR,
    ),
    Option("--name", "Name of the node; default: the host name.", variable="FLEET_NODE_NAME"),
    Option(
        "--address",
        "Address on which engines listen and gateways reach them; with --engine-sockets, that of the agent's API only.",
        name="node_address",
        default="127.0.0.1",
        variable="FLEET_NODE_ADDRESS",
    ),
    Option(
        "--engine-sockets",
        "Folder in which engines listen on Unix sockets instead of ports. Only gateways on this machine with the same "
        "flag and the same user reach them.",
        type=FOLDER,
    ),
    Option(
        "--engine-port",
        "First port for engines; the agent uses up to 100 ports from there on. Also the first name of a socket.",
        type=click.IntRange(1024, 65000),
        default=4100,
    ),
    Option(
        "--api-port",
        "Port on --address for the agent's API (logs and metrics); 0 for any.",
        type=PORT,
        default=4001,
        variable="FLEET_AGENT_PORT",
    ),
    Option(
        "--memory",
        "Memory for models, such as 24Gi; default: what the hardware recommends.",
        variable="FLEET_NODE_MEMORY",
    ),
    Option(
        "--start-concurrency",
        "Number of engines that may load their models at once; the others wait, by priority.",
        type=click.IntRange(1, 100),
        default=DEFAULT_CONCURRENCY,
    ),
    Option(
        "--upload-limit",
        "Bytes a second of the files of models that other agents get from this one; a tenth of it while an engine of "
        "this Mac generates.",
        metavar="SIZE",
        default="1Gi",
    ),
    Option(
        "--serve-hub",
        "Serve the models on this Mac's disk to Hugging Face's clients, at the path /hub of the agent's API. A client "
        "needs a certificate of the role admin or node.",
        name="serves_hub",
        is_flag=True,
    ),
    Option(
        "--part-of-machine",
        "This machine runs several nodes on purpose; give the flag to all their agents.",
        is_flag=True,
        variable=None,
    ),
    Option(
        "--label",
        "Label of the node as KEY=VALUE; may be repeated.",
        name="labels",
        multiple=True,
        variable=None,
    ),
    Option(
        _INSECURE_ENGINES,
        "Let engines serve plain HTTP without authentication on an --address that other machines can reach, while the "
        "node has no identity.",
        is_flag=True,
        variable="FLEET_INSECURE_ENGINES",
    ),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options("FLEET", *OPTIONS)
@model_disk_flags
@daemon_options
@insecure_http_flag
@metrics_flags
def main(**options: Any) -> None:
    """Run the agent of this Mac: its engines, its lease and its status."""
    state_dir: Path = options["state_dir"].expanduser().resolve()
    daemon = start_daemon("nodeagent", Role.NODE, options, identity_dir=state_dir / "identity")
    clock, credentials = daemon.clock, daemon.credentials
    try:
        trace_settings = environment.trace_settings()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    # Children must not inherit anything that the agent was given for other programs.
    environment.drop_secrets(environment.TRACE_PREFIX)
    lock = _lock(state_dir)
    facts, identity = _identify(state_dir, options["name"])
    if options["serves_hub"] and credentials is None:
        click.echo("nodeagent: no mirror: --serve-hub needs the node's identity", err=True)
    config = AgentConfig(
        state_dir=state_dir,
        models_dir=options["models_dir"].expanduser().resolve(),
        addresses=_addresses(options, identity.name, has_identity=credentials is not None),
        session=session_name(state_dir, os.getpid()),
        name=identity.name,
        status=describe(facts, identity, options),
        casts_to_float32=facts.os == "Linux",
        is_memory_chosen=bool(options["memory"]),
        model_disk=model_disk_limits(options),
        start_concurrency=options["start_concurrency"],
        upload_bytes_per_s=_upload_limit(options["upload_limit"]),
        serves_hub=options["serves_hub"],
        api_port=options["api_port"],
        api_security=api_security(options),
        insecure_flags=insecure_flags(options),
        ring=daemon.ring,
        has_store_password=bool(daemon.etcd.password),
        identity_folder=daemon.folder,
        credentials=credentials,
        engine_variables={**trace_settings, LEVEL_VARIABLE: options["log_level"]},
    )

    async def run() -> None:
        transport = connect(daemon.etcd)
        try:
            await Agent(transport, clock, config).run()
        except BaseExceptionGroup as group:
            taken = group.subgroup(NameTakenError)
            if taken is None:
                raise
            raise SystemExit(f"nodeagent: {taken.exceptions[0]}") from None
        finally:
            await transport.close()

    code = run_until_signal(run, grace_s=GRACE_S)
    lock.close()
    sys.exit(code)


def _identify(state_dir: Path, name: str | None) -> tuple[HardwareFacts, Identity]:
    """Return the facts of this machine, and the identity of its node; end the process if there are none."""
    try:
        facts = asyncio.run(read_machine_facts())
        identity = load_or_create(
            state_dir, hardware_uuid=facts.hardware_uuid, name=name, hostname=facts.hostname
        )
    except (HardwareError, IdentityError) as error:
        raise SystemExit(f"nodeagent: {error}") from error
    if identity.notice:
        click.echo(f"nodeagent: {identity.notice}", err=True)
    return facts, identity


def _upload_limit(text: str) -> float:
    """Return the bytes a second of --upload-limit.

    Raises:
        click.UsageError: it is no size above 0.

    """
    try:
        found = quantity.parse(text)
    except ValueError as error:
        raise click.UsageError(f"--upload-limit: {error}") from error
    if found <= 0:
        raise click.UsageError(
            f"--upload-limit: {text} is no rate; expected more than 0, such as 100Mi"
        )
    return float(found)


def insecure_flags(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the given flags that switch protection off, for `fleetctl doctor`."""
    found = api_security(options).insecure_flags
    return (*found, _INSECURE_ENGINES) if options["insecure_engines"] else found


def _addresses(options: dict[str, Any], node: str, *, has_identity: bool) -> EngineAddresses:
    """Return the addresses for engines; the folder for their sockets exists then.

    Raises:
        click.UsageError: the folder cannot be used, or engines would answer other machines without authentication.

    """
    folder: Path | None = options["engine_sockets"]
    try:
        sockets = folder and make_socket_folder(folder.expanduser(), node)
    except (SocketFolderError, OSError, ValueError) as error:
        raise click.UsageError(f"--engine-sockets: {error}") from error
    host = options["node_address"]
    is_safe = sockets is not None or has_identity or is_loopback(host)
    if not (is_safe or options["insecure_engines"]):
        raise click.UsageError(
            f"--address {host}: other machines can reach it, and this node has no identity, so its engines would answer "
            "everyone, in clear text. Run `fleetctl join` on this Mac; or give --engine-sockets if all gateways run on "
            f"it; or {_INSECURE_ENGINES} if you trust everything on the network"
        )
    return EngineAddresses(host=host, first=options["engine_port"], sockets=sockets)


def describe(facts: HardwareFacts, identity: Identity, options: dict[str, Any]) -> NodeStatus:
    """Return the node's status without its models.

    Raises:
        click.UsageError: a flag is invalid.

    """
    try:
        memory = quantity.parse(options["memory"]) if options["memory"] else None
    except ValueError as error:
        raise click.UsageError(f"--memory: {error}") from error
    return NodeStatus(
        uid=identity.uid,
        hostname=facts.hostname,
        address=options["node_address"],
        agent_version=version(),
        os=facts.os,
        os_version=facts.os_version,
        machine=facts.machine,
        chip=facts.chip,
        cpu_cores=facts.cpu_cores,
        performance_cores=facts.performance_cores or 0,
        metal=facts.metal,
        gpu_cores=facts.gpu_cores,
        memory_bytes=facts.memory_bytes,
        # Read from this machine: the identity's may have been used without a check.
        hardware_uuid=facts.hardware_uuid.strip().lower(),
        is_part=options["part_of_machine"],
        mlx_version=installed("mlx"),
        mlx_lm_version=installed("mlx-lm"),
        allocatable_bytes=memory if memory is not None else facts.gpu_memory_limit_bytes,
        allocatable_source=facts.gpu_memory_limit_source
        if memory is None
        else MemoryLimitSource.CHOSEN,
        labels=dict(map(_label, options["labels"])),
    )


def installed(distribution: str) -> str:
    """Return the version of a package that engines import, "" if it is not installed. The agent never imports it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _label(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    try:
        _LABELS.validate_python({key: value})
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise click.UsageError(f"--label {text}: {why}; write KEY=VALUE as in rack=a1") from error
    if "=" not in text:
        raise click.UsageError(f"--label {text}: write KEY=VALUE as in rack=a1")
    return key, value


def _lock(state_dir: Path) -> IO[str]:
    """Lock the folder for this process: two agents in one folder would stop each other's engines."""
    try:
        make_owner_folder(state_dir, sign=_LOCK)
        lock = (state_dir / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SystemExit(
            f"nodeagent: another agent uses {state_dir}; give each agent its own --state-dir"
        ) from error
    except OSError as error:
        raise SystemExit(f"nodeagent: cannot use {state_dir}: {error.strerror}") from error
    return lock


if __name__ == "__main__":
    main()
