"""The releases on one Mac: what is installed, what runs, and how it is changed. Everything goes through its own programs."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Final

from fleetctl.maintenance.release import (
    STORED_VERSIONS,
    StoredVersions,
    TargetRelease,
    parse_stored,
)
from fleetctl.remote.errors import RemoteError
from fleetctl.remote.session import RemoteMac
from fleetctl.services.programs import PARTS
from machinery import macos_commands

_FIND: Final = """
for prefix in ${1:+"$1"} /opt/mlx-fleet "$HOME/Library/Application Support/mlx-fleet-programs" \\
  "$HOME/.local/share/mlx-fleet-programs"; do
  [ -L "$prefix/current" ] || continue
  printf '%s\\n%s\\n' "$prefix" "$(readlink "$prefix/current")"
  if [ -w "$prefix" ]; then echo own; else echo root; fi
  id -u
  for one in "$prefix"/versions/*/.complete; do
    [ -f "$one" ] || continue
    one=${one%/.complete}
    printf '%s\\n' "${one##*/}"
  done
  exit 0
done
exit 66
"""
_INSTALL: Final = """
set -eu
folder=$(mktemp -d "${TMPDIR:-/tmp}/mlx-fleet.XXXXXX")
trap 'rm -rf "$folder"' EXIT
tar -xf "$1" -C "$folder"
shift
"$folder"/*/install.sh --keep-current "$@"
"""
_INSTALL_S: Final = 1800.0
_RESTART_S: Final = 150.0
_RUNNING: Final = re.compile(r"/versions/([^/\s]+)/")
# `fleetctl service status` where a service does not run.
_NOT_RUNNING: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPart:
    """One service of the fleet on a Mac."""

    pid: int | None
    version: str = ""
    """The release whose files it runs; "" if it does not run, or is not ours (etcd)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MacState:
    """The installed releases of a Mac, and its running services."""

    prefix: str
    current: str
    installed: tuple[str, ...]
    needs_root: bool
    is_default: bool = True
    """True if install.sh takes this folder by itself; with --prefix it would link fleetctl into another folder."""
    parts: Mapping[str, RunningPart] = field(default_factory=dict)
    stored: StoredVersions | None = None
    """Stored versions of the release in use."""

    def runs(self, part: str, version: str) -> bool:
        """Return whether a service runs a release."""
        running_part = self.parts.get(part)
        return running_part is not None and running_part.version == version


class MacRelease:
    """The releases of one Mac, over a session."""

    def __init__(self, mac: RemoteMac, prefix: str = "") -> None:
        self._mac = mac
        self._prefix = prefix

    async def read_installed(self) -> MacState:
        """Return the installed releases, without the services. Raises RemoteError: there is none."""
        result = await self._mac.run(("/bin/sh", "-c", _FIND, "sh", self._prefix))
        lines = result.out.splitlines()
        if not result.is_ok or len(lines) < 4:
            raise RemoteError(
                f"{self._mac.target.host}: no release with a link `current` is in {self._prefix or '/opt/mlx-fleet or the home'}: "
                "it was not installed by install.sh. Give its folder with --prefix, or install it first"
            )
        prefix, link, owner, uid, *installed = lines
        return MacState(
            prefix=prefix,
            current=link.rpartition("/")[2],
            installed=tuple(installed),
            needs_root=owner != "own",
            is_default=prefix == "/opt/mlx-fleet"
            if owner != "own" or uid == "0"
            else prefix.endswith("/mlx-fleet-programs"),
        )

    async def read(self, *, by: str = "") -> MacState:
        """Return what is installed and what runs; `by` is the release whose programs are asked, instead of the one in use.

        Raises:
            RemoteError: mlx-fleet is not installed, or its programs do not answer.

        """
        state = await self.read_installed()
        release = by or state.current
        parts = await self._parts(state, release)
        if parts is None:  # the release in use may be a broken one
            others = [one for one in state.installed if one != release]
            for release in others:
                parts = await self._parts(state, release)
                if parts is not None:
                    break
        if parts is None:
            raise RemoteError(
                f"{self._mac.target.host}: no installed release answers `fleetctl service status` ({', '.join(state.installed)})"
            )
        stored = await self.stored(state, release)
        return replace(state, parts=parts, stored=stored)

    async def _parts(self, state: MacState, release: str) -> dict[str, RunningPart] | None:
        """Return the services; None if the release's fleetctl does not run."""
        pids = await self.pids(state, by=release)
        if pids is None:
            return None
        return {name: await self._running(pid) for name, pid in pids.items()}

    async def pids(self, state: MacState, *, by: str) -> dict[str, int | None] | None:
        """Return the processes of the services, as the fleetctl of an installed release says; None if it does not run."""
        program = f"{state.prefix}/versions/{by}/bin/fleetctl"
        done = await self._mac.run((program, "service", "status", "-o", "json"))
        if not done.is_ok and done.code != _NOT_RUNNING:
            return None
        try:
            found = {str(row["name"]): row["pid"] for row in json.loads(done.out or "[]")}
        except (ValueError, TypeError, KeyError):
            return None
        return {
            name: pid if isinstance(pid, int) else None
            for name, pid in found.items()
            if name in PARTS
        }

    async def _running(self, pid: int | None) -> RunningPart:
        if pid is None:
            return RunningPart(pid=None)
        done = await self._mac.run(macos_commands.PROCESS.words(pid=str(pid)))
        # The interpreter in a program's first line is that of its version.
        found = _RUNNING.search(done.out)
        return RunningPart(pid=pid, version=found[1] if found else "")

    async def stored(self, state: MacState, version: str) -> StoredVersions | None:
        """Return the stored versions of an installed release; None if it does not tell."""
        python = f"{state.prefix}/versions/{version}/bin/python"
        done = await self._mac.run((python, "-I", "-c", STORED_VERSIONS))
        return parse_stored(done.out) if done.is_ok else None

    async def install(self, state: MacState, release: TargetRelease, *, python: str = "") -> None:
        """Upload the archive and install it beside the release in use. Raises RemoteError."""
        assert release.archive is not None
        home = (await self._mac.must_run(("/bin/sh", "-c", "cd && pwd"))).out.strip()
        path = PurePosixPath(home, ".mlx-fleet-upload", release.archive.name)
        await self._mac.upload(release.archive, path)
        flags = (*_prefix_flags(state), *(("--python", python) if python else ()))
        await self._mac.must_run(
            ("/bin/sh", "-c", _INSTALL, "sh", str(path), *flags),
            sudo=state.needs_root,
            limit_s=_INSTALL_S,
        )
        await self._mac.run(("rm", "-f", str(path)))

    async def use(self, state: MacState, version: str) -> None:
        """Let the link `current` point to an installed release. Raises RemoteError."""
        script = f"{state.prefix}/versions/{version}/install.sh"
        await self._mac.must_run(
            (script, *_prefix_flags(state), "--use", version), sudo=state.needs_root
        )

    async def restart(self, state: MacState, part: str, *, by: str) -> None:
        """Restart a service; `by` is the installed release whose fleetctl does it. Raises RemoteError."""
        program = f"{state.prefix}/versions/{by}/bin/fleetctl"
        await self._mac.must_run(
            (program, "service", "restart", part), sudo=state.needs_root, limit_s=_RESTART_S
        )

    async def stop(self, state: MacState, part: str, *, grace_s: float) -> None:
        """Stop a service, with the agent its engines too. Raises RemoteError."""
        program = f"{state.prefix}/versions/{state.current}/bin/fleetctl"
        engines = ("--engines", "--grace-period", f"{grace_s:g}s") if part == "nodeagent" else ()
        await self._mac.must_run(
            (program, "service", "stop", part, *engines),
            sudo=state.needs_root,
            limit_s=_RESTART_S + grace_s,
        )


def _prefix_flags(state: MacState) -> tuple[str, ...]:
    return () if state.is_default else ("--prefix", state.prefix)
