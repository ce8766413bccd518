"""The checks of this machine without a fleet: before it joins, or while its agent does not run."""

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Final

from fleetctl.discovery.suggestions import Findings
from fleetctl.fleets.data_dir import DataDir
from fleetctl.services.layout import default_backend, system_layout, user_layout
from insight.doctor.findings import Finding
from machinery.clock import Clock
from models import inspection
from nodeagent.doctor.checks import run_checks
from nodeagent.doctor.collector import collect_facts
from nodeagent.doctor.readers import CollectionScope
from nodeagent.hardware import metal
from schemas.quantity import counted

# The defaults of fleet-nodeagent.
_ENGINE_PORTS = range(4100, 4200)
_API_PORT = 4001
_MAX_SHOWN: Final = 5


async def examine_machine(
    clock: Clock, *, data_dir: Path, models_dir: Path | None = None, home: Path | None = None
) -> tuple[Finding, ...]:
    """Return the findings about this machine; it needs no store, no agent and no configuration.

    `data_dir` is that of `fleetctl up`; `models_dir` the folder of models, by default that of an installed agent.
    """
    home = home or Path.home()
    system = system_layout(default_backend(sys.platform), Path("/"))
    own = user_layout(default_backend(sys.platform), home, sys.platform)
    installed = (layout.models for layout in (system, own) if layout.models.exists())
    models_dir = models_dir or next(installed, inspection.DEFAULT_MODELS_DIR)
    scope = CollectionScope(
        models_dir=models_dir.expanduser().absolute(),
        engine_folders=(
            *(folder / "engines" for folder in DataDir(data_dir).nodes()),
            *(layout.state / "nodeagent" / "engines" for layout in (system, own)),
        ),
        engine_ports=_ENGINE_PORTS,
        api_port=_API_PORT,
        # Less than the time that any reader has.
        metal=partial(metal.check_device, limit_s=6.0) if sys.platform == "darwin" else None,
        home=home,
    )
    from fleetctl.discovery import local_network, sources  # noqa: PLC0415 - zeroconf takes 170 ms

    # A machine that may join a fleet hears one.
    facts, heard = await asyncio.gather(
        collect_facts(scope, clock),
        local_network.LocalNetwork(clock, sources.LISTEN_S).suggest(),
    )
    return (*run_checks(facts), check_announcements(heard))


def check_announcements(heard: Findings) -> Finding:
    """Return what announcements say. None is no failure: a fleet can be joined by its address. Pure."""
    check, processes = (
        "announcements",
        [suggestion for suggestion in heard.suggestions if suggestion.role != "new"],
    )
    if processes:
        number = counted(len({process.fleet for process in processes}), "fleet is", "fleets are")
        shown = [
            f"{process.role} at {process.address.host}:{process.address.port}"
            for process in processes
        ]
        message = f"{number} heard: {', '.join(shown[:_MAX_SHOWN])}"
        return Finding(check=check, level="OK", message=message)
    nothing = "no fleet is heard: none announces itself here, or the network drops multicast"
    message = heard.problems[0] if heard.problems else nothing
    advice = "join by an address, which needs no multicast: `fleetctl join HOST:4002`"
    return Finding(check=check, level="UNKNOWN", message=message, advice=advice)
