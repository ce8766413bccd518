"""Tests of the facts of machines: the published formats of macOS, and Linux."""

from pathlib import Path

from fleetctl.machines.facts import MachineFacts, parse_linux, parse_macos

_STUDIO = Path(__file__).parent / "captures" / "studio"


def test_the_output_of_a_mac_becomes_facts() -> None:
    outputs = {path.stem: path.read_text() for path in _STUDIO.glob("*.txt")}
    assert parse_macos("arm64", outputs, 0.4) == MachineFacts(
        system="Darwin",
        architecture="arm64",
        version="26.2",
        build="25C56",
        model="Mac15,14",
        hostname="studio.local",
        home="/Users/admin",
        hardware_uuid="0d9c3a51-6e53-5f0c-9d3f-8f6c3f2b7a10",
        memory_bytes=512 << 30,
        free_bytes=501215488 << 10,
        clock_offset_s=0.4,
        listening=frozenset({11434, 4001, 631}),
        programs=frozenset({"launchd", "Ollama", "LM Studio", "logd"}),
        is_encrypted=True,
        sleep_minutes=10,
        is_low_power=False,
        updates_itself=True,
        has_firewall=True,
        is_on_wifi=True,
    )


def test_commands_that_failed_leave_facts_unknown() -> None:
    assert parse_macos("x86_64", {}, None) == MachineFacts(system="Darwin", architecture="x86_64")


def test_the_output_of_linux_becomes_facts() -> None:
    outputs = {
        "release": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nNAME="Debian GNU/Linux"\n',
        "memory": "MemTotal:       16384 kB\nMemFree:         1024 kB\n",
        "machine_id": "0123456789abcdef0123456789abcdef\n",
        "hostname": "box\n",
        "home": "/home/admin\n",
        "disk": "Filesystem 1024-blocks Used Available Capacity Mounted on\noverlay 100 10 90 10% /\n",
        "processes": "systemd\nollama\n",
        "sockets": "  sl  local_address rem_address   st\n   0: 0100007F:0FA1 00000000:0000 0A 0\n"
        "   1: 0100007F:1F90 0100007F:9C40 01 0\n",
        "systemd": "yes",
    }
    assert parse_linux("x86_64", outputs, None) == MachineFacts(
        system="Linux",
        architecture="x86_64",
        version="Debian GNU/Linux 12 (bookworm)",
        hostname="box",
        home="/home/admin",
        hardware_uuid="01234567-89ab-cdef-0123-456789abcdef",
        memory_bytes=16 << 20,
        free_bytes=90 << 10,
        has_systemd=True,
        listening=frozenset({4001}),
        programs=frozenset({"systemd", "ollama"}),
    )
