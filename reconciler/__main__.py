"""The command `fleet-reconciler`: flags and wiring."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import platformdirs
from starlette.routing import Route

from identity import announcement
from identity.announcement import announce_option
from identity.authority_folder import AuthorityFolder
from identity.credentials import Credentials, no_report
from identity.daemon import Daemon, daemon_options, start_daemon
from identity.dialer import Dialer
from identity.flags import (
    authority_folder,
    authority_option,
    gateway_trust,
)
from identity.folder import IdentityFolder
from identity.listeners import insecure_http_flag, server_security
from identity.log_access import LogAccess
from identity.metrics_access import MetricsAccess, metrics_flags, read_metrics_token
from identity.names import Role
from identity.renewal import Applicant, own_addresses
from identity.upkeep import IdentityUpkeep
from machinery.clock import Clock
from machinery.gc_pause import collect_rarely
from machinery.http_server import ServerSecurity
from machinery.log_flags import usable_file
from machinery.options import FILE, FOLDER, GATEWAY_CA, PORT, POSITIVE, SECONDS, Option, options
from machinery.process_main import GRACE_S, run_until_signal
from machinery.version import version
from models.hub.hub_settings import hub_endpoint_option, hub_settings
from reconciler.api import ReconcilerApi, ReconcilerServer
from reconciler.controller import Controller, OutboundSettings
from reconciler.nodes.liveness import NODE_GRACE_S
from reconciler.services.audit_file import AuditFile
from reconciler.services.gitops import credentials, webhook
from reconciler.services.gitops.credentials import GitSettings
from reconciler.services.join.flags import JoinSettings, advertised_etcd, join_address, join_options
from reconciler.services.registration import ReconcilerRegistration
from reconciler.services.signer import SignerError, run_signer, signer_address
from schemas.records import ReconcilerLease
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.space import DEFAULT_QUOTA_BYTES, EtcdSpace
from store.metrics import MeasuredTransport, StoreMetrics
from store.port import Transport
from store.tickets import TicketChecker

log = logging.getLogger(__name__)


OPTIONS: Final = (
    Option(
        "--node-grace-period",
        "Seconds until the replicas of a node that is away are placed elsewhere.",
        type=SECONDS,
        default=NODE_GRACE_S,
    ),
    Option(
        "--git-dir",
        "Folder for the commits of GitSources; you can delete it at any time.",
        type=FOLDER,
        default=Path(platformdirs.user_cache_dir("mlx-fleet")) / "git",
    ),
    Option(
        "--git-credentials",
        "Folder for the files that GitSources name in spec.credentials; each host has a folder in it.",
        type=FOLDER,
        default=Path(platformdirs.user_config_dir("mlx-fleet")) / "git",
    ),
    Option(
        credentials.FLAG,
        "Let GitSources that come out of a repository name credentials.",
        name="credentials_from_git",
        is_flag=True,
        variable="FLEET_ALLOW_CREDENTIALS_FROM_GIT",
    ),
    Option(
        "--api-host",
        "Address of this machine for health, metrics, webhooks (--git-webhook-secret-file) and joins "
        "(--authority-dir).",
        default="127.0.0.1",
        variable="FLEET_RECONCILER_API_HOST",
    ),
    Option(
        "--api-port",
        "Port for them; 0 for any.",
        type=PORT,
        default=4002,
        variable="FLEET_RECONCILER_API_PORT",
    ),
    Option(
        "--git-webhook-secret-file",
        "Listen for pushes at /hooks/git; the file has the secret that signs them.",
        type=FILE,
    ),
    GATEWAY_CA,
    Option(
        "--etcd-quota",
        "Bytes at which etcd refuses writes, its --quota-backend-bytes, for the metric with which alerts compare its "
        "size.",
        type=POSITIVE,
        default=DEFAULT_QUOTA_BYTES,
    ),
    Option(
        "--audit-file",
        "File to which every recorded change (`fleetctl changes`) is appended as a line of JSON, and kept for ever.",
        type=FILE,
        callback=usable_file,
    ),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options("FLEET", *OPTIONS)
@hub_endpoint_option
@daemon_options
@insecure_http_flag
@metrics_flags
@authority_option
@join_options
@announce_option
def main(**options: Any) -> None:
    """Decide which Mac runs which replica. Run any number of reconcilers: one leads."""
    collect_rarely()
    daemon = start_daemon("reconciler", Role.RECONCILER, options)
    own = daemon.credentials
    process = _ReconcilerProcess(
        daemon=daemon,
        options=options,
        # `fleetctl version` shows it: the leading process and its release.
        identity=f"{socket.gethostname()}/{os.getpid()} {version()}",
        # A machine that joins has no certificate yet.
        security=server_security(own, frozenset(Role), is_insecure=options["insecure_http"]),
        secret_file=_secret_file(options["git_webhook_secret_file"]),
        joins=_join_settings(options, daemon.etcd, own),
        signer=_signer(options["authority_dir"], daemon.etcd),
        outbound=OutboundSettings(dialer=_dialer(options, own), hubs=hub_settings(options)),
        grace_s=options["node_grace_period"],
    )
    sys.exit(run_until_signal(process.run, grace_s=GRACE_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReconcilerProcess:
    """The parts of one process that the flags describe; `run()` is its life."""

    daemon: Daemon
    options: Mapping[str, Any]
    identity: str
    security: ServerSecurity
    secret_file: Path | None
    joins: JoinSettings | None
    signer: tuple[AuthorityFolder, EtcdAddress] | None
    outbound: OutboundSettings
    grace_s: float

    async def run(self) -> None:
        """Run forever."""
        daemon, clock, options = self.daemon, self.daemon.clock, self.options
        measured = StoreMetrics(clock)
        transport = MeasuredTransport(connect(daemon.etcd), measured)
        server = ReconcilerServer(clock, (options["api_host"], options["api_port"]), self.security)
        tls = no_report if daemon.credentials is None else daemon.credentials.report
        registration = ReconcilerRegistration(
            transport, clock, self._lease(), tls, lambda: server.url
        )
        controller = Controller(
            transport,
            clock,
            identity=self.identity,
            grace_s=self.grace_s,
            git=_git_settings(options),
            outbound=self.outbound,
        )
        space = EtcdSpace(daemon.etcd, clock, quota_bytes=options["etcd_quota"])
        tickets = TicketChecker(transport, clock, f"Reconciler/{registration.id}")
        api = ReconcilerApi(
            controller=controller,
            access=_metrics_access(options, tickets),
            log=LogAccess(process="reconciler", ring=daemon.ring, tickets=tickets, clock=clock),
            clock=clock,
            started_s=clock.monotonic(),
            more=(measured, space),
        )
        routes = [*api.routes(), *_webhook_routes(transport, clock, self.secret_file)]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(registration.run())
                group.create_task(controller.run())
                group.create_task(space.run())
                if options["audit_file"] is not None:
                    group.create_task(AuditFile(transport, clock, options["audit_file"]).run())
                if self.signer is not None:
                    group.create_task(run_signer(*self.signer, clock))
                if daemon.folder is not None:
                    group.create_task(self._upkeep(transport, daemon.folder).run())
                group.create_task(_serve(server, routes, self.joins, clock))
        finally:
            await transport.close()

    def _lease(self) -> ReconcilerLease:
        """Return what the lease says, without what changes."""
        options = self.options
        address = join_address(options["advertise_join"], options["api_host"], options["api_port"])
        return ReconcilerLease(
            identity=self.identity,
            has_store_password=bool(self.daemon.etcd.password),
            join_address="" if self.joins is None else address,
        )

    def _upkeep(self, transport: Transport, folder: IdentityFolder) -> IdentityUpkeep:
        addresses = own_addresses(self.options["api_host"], socket.gethostname())
        applicant = Applicant(role=Role.RECONCILER, addresses=lambda: addresses)
        return IdentityUpkeep(
            transport, self.daemon.clock, folder, applicant, self.daemon.credentials
        )


def _git_settings(options: Mapping[str, Any]) -> GitSettings:
    return GitSettings(
        cache=options["git_dir"].expanduser().absolute(),
        credentials=options["git_credentials"].expanduser().absolute(),
        credentials_from_git=options["credentials_from_git"],
    )


def _webhook_routes(transport: Transport, clock: Clock, secret_file: Path | None) -> list[Route]:
    return [] if secret_file is None else webhook.Webhook(transport, clock, secret_file).routes()


async def _serve(
    server: ReconcilerServer, routes: list[Route], joins: JoinSettings | None, clock: Clock
) -> None:
    """Serve these routes, and joins if the flags ask for them."""
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        if joins is not None:
            signer = connect(joins.signer)
            stack.push_async_callback(signer.close)
            join_routes, events = joins.routes(signer, clock)
            group.create_task(events.run())
            routes = [*routes, *join_routes]
            if joins.announced is not None and joins.announced.is_reachable:
                listening = server.listening
                group.create_task(_announce(joins.announced, joins.credentials, clock, listening))
        group.create_task(server.run(routes))


async def _announce(
    listener: announcement.Listener, own: Credentials, clock: Clock, listening: asyncio.Event
) -> None:
    """Announce the join port once it listens."""
    await listening.wait()
    await announcement.announce(listener, own, clock)


def _metrics_access(options: Mapping[str, Any], tickets: TicketChecker) -> MetricsAccess:
    """Return the rule by which other machines read metrics and health."""
    return MetricsAccess(
        tickets=tickets,
        roles=frozenset({Role.ADMIN, Role.DASHBOARD}),
        token=read_metrics_token(options["metrics_token_file"]),
        is_open=options["insecure_metrics"],
    )


def _dialer(options: dict[str, Any], own: Credentials | None) -> Dialer:
    """Return how to dial gateways. Files that cannot be used are refused at the start."""
    token = read_metrics_token(options["metrics_token_file"])
    return Dialer(own, trust=gateway_trust(options), token=token)


def _join_settings(
    options: dict[str, Any], etcd: EtcdAddress, own: Credentials | None
) -> JoinSettings | None:
    """Return the settings of the join port; None without an authority, or without an identity to serve it with."""
    folder = authority_folder(options["authority_dir"])
    advertised = advertised_etcd(options["advertise_etcd"], etcd)
    if folder is not None and own is None:
        log.warning("no join port: it needs an identity as well (--identity-dir)")
    if folder is None or own is None:
        return None
    try:
        address = signer_address(folder, etcd)
    except SignerError as error:
        raise click.UsageError(f"--authority-dir: {error}") from error
    return JoinSettings(
        authority=folder,
        credentials=own,
        signer=address,
        advertised=advertised,
        announced=_announced(options),
    )


def _announced(options: dict[str, Any]) -> announcement.Listener | None:
    """Return what is announced of the join port; None for nothing."""
    host, port = options["api_host"], options["api_port"]
    is_fixed = bool(port) and not options["no_announce"]
    return announcement.Listener(role="control", host=host, port=port) if is_fixed else None


def _signer(path: Path | None, etcd: EtcdAddress) -> tuple[AuthorityFolder, EtcdAddress] | None:
    """Return the authorities' folder, and the store's address for the signer; None without --authority-dir."""
    folder = authority_folder(path)
    try:
        return None if folder is None else (folder, signer_address(folder, etcd))
    except SignerError as error:
        raise click.UsageError(f"--authority-dir: {error}") from error


def _secret_file(path: Path | None) -> Path | None:
    """Return the webhook's secret file; an unusable one is refused at the start."""
    if path is None:
        return None
    secret_file = path.expanduser().absolute()
    try:
        webhook.read_secrets(secret_file)
    except webhook.SecretError as error:
        raise click.UsageError(f"--git-webhook-secret-file: {error}") from error
    return secret_file


if __name__ == "__main__":
    main()
