"""Checks of the connections between machines: plain listeners, insecure flags, certificates, and the files of secrets. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from insight.doctor.findings import Finding
from insight.tls_mode import mode_text
from nodeagent.doctor.check import Check, fail, finding, ok, warn
from schemas.quantity import counted
from schemas.trust import TlsMode

# A certificate lives 30 days and is renewed after 20.
_WARN, _FAIL = timedelta(days=10), timedelta(days=3)
# `fleetctl token create` makes tokens for an hour, and for 30 days at most.
_LONG_TOKEN = timedelta(days=2)
_MAX_NAMES = 5
OPEN_FILES = "open-files"
"""The fix that takes the rights of other users away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateState:
    """The current certificate of one identity."""

    label: str
    """Such as `node/mac-1`."""
    left: timedelta
    """The time to its end; negative after it."""
    is_foreign: bool = False
    """True if none of the fleet's authorities has signed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenState:
    """One join token that can be used."""

    id: str
    left: timedelta
    uses: int
    """The number of uses that are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyState:
    """One API key that ends some day."""

    name: str
    left: timedelta
    """The time to its end; negative after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSecurity:
    """The observation that these checks need."""

    mode: TlsMode | None = None
    """None: the fleet has no authority."""
    plain: Sequence[str] = ()
    """Listeners of agents and engines that other machines reach over plain HTTP, such as `node/mac-1 at http://...`."""
    insecure_flags: Sequence[str] = ()
    """Flags in use that switch protection off, such as `node/mac-1: --insecure-http`."""
    plain_etcd: Sequence[str] = ()
    """The URLs of etcd on other machines over plain HTTP."""
    certificates: Sequence[CertificateState] = ()
    tokens: Sequence[TokenState] = ()
    api_keys: Sequence[KeyState] = ()
    """The API keys with an end."""
    refused_names: Sequence[str] = ()
    """The last attempts of machines to join under a name that the fleet has."""
    open_secrets: Sequence[str] = ()
    """Files of this machine with a secret that other users may read; each with its remedy."""


def check_mode(security: TransportSecurity) -> Iterator[Finding]:
    """Yield whether connections between machines use TLS."""
    mode = f"TLS mode {mode_text(security.mode)}"
    if security.mode is TlsMode.PERMISSIVE:
        yield warn(mode, "this is a step of a migration: `fleetctl secure` goes on to the next one")
    elif security.mode is not None:
        yield ok(mode)
    elif security.plain:
        yield warn(
            "machines of the fleet talk to each other without TLS",
            "`fleetctl secure` gives every process a certificate",
        )
    for url in security.plain_etcd:
        yield warn(
            f"etcd at {url} is reached in clear: others on the network read passwords of the store",
            "give etcd a certificate, and https:// in --etcd (docs/operations/etcd-security.md)",
        )


def check_listeners(security: TransportSecurity) -> Iterator[Finding]:
    """Yield the listeners without protection."""
    plain = "others on the network can read it", "start it with --identity-dir"
    flag = "it is not protected", "remove the flag when the process has an identity"
    for labels, (what, advice) in ((security.plain, plain), (security.insecure_flags, flag)):
        for label in labels[:_MAX_NAMES]:
            yield warn(f"{label}: {what}", advice)
        if len(labels) > _MAX_NAMES:
            yield warn(f"{len(labels) - _MAX_NAMES} more: {what}", advice)


def check_certificates(security: TransportSecurity) -> Iterator[Finding]:
    """Yield the certificates that are foreign, or that were not renewed."""
    states = security.certificates
    is_fine = bool(states)
    for state in states:
        if state.is_foreign:
            is_fine = False
            yield fail(
                f"{state.label}: none of the fleet's authorities has signed its certificate",
                "it is of another fleet, or something wrote it that may not: revoke it, and join that machine again",
            )
        elif state.left < _WARN:
            is_fine = False
            end = f"its certificate ends in {state.left.days} days and was not renewed"
            yield finding(
                "FAIL" if state.left < _FAIL else "WARN",
                f"{state.label}: {end if state.left > timedelta(0) else 'its certificate has ended'}",
            )
    if is_fine:
        number = counted(len(states), "certificate is", "certificates are")
        yield ok(f"{number} valid for {min(state.left for state in states).days} days and more")


def check_tokens(security: TransportSecurity) -> Iterator[Finding]:
    """Yield the join tokens that let machines join for days."""
    for token in security.tokens:
        if token.left > _LONG_TOKEN and token.uses:
            yield warn(
                f"join token {token.id} lets {counted(token.uses, 'more machine', 'more machines')} join for {token.left.days} days",
                f"whoever has it joins the fleet: `fleetctl token revoke {token.id}` when all of yours have joined",
            )


def check_api_keys(security: TransportSecurity) -> Iterator[Finding]:
    """Yield the keys that end soon; one that has ended was meant to, and its clients know by now."""
    for key in security.api_keys:
        if timedelta(0) < key.left < _WARN:
            left = f"{key.left.days} days" if key.left.days else "less than a day"
            yield warn(
                f"API key {key.name} ends in {left}: its clients are refused from then on",
                f"create another one in time: `fleetctl create apikey --help`; `fleetctl delete apikey {key.name}` if nobody "
                "uses it",
            )


def check_joins(security: TransportSecurity) -> Iterator[Finding]:
    """Yield the machines that were refused under a name that the fleet has."""
    for attempt in security.refused_names[:_MAX_NAMES]:
        yield warn(f"a machine was refused under a name that the fleet has: {attempt}")


def check_secrets(security: TransportSecurity) -> Iterator[Finding]:
    """Yield the files with secrets that other users may read."""
    for reason in security.open_secrets:
        yield fail(reason, fix=OPEN_FILES)


SECURITY_CHECKS: Final = (
    Check(name="tls", run=check_mode, needs=("security",)),
    Check(name="listeners", run=check_listeners, needs=("security",)),
    Check(
        name="certificates",
        run=check_certificates,
        needs=("security",),
        remedy="certificates are renewed 10 days before their end: check that a reconciler with --authority-dir runs and that "
        "this process reaches the store; its log says why",
    ),
    Check(name="tokens", run=check_tokens, needs=("security",)),
    Check(name="api keys", run=check_api_keys, needs=("security",)),
    Check(
        name="joins",
        run=check_joins,
        needs=("security",),
        remedy="if it is not yours, it holds a token of yours: `fleetctl token list`, `fleetctl token revoke ID`",
    ),
    Check(
        name="secrets",
        run=check_secrets,
        needs=("security",),
        remedy="until then every user of this machine has it; what was read must be replaced",
    ),
)
