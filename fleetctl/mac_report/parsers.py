"""The parser of each registered command that reads, as production uses it; its result as JSON. Pure."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import orjson
from pydantic import BaseModel

from fleetctl.machines import facts as preflight
from machinery import macos_commands as mac
from machinery.network_interfaces import parse_hardware_ports
from nodeagent.doctor import macos_facts
from nodeagent.hardware import load, macos, macos_fabric, macos_network, macos_settings
from nodeagent.hardware.macos_fabric import FabricOutput
from nodeagent.hardware.service_definitions import parse_print
from nodeagent.hardware.system_text import parse_pairs, parse_positive

Parser: TypeAlias = Callable[[str], Any]
MAX_ITEMS: Final = 2000
"""Items of a list in a result."""


def _preflight(*fields: str, key: str) -> Parser:
    """Return a parser of the preflight for some fields of its facts."""

    def parse(text: str) -> dict[str, Any]:
        result = preflight.parse_macos("", {key: text}, None)
        return {field: getattr(result, field) for field in fields}

    return parse


def _memory(text: str) -> dict[str, Any]:
    pairs = parse_pairs(text)
    return {
        "pressure": macos.parse_pressure(text),
        "memory_bytes": parse_positive(pairs.get(macos.MEMORY_SYSCTL)),
        "wired_limit": macos.parse_wired_limit(text, ""),
    }


def _thunderbolt(text: str) -> dict[str, Any]:
    return {
        "ports": macos_fabric.parse_ports(text, {}, frozenset()),
        "generation": macos_fabric.parse_thunderbolt("", text),
    }


def _power(text: str) -> dict[str, Any]:
    return {
        "settings": macos_settings.parse_power(text),
        "sleep_minutes": macos_settings.parse_sleep_minutes(text),
        "is_low_power": macos_settings.parse_low_power(text),
        "wakes_on_lan": macos_settings.parse_wakes_on_lan(text),
        "preflight": _preflight("sleep_minutes", "is_low_power", key="power")(text),
    }


def _assertions(text: str) -> dict[str, Any]:
    blockers = macos_settings.parse_sleep_blockers(text)
    return {"sleep_blockers": blockers, "is_in_meeting": macos.parse_meeting(text, "")}


def _chip(text: str) -> dict[str, Any]:
    fabric = macos_fabric.assemble_fabric(FabricOutput(sysctl=text))
    return {"chip": parse_pairs(text).get("machdep.cpu.brand_string"), "thunderbolt": fabric.thunderbolt}  # fmt: skip


PARSERS: Final[Mapping[mac.MacCommand, Parser]] = MappingProxyType({
    mac.FACTS_SYSCTL: parse_pairs,
    mac.HARDWARE: macos.parse_profiler,
    mac.VERSION: macos.parse_os_version,
    mac.GPU_REGISTRY: macos.parse_gpu_cores,
    mac.BOARD_REGISTRY: macos.parse_platform_uuid,
    mac.LOCAL_NAME: str.strip,
    mac.VM_STAT: lambda text: macos.parse_mac_memory(text, ""),
    mac.MEMORY_SYSCTL: _memory,
    mac.THERMAL_LEVEL: macos.parse_thermal_level,
    mac.THERM: lambda text: macos.parse_heat("", text),
    mac.BATTERY: macos.parse_power,
    mac.HID_REGISTRY: macos.parse_idle_s,
    mac.LID_REGISTRY: macos.parse_lid_shut,
    mac.CAMERA_REGISTRY: lambda text: macos.parse_meeting("", text),
    mac.GPU_LOAD: load.parse_gpu_ratio,
    mac.MACMON: load.parse_macmon,
    mac.THUNDERBOLT: _thunderbolt,
    mac.HARDWARE_PORTS: parse_hardware_ports,
    mac.INTERFACES: macos_fabric.parse_ifconfig,
    mac.RDMA_STATUS: macos_fabric.parse_rdma_ctl,
    mac.RDMA_DEVICES: macos_fabric.parse_devices,
    mac.CHIP_SYSCTL: _chip,
    mac.BUILD: str.strip,
    mac.TRANSLATED: macos_facts.parse_translation,
    mac.SLEEP_TIME: macos_settings.parse_timeval,
    mac.FIREWALL_STATE: macos_settings.parse_firewall_state,
    mac.FIREWALL_BLOCK_ALL: macos_settings.parse_block_all,
    mac.FIREWALL_APPS: macos_settings.parse_firewall_apps,
    mac.POWER_SETTINGS: _power,
    mac.ASSERTIONS: _assertions,
    mac.UPDATES: macos_settings.parse_installs_updates,
    mac.FILEVAULT: macos_settings.parse_filevault,
    mac.SCREEN_USER: macos_facts.parse_screen_user,
    mac.DISABLED_SERVICES: macos_settings.parse_disabled_services,
    mac.BACKGROUND_ITEMS: macos_settings.parse_disallowed_items,
    mac.BACKUP_EXCLUSION: lambda text: text.startswith("[Excluded]"),
    mac.CLOCK: macos_settings.parse_clock_offset,
    mac.LISTENERS: lambda text: sorted(set(macos_settings.parse_listeners(text)), key=str)[:MAX_ITEMS],
    mac.NETWORK_DENIALS: macos_facts.parse_denials,
    mac.NEIGHBOURS: lambda text: macos_settings.parse_neighbours(text, ""),
    mac.DEFAULT_ROUTE: parse_pairs,
    mac.CONNECT: macos_facts.parse_nc,
    mac.JOB: parse_print,
    mac.PLIST_CHECK: lambda text: text.strip().endswith("OK"),
    mac.WIRED_LIMIT: parse_positive,
    mac.GROUP: lambda text: bool(text.strip()),
    mac.ACCOUNT_IDS: lambda text: len(text.splitlines()),
    mac.HOST_NAME: str.strip,
    mac.HOME: str.strip,
    mac.DATE: parse_positive,
    mac.DISK: _preflight("free_bytes", key="disk"),
    mac.PROGRAMS: lambda text: len(preflight.parse_macos("", {"processes": text}, None).programs),
    mac.MODEL_SYSCTL: _preflight("model", "memory_bytes", key="sysctl"),
    mac.IS_TRANSLATED: _preflight("is_translated", key="rosetta"),
    mac.SOCKETS: _preflight("listening", key="sockets"),
    mac.INSTALLS_UPDATES: _preflight("updates_itself", key="updates"),
    mac.KERNEL: str.split,
    mac.PROCESS: str.strip,
    mac.MEMORY_FREE: load.parse_free_ratio,
    mac.MEMBER: lambda text: text.startswith("yes"),
    mac.SERVICE_ORDER: macos_network.parse_service_order,
    mac.SERVICE_INFO: parse_pairs,
    mac.STORED_BRIDGES: macos_network.parse_stored_bridges,
})  # fmt: skip


def parse(command: mac.MacCommand, text: str) -> Any:
    """Return what production reads in a command's output, as JSON; an error's name if the parser raises.

    A parser must not raise for any text: the error in the report shows the mistake.
    """
    try:
        result = PARSERS[command](text)
        return orjson.loads(orjson.dumps(result, default=_plain, option=orjson.OPT_NON_STR_KEYS))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:  # fmt: skip
        return {"parserRaised": f"{type(error).__name__}: {error}"[:200]}


def _plain(value: Any) -> Any:
    """Return a value that orjson writes, for one that it does not."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)[:MAX_ITEMS]
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    return value.hex() if isinstance(value, bytes) else str(value)
