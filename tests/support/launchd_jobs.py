"""Property lists of launchd jobs as fleetctl installs them, and others."""

import plistlib
from pathlib import Path
from typing import Any

from fleetctl.services import launchd
from fleetctl.services.port import ServiceSpec

SPEC = ServiceSpec(
    name="nodeagent", command=("/opt/mlx-fleet/current/bin/fleet-nodeagent",), log=Path("/l/n.log"),
    working_folder=Path("/w"), python=Path("/p"),
)  # fmt: skip


def job(**different: Any) -> bytes:
    """Return the property list of the agent's job with other values; None leaves a key out."""
    tree = plistlib.loads(launchd.service_plist(SPEC)) | different
    return plistlib.dumps({key: value for key, value in tree.items() if value is not None})
