"""macOS's limit of memory that the GPU may wire: its name, and the job of `fleetctl service` that sets it at boot."""

from typing import Final

SYSCTL: Final = "iogpu.wired_limit_mb"
"""In MiB; 0 is macOS's default, and so it is after each restart."""
JOB_NAME: Final = "wiredlimit"
JOB_FILE: Final = f"/Library/LaunchDaemons/io.mlxfleet.{JOB_NAME}.plist"
"""The property list of the job; every user may read it."""
