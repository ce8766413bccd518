"""Peers of a tailnet, from the JSON of `tailscale status --json`, and from a program that prints it."""

import json
from pathlib import Path
from typing import Any

import pytest

from fleetctl.discovery.tailscale import Tailscale, parse_status
from fleetctl.fleets.join_client import JoinAddress

# As Tailscale 1.90 prints it, shortened: docs.rs/tailscale-localapi names the same fields.
STATUS = json.loads((Path(__file__).parent / "tailscale_status.json").read_text())


def with_peer(**change: Any) -> bytes:
    """Return the status with one peer, changed."""
    peer = {**next(iter(STATUS["Peer"].values())), **change}
    return json.dumps({**STATUS, "Peer": {"nodekey:1": peer}}).encode()


def test_online_peers_with_the_tag_are_suggested() -> None:
    status = parse_status(json.dumps(STATUS).encode())
    assert status.problems == ()
    assert [
        (suggestion.name, suggestion.address, suggestion.note) for suggestion in status.suggestions
    ] == [
        ("mac-1", JoinAddress("100.101.1.1", 4002), ""),
        ("mac-1", JoinAddress("fd7a:115c:a1e0::1", 4002), ""),
        ("mac-2", JoinAddress("100.101.1.2", 4002), "by a relay, which is slow"),
    ]
    assert {suggestion.authorities for suggestion in status.suggestions} == {()}


@pytest.mark.parametrize(
    "change",
    [
        {"Online": False},
        {"Tags": ["tag:other"]},
        {"Tags": None},
        {"Tags": "tag:mlx-fleet"},
        {"TailscaleIPs": None},
        {"TailscaleIPs": ["x; rm -rf /", 7, None]},
    ],
)
def test_other_peers_are_not(change: dict[str, Any]) -> None:
    assert parse_status(with_peer()).suggestions
    assert parse_status(with_peer(**change)).suggestions == ()


def test_names_are_made_printable() -> None:
    [first, *_] = parse_status(with_peer(HostName="mac\x1b[2J\n1" + "x" * 500)).suggestions
    assert first.name.isprintable()
    assert len(first.name) == 100


def test_a_tailscale_that_is_stopped_still_lists_peers_and_none_is_suggested() -> None:
    status = parse_status(json.dumps({**STATUS, "BackendState": "Stopped"}).encode())
    assert status.suggestions == ()
    assert status.problems == ("tailscale: it is not connected (state Stopped)",)


@pytest.mark.parametrize("printed", [b"", b"null", b"[]", b"{", b"[" * 100_000, b"\xff", b"7"])
def test_what_is_no_status_is_a_problem(printed: bytes) -> None:
    status = parse_status(printed)
    assert status.suggestions == ()
    assert status.problems


def test_very_many_peers_are_bounded() -> None:
    peer = next(iter(STATUS["Peer"].values()))
    peers = {f"nodekey:{number}": peer for number in range(5000)}
    status = parse_status(json.dumps({**STATUS, "Peer": peers}).encode())
    assert len(status.suggestions) <= 256


def program(folder: Path, script: str) -> Tailscale:
    """Return the source with a program that stands in for Tailscale."""
    path = folder / "tailscale"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return Tailscale((str(folder / "absent"), str(path)))


async def test_the_json_counts_and_not_the_exit_code(tmp_path: Path) -> None:
    file = Path(__file__).parent / "tailscale_status.json"
    source = program(tmp_path, f'[ "$*" = "status --json" ] && cat {file}; exit 1')
    assert len((await source.suggest()).suggestions) == 3


async def test_a_tailscale_that_hangs_is_ended(tmp_path: Path) -> None:
    findings = await program(tmp_path, "sleep 60").suggest()
    assert findings.problems == ("tailscale: no answer within 3 s",)


async def test_endless_output_is_cut_off(tmp_path: Path) -> None:
    findings = await program(tmp_path, "exec yes").suggest()
    assert findings.problems == ("tailscale: its status is no JSON",)


async def test_a_machine_without_tailscale_suggests_nothing(tmp_path: Path) -> None:
    findings = await Tailscale((str(tmp_path / "absent"),)).suggest()
    assert (findings.suggestions, findings.problems) == ((), ())
