"""The programs of a fleet on one machine, as command lines. Starts nothing."""

import sys
from dataclasses import dataclass
from pathlib import Path

from fleetctl.datadir import DataDir
from machinery.supervisor import Program

_PORTS_PER_NODE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOrder:
    """What `fleetctl up` was asked for."""

    data_dir: DataDir
    models_dir: Path
    nodes: int
    node_memory: str
    """What models may use on each node; empty for an even share of the machine."""
    host: str
    gateway_port: int
    engine_port: int
    agent_port: int
    """First port of agents' APIs, one for each node; 0: any."""
    node_grace_s: float
    etcd_binary: Path | None
    etcd_quota_bytes: int
    log_level: str

    @property
    def gateway_url(self) -> str:
        return f"http://{self.host}:{self.gateway_port}"


def node_names(order: FleetOrder) -> list[str]:
    """Return the names of the nodes, from node-1 on."""
    return [f"node-{number}" for number in range(1, order.nodes + 1)]


def reconciler(order: FleetOrder, etcd: str) -> Program:
    return _program(
        order, "reconciler", "reconciler", etcd, "--node-grace-period", str(order.node_grace_s)
    )


def gateway(order: FleetOrder, etcd: str) -> Program:
    place = ("--host", order.host, "--port", str(order.gateway_port))
    kept = ("--state-dir", str(order.data_dir.path / "gateway"))
    return _program(order, "gateway", "gateway", etcd, *place, *kept)


def agents(order: FleetOrder, etcd: str, share: str) -> list[Program]:
    """Return an agent for each node; `share` is what models may use on each."""
    return [
        _program(
            order,
            name,
            "nodeagent",
            etcd,
            *("--name", name),
            *("--state-dir", str(order.data_dir.node(name))),
            *("--models-dir", str(order.models_dir)),
            *("--memory", order.node_memory or share),
            *(("--part-of-machine",) if order.nodes > 1 else ()),
            *("--engine-port", str(order.engine_port + _PORTS_PER_NODE * number)),
            *("--api-port", str(order.agent_port + number if order.agent_port else 0)),
        )
        for number, name in enumerate(node_names(order))
    ]


def _program(order: FleetOrder, name: str, module: str, etcd: str, *flags: str) -> Program:
    return Program(
        name=name,
        command=(
            *(sys.executable, "-m", module, "--etcd", etcd),
            *flags,
            *("--log-level", order.log_level),
        ),
        log=order.data_dir.log(name),
        record=order.data_dir.record(name),
    )
