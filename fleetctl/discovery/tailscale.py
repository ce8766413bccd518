"""Peers of a tailnet, as suggestions: those that carry the tag `tag:mlx-fleet`.

They come from `tailscale status --json`. Its exit code is 1 while Tailscale is stopped, so that only the JSON counts.
mDNS does not cross a tailnet (tailscale issue 1013).
"""

import asyncio
import contextlib
import ipaddress
import json
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fleetctl.discovery.suggestions import Findings, SourceName, Suggestion
from fleetctl.fleets.join_client import JoinAddress
from machinery.control_characters import make_printable
from schemas.wire.join import DEFAULT_PORT

TAG: Final = "tag:mlx-fleet"
PROGRAMS: Final = ("tailscale", "/Applications/Tailscale.app/Contents/MacOS/Tailscale")
_LIMIT_S: Final = 3.0
_REAP_S: Final = 1.0
_MAX_BYTES: Final = 8 << 20
_MAX_PEERS: Final = 64


@dataclass(frozen=True, slots=True)
class Tailscale:
    """The source that asks the local Tailscale."""

    programs: tuple[str, ...] = PROGRAMS

    @property
    def name(self) -> SourceName:
        """The name of the source."""
        return "tailscale"

    async def suggest(self) -> Findings:
        """Return the peers with the tag; a machine without Tailscale suggests nothing."""
        for program in self.programs:
            try:
                printed = await _run((program, "status", "--json"))
            except FileNotFoundError:
                continue
            except TimeoutError:
                return Findings(problems=(f"tailscale: no answer within {_LIMIT_S:g} s",))
            except OSError as error:
                return Findings(problems=(f"tailscale: {error.strerror or error}",))
            return parse_status(printed)
        return Findings()


async def _run(command: Sequence[str]) -> bytes:
    """Return the beginning of a command's output. Raises OSError, TimeoutError."""
    # A session of its own: all of it ends when it takes too long.
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, start_new_session=True
    )
    assert process.stdout is not None
    found = bytearray()
    try:
        async with asyncio.timeout(_LIMIT_S):
            while len(found) < _MAX_BYTES and (more := await process.stdout.read(1 << 16)):
                found += more
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_S):
                await process.communicate()  # an output that is not read to its end stays open
    return bytes(found)


def parse_status(printed: bytes) -> Findings:
    """Return the suggestions in the JSON of `tailscale status --json`. Pure."""
    try:
        status = json.loads(printed)
    except (ValueError, RecursionError):
        return Findings(problems=("tailscale: its status is no JSON",))
    state = _text(_field(status, "BackendState")) or "unknown"
    if state != "Running":
        # The addresses of peers stay in the status while it is stopped.
        return Findings(problems=(f"tailscale: it is not connected (state {state})",))
    peers = _field(status, "Peer")
    tagged = [
        one
        for one in (peers.values() if isinstance(peers, dict) else ())
        if TAG in _list(_field(one, "Tags")) and _field(one, "Online") is True
    ]
    return Findings(suggestions=tuple(s for one in tagged[:_MAX_PEERS] for s in _peer(one)))


def _peer(peer: Any) -> Iterator[Suggestion]:
    """Yield a suggestion for each address of a peer, IPv4 first."""
    addresses = []
    for text in _list(_field(peer, "TailscaleIPs"))[:4]:
        with contextlib.suppress(ValueError):
            addresses.append(ipaddress.ip_address(text if isinstance(text, str) else ""))
    is_relayed = bool(_field(peer, "Relay")) and not _field(peer, "CurAddr")
    for address in sorted(addresses, key=lambda one: one.version):
        yield Suggestion(
            source="tailscale",
            role="control",
            name=_text(_field(peer, "HostName")) or str(address),
            address=JoinAddress(str(address), DEFAULT_PORT),
            note="by a relay, which is slow" if is_relayed else "",
        )


def _field(tree: Any, name: str) -> Any:
    return tree.get(name) if isinstance(tree, dict) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return (
        make_printable(value)[:100].replace("\n", " ").replace("\t", " ")
        if isinstance(value, str)
        else ""
    )
