"""Checks of the connections between machines: plain listeners, insecure flags, certificates, and the files of secrets. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from insight.doctor.findings import Finding, Level, ok
from insight.tls_mode import mode_text
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


def check_security(found: TransportSecurity) -> Iterator[Finding]:
    """Yield whether connections between machines are protected, and for how long."""
    yield from _mode(found)
    yield from _listeners(found)
    yield from _certificates(found.certificates)
    yield from _tokens(found.tokens)
    yield from _api_keys(found.api_keys)
    for one in found.refused_names[:_MAX_NAMES]:
        yield Finding(
            check="joins",
            level="WARN",
            message=f"a machine was refused under a name that the fleet has: {one}",
            advice="if it is not yours, it holds a token of yours: `fleetctl token list`, `fleetctl token revoke ID`",
        )
    for one in found.open_secrets:
        yield Finding(
            check="secrets",
            level="FAIL",
            message=one,
            advice="until then every user of this machine has it; what was read must be replaced",
            fix=OPEN_FILES,
        )


def _mode(found: TransportSecurity) -> Iterator[Finding]:
    text = f"TLS mode {mode_text(found.mode)}"
    if found.mode is TlsMode.PERMISSIVE:
        yield Finding(
            check="tls",
            level="WARN",
            message=text,
            advice="this is a step of a migration: `fleetctl secure` goes on to the next one",
        )
    elif found.mode is not None:
        yield ok("tls", text)
    elif found.plain:
        yield Finding(
            check="tls",
            level="WARN",
            message="machines of the fleet talk to each other without TLS",
            advice="`fleetctl secure` gives every process a certificate",
        )
    for url in found.plain_etcd:
        yield Finding(
            check="tls",
            level="WARN",
            message=f"etcd at {url} is reached in clear: others on the network read passwords of the store",
            advice="give etcd a certificate, and https:// in --etcd (docs/operations/etcd-security.md)",
        )


def _listeners(found: TransportSecurity) -> Iterator[Finding]:
    kinds = (
        (found.plain, "others on the network can read it", "start it with --identity-dir"),
        (
            found.insecure_flags,
            "it is not protected",
            "remove the flag when the process has an identity",
        ),
    )
    for labels, what, advice in kinds:
        for label in labels[:_MAX_NAMES]:
            yield Finding(
                check="listeners", level="WARN", message=f"{label}: {what}", advice=advice
            )
        if len(labels) > _MAX_NAMES:
            more = f"{len(labels) - _MAX_NAMES} more: {what}"
            yield Finding(check="listeners", level="WARN", message=more, advice=advice)


def _tokens(tokens: Sequence[TokenState]) -> Iterator[Finding]:
    for one in tokens:
        if one.left > _LONG_TOKEN and one.uses:
            yield Finding(
                check="tokens",
                level="WARN",
                message=f"join token {one.id} lets {counted(one.uses, 'more machine', 'more machines')} join for {one.left.days} days",
                advice=f"whoever has it joins the fleet: `fleetctl token revoke {one.id}` when all of yours have joined",
            )


def _api_keys(keys: Sequence[KeyState]) -> Iterator[Finding]:
    """Yield the keys that end soon; one that has ended was meant to, and its clients know by now."""
    for one in keys:
        if timedelta(0) < one.left < _WARN:
            left = f"{one.left.days} days" if one.left.days else "less than a day"
            yield Finding(
                check="api keys",
                level="WARN",
                message=f"API key {one.name} ends in {left}: its clients are refused from then on",
                advice=f"create another one in time: `fleetctl create apikey --help`; `fleetctl delete apikey {one.name}` if nobody "
                "uses it",
            )


def _certificates(states: Sequence[CertificateState]) -> Iterator[Finding]:
    bad = [(one, found) for one in states if (found := _problem(one)) is not None]
    for one, (level, message, advice) in bad:
        text = f"{one.label}: {message}"
        yield Finding(check="certificates", level=level, message=text, advice=advice)
    if states and not bad:
        days = min(one.left for one in states).days
        phrase = counted(len(states), "certificate is", "certificates are")
        yield ok("certificates", f"{phrase} valid for {days} days and more")


def _problem(state: CertificateState) -> tuple[Level, str, str] | None:
    if state.is_foreign:
        return (
            "FAIL",
            "none of the fleet's authorities has signed its certificate",
            "it is of another fleet, or something wrote it that may not: revoke it, and join that machine again",
        )
    if state.left >= _WARN:
        return None
    renewal = (
        "certificates are renewed 10 days before their end: check that a reconciler with --authority-dir runs and that "
        "this process reaches the store; its log says why"
    )
    if state.left <= timedelta(0):
        return "FAIL", "its certificate has ended", renewal
    level: Level = "FAIL" if state.left < _FAIL else "WARN"
    return level, f"its certificate ends in {state.left.days} days and was not renewed", renewal
