"""A real agent on a machine that sleeps as far as a test can make it: the agent and its engines are frozen (SIGSTOP).

`python -m tests.support.sleeping_agent INTERFACE ...` with the flags of fleet-nodeagent. `tests.support.wake_card` is the
network card, which continues the frozen processes.
"""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from machinery.clock import Clock
from nodeagent import __main__ as command
from nodeagent.agent import Agent
from nodeagent.dependencies import AgentConfig, real_dependencies
from nodeagent.engines.engine_processes import find_engines
from nodeagent.hardware import linux
from nodeagent.hardware.readings import MachineReading
from store.port import Transport

FROZEN = "frozen-pids"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenMachine:
    """Sleep by SIGSTOP (`MachineSleeper`)."""

    state_dir: Path

    async def suspend(self) -> bool:
        engines = [found.child.record.pid for found in find_engines(self.state_dir / "engines")]
        pids = [*engines, os.getpid()]
        written = self.state_dir / f"{FROZEN}.new"
        written.write_text(" ".join(map(str, pids)))
        written.rename(self.state_dir / FROZEN)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(0)  # this process stops at the latest here, and goes on after SIGCONT
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeableReader:
    """Readings of a machine of its own, with one wired network and wake on LAN (`MachineReader`)."""

    interface: str

    async def take(self) -> MachineReading:
        addresses = {self.interface: psutil.net_if_addrs()[self.interface]}
        return MachineReading(
            memory=linux.read_memory(Path("/")),
            power="Mains",
            fabric=linux.parse_interfaces(addresses, {}),
            wakes_on_lan=True,
            runs_etcd=False,
        )


def main() -> None:
    interface = sys.argv.pop(1)

    def agent(transport: Transport, clock: Clock, config: AgentConfig) -> Agent:
        own = {"hostname": config.name, "hardware_uuid": f"machine-of-{config.name}"}
        config = replace(config, status=config.status.model_copy(update=own))
        dependencies = replace(
            real_dependencies(transport, clock, config),
            sleeper=FrozenMachine(state_dir=config.state_dir),
            readings=WakeableReader(interface=interface),
        )
        return Agent(transport, clock, config, dependencies)

    vars(command)["Agent"] = agent  # the program, with a machine of the test
    command.main()


if __name__ == "__main__":
    main()
