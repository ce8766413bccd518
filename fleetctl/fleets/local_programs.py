"""Settings of a local fleet, and the command lines of its processes."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

from fleetctl.fleets.data_dir import DataDir
from fleetctl.fleets.local_trust import url_host
from machinery.supervisor import Program
from schemas.wire.engine_address import is_loopback

_PORTS_PER_NODE = 100
DASHBOARD_PORT: Final = 4003


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """The address at which other Macs reach this one, and its ports."""

    address: str
    etcd_port: int
    api_port: int
    """The port at which Macs join, of the reconciler's API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFleetSettings:
    """Settings of `fleetctl up`."""

    data_dir: DataDir
    models_dir: Path
    nodes: int
    node_memory: str
    """Memory for models on each node, as a quantity; empty for an equal share of the machine."""
    host: str
    gateway_port: int
    engine_port: int
    agent_port: int
    """First port of the agents' HTTP APIs, one per node; 0 lets the system choose."""
    node_grace_s: float
    etcd_binary: Path | None
    etcd_quota_bytes: int
    log_level: str
    gateway_workers: int = 1
    """Processes of the gateway."""
    default_model: str = ""
    """Model of requests that name none; empty: the only one there is."""
    is_engine_tcp: bool = False
    """True if engines listen on ports of the loopback address, which every process of this machine can reach."""
    tls_cert: Path | None = None
    """Certificate of the gateway for HTTPS; None: plain HTTP."""
    tls_key: Path | None = None
    is_insecure_http: bool = False
    """True if the gateway may serve plain HTTP to other machines."""
    join: JoinSettings | None = None
    """None: no other machine reaches the fleet."""
    dashboard_port: int | None = DASHBOARD_PORT
    """Port of the dashboard on the loopback address; 0 lets the system choose, None runs none."""
    can_dashboard_write: bool = False
    """True if the dashboard's page may change the fleet."""
    is_announced: bool = True
    """True if processes that other machines reach are announced on the local network."""
    auth: str = "auto"
    """`auto`: the gateway requires API keys unless it listens on a loopback address."""
    flags: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """Flags to start the fleet with next time, by option."""

    @property
    def is_secured(self) -> bool:
        """True if processes have users and identities: other machines may join, or might earlier."""
        return self.join is not None or (self.data_dir.authority / "ca.pem").exists()

    @property
    def requires_keys(self) -> bool:
        """True if the gateway requires API keys."""
        return self.auth == "on" or (self.auth == "auto" and not is_loopback(self.host))

    @property
    def gateway_url(self) -> str:
        """Return the base URL of the gateway."""
        # With an identity, the gateway serves HTTPS; on loopback addresses plain HTTP as well.
        is_exposed = self.is_secured and not (self.is_insecure_http or is_loopback(self.host))
        is_https = self.tls_cert is not None or is_exposed
        scheme = "https" if is_https else "http"
        return f"{scheme}://{self.host}:{self.gateway_port}"

    @property
    def engine_flags(self) -> tuple[str, ...]:
        """Return the flags of agents and the gateway that say where engines listen."""
        return () if self.is_engine_tcp else ("--engine-sockets", str(self.data_dir.engine_sockets))

    @property
    def transport_flags(self) -> tuple[str, ...]:
        """Return the flags that say how clients reach the gateway."""
        insecure = ("--insecure-http",) if self.is_insecure_http else ()
        if self.tls_cert is None or self.tls_key is None:
            return insecure
        return ("--tls-cert", str(self.tls_cert), "--tls-key", str(self.tls_key))

    @property
    def announce_flags(self) -> tuple[str, ...]:
        """Return the flag that keeps processes from being announced."""
        return () if self.is_announced else ("--no-announce",)

    @property
    def dashboard_url(self) -> str:
        """Return the address of the dashboard's page; "" if its port is not known, or there is none."""
        scheme = "https" if self.is_secured else "http"
        return f"{scheme}://127.0.0.1:{self.dashboard_port}" if self.dashboard_port else ""

    @property
    def etcd_url(self) -> str:
        """Return the URL at which other machines reach etcd; "" if they do not."""
        join = self.join
        return "" if join is None else f"https://{url_host(join.address)}:{join.etcd_port}"

    @property
    def listen_address(self) -> tuple[str, ...]:
        """Return the flag with the address of agents and engines."""
        return () if self.join is None else ("--address", self.join.address)

    def security_flags(self, component: str, identity: Path) -> tuple[str, ...]:
        """Return the flags with a process's identity and its password in etcd."""
        if not self.is_secured:
            return ()
        password = self.data_dir.passwords / f"{component}.env"
        return ("--identity-dir", str(identity), "--etcd-password-file", str(password))


def node_names(settings: LocalFleetSettings) -> list[str]:
    """Return the names of the nodes, starting with node-1."""
    return [f"node-{number}" for number in range(1, settings.nodes + 1)]


