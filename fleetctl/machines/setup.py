"""The eleven steps that make a machine a node. Each looks first, and changes only what is missing.

A run that was killed anywhere is finished by the next one, and a run after that changes nothing.
"""

import json
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from cryptography import x509

from fleetctl.bundle.release import Release
from fleetctl.fleets.join_files import read_variables, role_flags
from fleetctl.machines.facts import MachineFacts, read_facts
from fleetctl.machines.fleet_access import FleetAccess, names_by_uuid
from fleetctl.machines.preflight import NodeContext, check_machine
from fleetctl.remote.errors import RemoteError
from fleetctl.remote.session import RemoteMac, RemoteResult
from fleetctl.services.host import ROLE_USER
from fleetctl.services.layout import Layout, system_layout
from identity.authority import AuthorityError, identity_of, load_certificate, serial_text
from identity.names import Identity, Role
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from nodeagent.hardware.service_definitions import label_of, unit_name
from nodeagent.node.identity import dns_label
from schemas.meta import ConditionStatus
from schemas.wire import identity_files

_INSTALL_S: Final = 1800.0  # a Mac that downloads its packages
_JOIN_S: Final = 60.0
_SERVICE_S: Final = 180.0
_READY_S: Final = 60.0
# A command that a killed fleetctl has left on the machine ends by itself.
_BUSY: Final = Backoff(first_s=1.0, limit_s=8.0)
_BUSY_S: Final = 300.0
_POLL: Final = Backoff(first_s=0.2, limit_s=1.0)
_UPLOADS: Final = ".cache/mlx-fleet"
# The certificate alone: the private key in the same file never leaves the machine.
_CERTIFICATE: Final = "sed -n '/-BEGIN CERTIFICATE-/,/-END CERTIFICATE-/p' \"$1\""
# macOS has nc; bash can do the same. Exit code 69: neither is there.
_CONNECT: Final = (
    'if command -v nc >/dev/null; then nc -z -w 5 "$1" "$2" </dev/null; '
    'elif command -v bash >/dev/null; then timeout 5 bash -c \'</dev/tcp/$1/$2\' sh "$1" "$2"; else exit 69; fi'
)
_NO_TOOL: Final = 69

