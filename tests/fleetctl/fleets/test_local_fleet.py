"""Command lines of the processes of a local fleet."""

import socket
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from fleetctl.fleets import local_fleet, local_programs
from fleetctl.fleets.data_dir import DataDir
from fleetctl.fleets.local_programs import JoinSettings, LocalFleetSettings


def has_ipv6() -> bool:
    """Return whether this machine has the loopback address of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def order(nodes: int) -> LocalFleetSettings:
    return LocalFleetSettings(
        data_dir=DataDir(Path("/fleet")),
        models_dir=Path("/models"),
        nodes=nodes,
        node_memory="",
        host="127.0.0.1",
        gateway_port=8080,
        engine_port=4100,
        agent_port=4001,
        node_grace_s=30,
        etcd_binary=None,
        etcd_quota_bytes=2**30,
        log_level="info",
    )


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6"))],
)
def test_a_port_is_unusable_while_another_process_listens_on_it(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        assert local_fleet.why_unusable(host, port) == "another program listens on it"
    assert "while attempting" not in local_fleet.why_unusable("192.0.2.1", 0)
    assert local_fleet.why_unusable(host, 0) == ""


@pytest.mark.parametrize(("nodes", "is_part"), [(1, False), (2, True)])
def test_agents_that_share_a_machine_get_a_flag(nodes: int, is_part: bool) -> None:
    made = local_programs.agent_programs(order(nodes), "unix:/etcd", "8Gi")
    assert [("--part-of-machine" in agent.command) for agent in made] == [is_part] * nodes
    # A share that was computed without Metal would keep the agent of a whole Mac from what Metal recommends.
    assert [("--memory" in agent.command) for agent in made] == [is_part] * nodes


def test_the_dashboard_of_a_fleet_that_others_join_has_an_https_url() -> None:
    """Finding S19: the printed http:// URL was answered with 400 https_required."""
    settings = replace(order(1), dashboard_port=4003)
    assert settings.dashboard_url == "http://127.0.0.1:4003"
    joined = replace(settings, join=JoinSettings(address="10.0.0.1", etcd_port=2379, api_port=4002))
    assert joined.dashboard_url == "https://127.0.0.1:4003"


def test_an_agent_knows_the_nodes_of_an_earlier_start(tmp_path: Path) -> None:
    for name in ("node-1", "node-2"):
        (tmp_path / "nodes" / name).mkdir(parents=True)
    settings = replace(order(1), data_dir=DataDir(tmp_path))
    (agent,) = local_programs.agent_programs(settings, "unix:/etcd", "8Gi")
    assert "--part-of-machine" in agent.command, "the other node becomes DuplicateHardware"


def test_engines_listen_on_sockets_unless_told_otherwise() -> None:
    def commands(settings: LocalFleetSettings) -> list[str]:
        agents = local_programs.agent_programs(settings, "unix:/etcd", "8Gi")
        programs = [*agents, local_programs.gateway_program(settings, "unix:/etcd")]
        return [" ".join(program.command) for program in programs]

    flag = "--engine-sockets /fleet/sock"
    assert [flag in command for command in commands(order(2))] == [True] * 3
    tcp = replace(order(2), is_engine_tcp=True)
    assert [flag in command for command in commands(tcp)] == [False] * 3
    deep = replace(order(2), data_dir=DataDir(Path("/" + "deep/" * 30)))
    (folder,) = {command.partition("--engine-sockets ")[2].split()[0] for command in commands(deep)}
    assert folder.startswith(f"{tempfile.gettempdir()}/mlx-fleet-")


def test_agents_leave_out_the_port_at_which_macs_join(tmp_path: Path) -> None:
    join = JoinSettings(address="10.0.0.5", etcd_port=2379, api_port=4002)
    settings = replace(order(3), join=join, data_dir=DataDir(tmp_path))
    ports = [
        agent.command[agent.command.index("--api-port") + 1]
        for agent in local_programs.agent_programs(settings, "unix:/etcd", "8Gi")
    ]
    assert ports == ["4001", "4004", "4005"]


def test_a_fleet_that_others_may_join_gives_each_process_its_own_identity(tmp_path: Path) -> None:
    join = JoinSettings(address="10.0.0.5", etcd_port=2379, api_port=4002)
    settings = replace(order(1), join=join, data_dir=DataDir(tmp_path), host="10.0.0.5")
    assert settings.gateway_url == "https://10.0.0.5:8080"
    agent = " ".join(local_programs.agent_programs(settings, "unix:/etcd", "8Gi")[0].command)
    assert f"--identity-dir {tmp_path}/nodes/node-1/identity" in agent
    assert f"--etcd-password-file {tmp_path}/passwords/node-node-1.env" in agent
    assert "--address 10.0.0.5" in agent
    assert "--engine-sockets" not in agent
    reconciler = " ".join(local_programs.reconciler_program(settings, "unix:/etcd").command)
    assert f"--authority-dir {tmp_path}/authority" in reconciler
    assert "--advertise-etcd https://10.0.0.5:2379" in reconciler