def reconciler_program(settings: LocalFleetSettings, etcd: str) -> Program:
    """Return the reconciler's command line."""
    data_dir = settings.data_dir
    return _program(
        settings,
        "reconciler",
        "reconciler",
        etcd,
        *("--node-grace-period", str(settings.node_grace_s)),
        *("--etcd-quota", str(settings.etcd_quota_bytes)),
        *settings.security_flags("reconciler", data_dir.identity("reconciler")),
        *settings.announce_flags,
        *_signer_flags(settings),
    )


def _signer_flags(settings: LocalFleetSettings) -> tuple[str, ...]:
    """Return the reconciler's flags for its port, and for signing certificates and joins on it.

    Any free port will do for its metrics: other processes find the address in its lease, and a machine may have several
    fleets. Macs that join need a fixed one.
    """
    if not settings.is_secured:
        return ("--api-port", "0")
    authority, join = ("--authority-dir", str(settings.data_dir.authority)), settings.join
    if join is None:
        return (*authority, "--api-port", "0")
    return (
        *authority,
        *("--api-host", join.address, "--api-port", str(join.api_port)),
        *("--advertise-etcd", settings.etcd_url),
    )


def etcd_proxy_programs(settings: LocalFleetSettings, etcd: str) -> list[Program]:
    """Return the proxy through which other machines reach etcd; none without --join."""
    if settings.join is None:
        return []
    data_dir = settings.data_dir
    flags = (
        *("--listen", settings.etcd_url.removeprefix("https://")),
        # To read revocations, it has the rights of the gateway, which are few.
        *("--etcd-password-file", str(data_dir.passwords / "gateway.env")),
        *("--identity-dir", str(data_dir.identity("etcd"))),
    )
    return [_program(settings, "etcd-proxy", "identity.etcd_proxy", etcd, *flags)]


def gateway_program(settings: LocalFleetSettings, etcd: str) -> Program:
    """Return the gateway's command line."""
    address_flags = ("--host", settings.host, "--port", str(settings.gateway_port))
    count = settings.gateway_workers
    worker_flags = ("--workers", str(count)) if count > 1 else ()
    state_flags = ("--state-dir", str(settings.data_dir.path / "gateway"))
    flags = (
        *address_flags,
        *worker_flags,
        *(("--default-model", settings.default_model) if settings.default_model else ()),
        *settings.engine_flags,
        *settings.transport_flags,
        *("--auth", settings.auth),
        *state_flags,
        *settings.security_flags("gateway", settings.data_dir.identity("gateway")),
        *settings.announce_flags,
    )
    return _program(settings, "gateway", "gateway", etcd, *flags)


def dashboard_programs(settings: LocalFleetSettings, etcd: str) -> list[Program]:
    """Return the dashboard, which listens on the loopback address alone; none if it is not wanted."""
    data_dir, port = settings.data_dir, settings.dashboard_port
    if port is None:
        return []
    flags = (
        *("--port", str(port), "--state-dir", str(data_dir.path / "dashboard")),
        *(("--allow-writes",) if settings.can_dashboard_write else ()),
        *settings.security_flags("dashboard", data_dir.identity("dashboard")),
    )
    return [_program(settings, "dashboard", "dashboard", etcd, *flags)]


def agent_programs(settings: LocalFleetSettings, etcd: str, share: str) -> list[Program]:
    """Return one agent per node; `share` is the memory for models on each, as a quantity."""
    # Nodes of an earlier start with more of them are not other machines with the same hardware.
    is_shared = settings.nodes > 1 or len(settings.data_dir.nodes()) > 1
    # The agent of a whole machine asks Metal; agents that share it must agree on their shares.
    memory = settings.node_memory or (share if settings.nodes > 1 else "")
    return [
        _program(
            settings,
            name,
            "nodeagent",
            etcd,
            *("--name", name),
            *("--state-dir", str(settings.data_dir.node(name))),
            *("--models-dir", str(settings.models_dir)),
            *(("--memory", memory) if memory else ()),
            *(("--part-of-machine",) if is_shared else ()),
            *(settings.engine_flags if settings.join is None else ()),
            *("--engine-port", str(settings.engine_port + _PORTS_PER_NODE * number)),
            *("--api-port", str(port)),
            *settings.listen_address,
            *settings.security_flags(f"node-{name}", settings.data_dir.node_identity(name)),
        )
        for number, (name, port) in enumerate(
            zip(node_names(settings), _agent_ports(settings), strict=False)
        )
    ]


def _agent_ports(settings: LocalFleetSettings) -> Iterator[int]:
    """Yield the ports of the agents' APIs; those of other processes on the same address are left out."""
    taken = {settings.gateway_port, settings.dashboard_port}
    if settings.join is not None:
        taken |= {settings.join.api_port, settings.join.etcd_port}
    for port in count(settings.agent_port):
        if not settings.agent_port:
            yield 0
        elif port not in taken:
            yield port


def _program(
    settings: LocalFleetSettings, name: str, module: str, etcd: str, *flags: str
) -> Program:
    return Program(
        name=name,
        command=(
            *(sys.executable, "-m", module, "--etcd", etcd),
            *flags,
            *("--log-level", settings.log_level),
        ),
        log=settings.data_dir.log(name),
        record=settings.data_dir.record(name),
    )