STEPS: Final = (
    "reach the machine",
    "become root",
    "read its facts",
    "preflight",
    "upload the archive",
    "install the programs",
    "prepare user, folders and settings",
    "join the fleet",
    "install the service",
    "start the service",
    "wait until the node is Ready",
)
"""Names of the steps; the session is the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupOptions:
    """Flags of `fleetctl node add` for one machine."""

    release: Release | None
    """None: the programs have to be there already."""
    name: str | None = None
    python: str = ""
    """Python on the machine, where the archive has none."""
    is_linux_allowed: bool = False


@dataclass(slots=True)
class NodeSetup:
    """The setup of one machine, with what it has found out."""

    mac: RemoteMac
    fleet: FleetAccess
    options: SetupOptions
    clock: Clock
    warn: Callable[[str], None]
    name: str = ""
    facts: MachineFacts = field(
        default_factory=lambda: MachineFacts(system="Darwin", architecture="")
    )
    is_installed: bool = False
    """True if the programs of the release are there."""

    def steps(self) -> Sequence[Callable[[], Awaitable[bool]]]:
        """Return the steps after the first one; each returns True if it has changed something."""
        return (
            self._become_root,
            self._read_facts,
            self._preflight,
            self._upload,
            self._install_programs,
            self._prepare,
            self._join,
            self._install_service,
            self._start_service,
            self._wait_ready,
        )

    @property
    def layout(self) -> Layout:
        """The folders of the services on the machine."""
        return system_layout("launchd" if self.facts.is_mac else "systemd", Path("/"))

    @property
    def _host(self) -> str:
        return self.mac.target.host

    @property
    def _fleetctl(self) -> str:
        return str(self.layout.program("fleetctl"))

    async def _become_root(self) -> bool:
        await self.mac.check_sudo()
        return False

    async def _read_facts(self) -> bool:
        self.facts = await read_facts(self.mac, self.clock)
        if not self.facts.home.startswith("/"):
            raise RemoteError(f"{self._host}: {self.mac.target.user} has no home folder there")
        return False

    async def _preflight(self) -> bool:
        nodes = await self.fleet.nodes()
        by_uuid = names_by_uuid(nodes)
        known = by_uuid.get(self.facts.hardware_uuid, "")
        self.name = self.options.name or known or dns_label(self.facts.hostname, fallback="mac")
        self.is_installed = await self._has_release()
        own = await self._identity()
        release = self.options.release
        machine = check_machine(
            self.facts,
            NodeContext(
                name=self.name,
                fleet=self.fleet.fleet,
                machine_names=by_uuid,
                names=frozenset(node.name for node in nodes),
                builds=frozenset(
                    node.status.fabric.os_build
                    for node in nodes
                    if node.status is not None and node.status.fabric is not None
                )
                - {""},
                own_identity="" if own is None else identity_of(own).uri,
                is_installed=await self._is_running() or self.is_installed,
                needed_bytes=0 if release is None else release.needed_bytes,
                unreachable=await self._unreachable(),
                join_addresses=self.fleet.addresses,
                is_linux_allowed=self.options.is_linux_allowed,
            ),
        )
        for line in machine.warnings:
            self.warn(line)
        if machine.refusals:
            raise RemoteError(
                f"{self._host} cannot become a node: " + "\n  and ".join(machine.refusals)
            )
        self._check_platform()
        return False

    def _check_platform(self) -> None:
        release = self.options.release
        wanted = "macos-arm64" if self.facts.is_mac else "linux-x86_64"
        if release is None and not self.is_installed:
            raise RemoteError(
                f"{self._host} has no mlx-fleet. Name an archive with --bundle, which `fleetctl bundle create` makes"
            )
        if release is not None and release.platform not in (wanted, "any"):
            raise RemoteError(
                f"{release.archive.name} is for {release.platform}, and {self._host} needs one for {wanted}: "
                f"fleetctl bundle create --platform {wanted}"
            )

    async def _unreachable(self) -> tuple[str, ...]:
        """Return the join addresses that the machine cannot connect to."""
        unreachable = []
        for address in self.fleet.addresses:
            host, _, port = address.rpartition(":")
            argv = ("/bin/sh", "-c", _CONNECT, "sh", host.strip("[]"), port)
            result = await self.mac.run(argv, limit_s=_JOIN_S)
            if not result.is_ok and result.code != _NO_TOOL:
                unreachable.append(address)
        return tuple(unreachable)

    async def _has_release(self) -> bool:
        """Return whether the release is installed and in use; without one, whether any is."""
        release, home = self.options.release, self.layout.home
        if release is None:
            return (await self.mac.run((self._fleetctl, "--version"))).is_ok
        mark = await self._read(home / "versions" / release.version / ".complete")
        used = await self.mac.run(("readlink", str(home / "current")))
        is_used = used.out.strip() == f"versions/{release.version}"
        return mark.strip() == release.listing_hash and is_used

    async def _upload(self) -> bool:
        release = self.options.release
        if self.is_installed or release is None:
            return False
        path = self._uploads / release.archive.name
        size = f"{release.archive.stat().st_size >> 20} MiB"
        self.warn(f"copying {release.archive.name}, {size}")
        return await self.mac.upload(release.archive, path)

    @property
    def _uploads(self) -> PurePosixPath:
        return PurePosixPath(self.facts.home) / _UPLOADS

    async def _install_programs(self) -> bool:
        release = self.options.release
        if release is not None and not self.is_installed:
            archive = self._uploads / release.archive.name
            # What a killed run has unpacked may be half of it.
            await self.mac.must_run(("rm", "-rf", str(self._uploads / release.folder)))
            await self.mac.must_run(
                ("tar", "-xf", str(archive), "-C", str(self._uploads)), limit_s=_SERVICE_S
            )
            script = str(self._uploads / release.folder / "install.sh")
            python = ("--python", self.options.python) if self.options.python else ()
            await self._must("/bin/sh", script, *python, limit_s=_INSTALL_S)
            if not await self._has_release():
                raise RemoteError(
                    f"{self._host}: {release.version} is not in use after its installation"
                )
        changed = not self.is_installed
        self.is_installed = True
        await self.clean_up()
        return changed

    async def clean_up(self) -> None:
        """Delete the upload."""
        uploads = str(self._uploads)
        remove = 'rm -rf "$1"; rmdir "$(dirname "$1")" 2>/dev/null || true'
        await self.mac.run(("/bin/sh", "-c", remove, "sh", uploads), sudo=True)

    async def _prepare(self) -> bool:
        done = await self._must(self._fleetctl, "service", "prepare", "nodeagent")
        return bool(done.out.strip())

    async def _identity(self) -> x509.Certificate | None:
        return await read_certificate(self.mac, self.layout)

    async def _is_member(self) -> bool:
        own = await self._identity()
        return (
            own is not None
            and identity_of(own) == Identity(self.fleet.fleet, Role.NODE, self.name)
            and self.clock.now() < own.not_valid_after_utc
            and not await self.fleet.is_revoked(serial_text(own))
            and bool(await self._variables())
        )

    async def _join(self) -> bool:
        if await self._is_member():
            return False
        folder = str(self.layout.node_identity)
        force = ("--force",) if await self._identity() is not None else ()
        command = (
            *("sudo", "-n", "-u", ROLE_USER, "/usr/bin/env", f"HOME={self.layout.state / 'home'}"),
            *(self._fleetctl, "join", "-", ",".join(self.fleet.addresses), "--name", self.name),
            *("--identity-dir", folder, *force),
        )
        token = await self.fleet.create_token(self.name)
        try:
            await self._must(*command, stdin=token.render().encode(), limit_s=_JOIN_S + _BUSY_S)
        finally:
            await self.fleet.revoke_token(token)
        if not await self._is_member():
            raise RemoteError(f"{self._host} has joined, but {folder} does not show it")
        return True

    async def _variables(self) -> dict[str, str]:
        return read_variables(await self._read(self.layout.node_identity / "fleet.env", sudo=True))

    @property
    def _definition(self) -> Path:
        if self.facts.is_mac:
            return self.layout.definitions / f"{label_of('nodeagent')}.plist"
        return self.layout.definitions / unit_name("nodeagent")

    async def _install_service(self) -> bool:
        before = await self._read(self._definition, sudo=True)
        variables = await self._variables()
        # Its folder is the service's own.
        variables.pop("FLEET_STATE_DIR", None)
        flags = role_flags(Role.NODE, variables)
        await self._must(
            *(self._fleetctl, "service", "install", "nodeagent", "--", *flags), limit_s=_SERVICE_S
        )
        after = await self._read(self._definition, sudo=True)
        if not after:
            raise RemoteError(f"{self._host}: {self._definition} is missing after the installation")
        return before != after

    async def _start_service(self) -> bool:
        if await self._is_running():
            return False
        await self._must(self._fleetctl, "service", "start", "nodeagent", limit_s=_SERVICE_S)
        if not await self._is_running():
            raise RemoteError(f"{self._host}: the agent does not run. {await self._last_words()}")
        return True

    async def _is_running(self) -> bool:
        if not await self._read(self._definition, sudo=True):
            return False
        result = await self.mac.run(
            (self._fleetctl, "service", "status", "nodeagent", "-o", "json"), sudo=True
        )
        try:
            return any(load["state"] == "running" for load in json.loads(result.out))
        except (ValueError, KeyError, TypeError):
            return False

    async def _wait_ready(self) -> bool:
        deadline = self.clock.monotonic() + _READY_S
        retries, waited = Retries(_POLL, self.clock), False
        while True:
            condition = await self.fleet.readiness(self.name)
            if condition is not None and condition.status is ConditionStatus.TRUE:
                return waited
            if self.clock.monotonic() >= deadline:
                why = "the fleet has not heard of it" if condition is None else condition.message
                raise RemoteError(
                    f"node/{self.name} is not Ready after {_READY_S:.0f} s: {why}. {await self._last_words()}"
                )
            waited = True
            await retries.wait()

    async def _last_words(self) -> str:
        """Return the end of the agent's log."""
        log = str(self.layout.logs / "nodeagent.log")
        unit = unit_name("nodeagent")
        argv = ("tail", "-n", "1", log) if self.facts.is_mac else ("journalctl", "-u", unit, "-n", "1", "-o", "cat")  # fmt: skip
        result = await self.mac.run(argv, sudo=True)
        return f"The last line of its log: {result.line[:300]}"

    async def _read(self, path: Path, *, sudo: bool = False) -> str:
        """Return a small file; "" if it is not there."""
        result = await self.mac.run(("cat", str(path)), sudo=sudo)
        return result.out if result.is_ok else ""

    async def _must(
        self, *argv: str, stdin: bytes = b"", limit_s: float = _SERVICE_S
    ) -> RemoteResult:
        """Run a program of ours as root; wait for one that an earlier run has left.

        Raises:
            RemoteError: it fails, with its own message, which says what to do.

        """
        deadline = self.clock.monotonic() + _BUSY_S
        retries = Retries(_BUSY, self.clock)
        while True:
            result = await self.mac.run(argv, stdin=stdin, sudo=True, limit_s=limit_s)
            if result.is_ok:
                return result
            errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
            message = errors[-1].removeprefix("error: ") if errors else result.line
            if not message.startswith("another ") or self.clock.monotonic() >= deadline:
                raise RemoteError(f"{self._host}: {shlex.join(argv[:4])}: {message}")
            await retries.wait()


async def read_certificate(mac: RemoteMac, layout: Layout) -> x509.Certificate | None:
    """Return the certificate of a machine's agent; None if it has none.

    Raises:
        RemoteError: there is one that cannot be used.

    """
    path = layout.node_identity / identity_files.IDENTITY
    result = await mac.run(("/bin/sh", "-c", _CERTIFICATE, "sh", str(path)), sudo=True)
    if not result.is_ok or not result.out.strip():
        return None
    try:
        return load_certificate(result.out)
    except AuthorityError as error:
        raise RemoteError(
            f"{mac.target.host}: {path} holds no usable certificate: {error}. Move its folder away, and run this again"
        ) from error
