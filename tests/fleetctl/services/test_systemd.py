"""Unit files of systemd."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fleetctl.services.port import ServiceSpec
from fleetctl.services.systemd import check, quote, service_unit

SPEC = ServiceSpec(
    name="nodeagent",
    command=("/bin/sh", "--label", 'a "b" $HOME 100% \\ c'),
    log=Path("/unused"),
    working_folder=Path("/var/lib/mlx-fleet"),
    python=Path("/unused"),
    user="_mlxfleet",
    group="_mlxfleet",
    writable=(Path("/var/lib/mlx-fleet"), Path("/models/with space")),
    environment=(("HOME", "/var/lib/mlx-fleet/home"), ("LANG", "C.UTF-8")),
)
EXPECTED = r"""[Unit]
Description=mlx-fleet nodeagent
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart=/bin/sh --label "a \"b\" $$HOME 100%% \\ c"
User=_mlxfleet
Group=_mlxfleet
WorkingDirectory=/var/lib/mlx-fleet
Environment=HOME=/var/lib/mlx-fleet/home
Environment=LANG=C.UTF-8
KillMode=process
Restart=always
RestartSec=1
TimeoutStopSec=60
LimitNOFILE=65536
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths=-/var/lib/mlx-fleet "-/models/with space"

[Install]
WantedBy=multi-user.target
"""


def test_the_unit_of_the_agent_is_the_specified_one() -> None:
    assert service_unit(SPEC, is_user=False) == EXPECTED


def test_a_unit_of_a_user_protects_no_system_folders() -> None:
    unit = service_unit(replace(SPEC, user="", group=""), is_user=True)
    assert "ProtectSystem" not in unit
    assert "User=" not in unit
    assert "network-online" not in unit
    assert "WantedBy=default.target" in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("is_user", [False, True])
def test_systemd_itself_finds_nothing_wrong(tmp_path: Path, is_user: bool) -> None:
    path = tmp_path / "mlx-fleet-nodeagent.service"

    def verify(text: str) -> str:
        path.write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "verify", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        # It answers 0 for a misspelt key; other units of the machine may have warnings of their own.
        return "\n".join(line for line in done.stderr.splitlines() if path.name in line)

    unit = service_unit(SPEC, is_user=is_user)
    assert verify(unit) == ""
    assert "Unknown key 'KillMod'" in verify(unit.replace("KillMode", "KillMod"))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("KillMode=", "KillMod="), "no key KillMod in section"),
        (("[Service]", "[Servise]"), "no key Type in section"),
        (("ExecStart=/bin/sh", "ExecStart=sh"), "absolute path"),
    ],
)
def test_a_key_that_systemd_would_ignore_is_refused(change: tuple[str, str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check(EXPECTED.replace(*change))


def test_a_line_break_cannot_add_a_key() -> None:
    with pytest.raises(ValueError, match="line break"):
        quote("a\nExecStartPre=/bin/evil")
