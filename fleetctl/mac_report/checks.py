"""Comparisons of a report: each value of this Mac against a second source. Pure."""

import errno
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from fleetctl.mac_report.parsers import PARSERS, parse
from fleetctl.mac_report.readings import Comparison, Readings, RunContext, Verdict
from machinery import macos_commands as mac
from machinery.network_interfaces import thunderbolt_devices
from nodeagent.hardware import macos
from nodeagent.hardware.macos_fabric import FabricOutput, assemble_fabric
from nodeagent.hardware.service_definitions import OPEN_FILES
from nodeagent.hardware.system_text import parse_pairs, parse_positive

_GIB: Final = 2**30
# Commands whose result does not depend on the moment or the user, so that each kind of process must read the same.
STABLE: Final = (
    mac.FACTS_SYSCTL, mac.HARDWARE, mac.VERSION, mac.GPU_REGISTRY, mac.BOARD_REGISTRY, mac.THUNDERBOLT,
    mac.HARDWARE_PORTS, mac.RDMA_STATUS, mac.RDMA_DEVICES, mac.CHIP_SYSCTL, mac.BUILD, mac.POWER_SETTINGS,
    mac.FIREWALL_STATE, mac.FILEVAULT, mac.LOCAL_NAME, mac.WIRED_LIMIT, mac.TRANSLATED,
)  # fmt: skip
# The local network privacy of macOS answers so at once (TN3179); a silent address gives ETIMEDOUT.
_DENIED: Final = frozenset((65, errno.EHOSTUNREACH))


def compare(readings: Readings) -> list[Comparison]:
    """Return all comparisons."""
    return [comparison for check in _CHECKS for comparison in check(readings)]


def _same(name: str, **values: Any) -> Comparison:
    """Compare the values of two or more sources; one that every Mac has must not be missing."""
    first, *others = values.values()
    verdict = Verdict.HOLDS
    if any(value is None or value == "" for value in values.values()):
        verdict = Verdict.MISSING
    elif any(value != first for value in others):
        verdict = Verdict.DIFFERS
    detail = "; ".join(f"{source}: {value}" for source, value in values.items())
    return Comparison(name=name, verdict=verdict, detail=detail)


def _claim(name: str, holds: bool, detail: str) -> Comparison:
    return Comparison(name=name, verdict=Verdict.HOLDS if holds else Verdict.DIFFERS, detail=detail)


def _not_asked(name: str, why: str) -> Comparison:
    return Comparison(name=name, verdict=Verdict.NOT_ASKED, detail=why)


def _has_rdma(version: str) -> bool:
    """Return whether this macOS has RDMA over Thunderbolt and MLX's newest kernels."""
    match = re.match(r"(\d+)(?:\.(\d+))?", version, re.ASCII)
    return match is not None and (int(match[1]), int(match[2] or 0)) >= macos.RDMA_SINCE


def check_machine(readings: Readings) -> Iterator[Comparison]:
    """Yield model, chip, processors, GPU cores, identity, memory and version."""
    sysctl = readings.parsed(mac.FACTS_SYSCTL) or {}
    profile = readings.parsed(mac.HARDWARE) or macos.SystemProfile()
    sources, version = readings.sources, parse_pairs(readings.out(mac.VERSION))
    device = readings.metal.device if readings.metal else None
    metal = {"Metal": device.memory_bytes} if device and device.memory_bytes else {}
    memory_bytes = parse_positive(sysctl.get("hw.memsize"))
    yield _same(
        "memory",
        sysctl=memory_bytes,
        profiler=profile.memory_bytes,
        psutil=sources.memory_bytes,
        **metal,
    )
    yield _same("chip", sysctl=sysctl.get("machdep.cpu.brand_string"), profiler=profile.chip)
    yield _same("model", sysctl=sysctl.get("hw.model"), profiler=profile.machine)
    processors = parse_positive(sysctl.get("hw.ncpu"))
    yield _same("processors", sysctl=processors, profiler=profile.cpu_cores)
    yield _same("gpu cores", ioreg=readings.parsed(mac.GPU_REGISTRY), profiler=profile.gpu_cores)
    uuid = readings.parsed(mac.BOARD_REGISTRY)
    yield _same("hardware UUID", ioreg=uuid, profiler=profile.platform_uuid)
    yield _same("macOS", sw_vers=version.get("ProductVersion"), Python=sources.version)
    build = readings.parsed(mac.BUILD)
    yield _same("build", sw_vers=version.get("BuildVersion"), sw_vers_buildVersion=build)
    translated = readings.parsed(mac.TRANSLATED)
    yield _same("translated", sysctl=translated, Python=sources.machine != "arm64")


def check_memory(readings: Readings) -> Iterator[Comparison]:
    """Yield the page counts, the wired memory, and the limit for models against Metal's."""
    sysctl = readings.parsed(mac.FACTS_SYSCTL) or {}
    total = parse_positive(sysctl.get("hw.memsize"))
    pages = macos.parse_mac_memory(readings.out(mac.VM_STAT), readings.out(mac.MEMORY_SYSCTL))
    if pages is None or total is None:
        yield Comparison(name="pages", verdict=Verdict.MISSING, detail="vm_stat or hw.memsize")
        return
    shown = pages.free_bytes + pages.inactive_bytes + pages.wired_bytes
    yield _claim(
        "pages", 0 < shown <= total, f"vm_stat: {shown} of {total} bytes are free, inactive or wired"
    )  # fmt: skip
    wired = readings.sources.wired_bytes
    if wired is not None:
        # Seconds lie between the two readings.
        near = abs(wired - pages.wired_bytes) <= max(total // 20, _GIB)
        yield _claim("wired memory", near, f"vm_stat: {pages.wired_bytes}; psutil: {wired}")
    device = readings.metal.device if readings.metal else None
    if device is None or not device.recommended_bytes:
        why = readings.metal.message if readings.metal else "the check of Metal did not run"
        yield Comparison(name="memory for models", verdict=Verdict.MISSING, detail=why)
        return
    wired_mb = parse_positive(readings.out(mac.WIRED_LIMIT))
    ours, source = macos.gpu_memory_limit(total, wired_mb, device.recommended_bytes)
    detail = f"ours: {ours} ({source}); Metal recommends {device.recommended_bytes}"
    yield _claim("memory for models", 0 < ours <= device.recommended_bytes, detail)
    if wired_mb:
        near = abs(device.recommended_bytes - (wired_mb << 20)) <= _GIB
        yield _claim("wired limit", near, f"{detail}; iogpu.wired_limit_mb: {wired_mb}")


def check_mlx(readings: Readings) -> Iterator[Comparison]:
    """Yield whether the build of MLX is the one for this macOS and chip."""
    build = readings.metal.build if readings.metal else None
    version = parse_pairs(readings.out(mac.VERSION)).get("ProductVersion", "")
    if build is None:
        why = readings.metal.message if readings.metal else "the check of Metal did not run"
        yield Comparison(name="mlx build", verdict=Verdict.MISSING, detail=why)
        return
    detail = f"{build.tag} for {build.minimum_system} on macOS {version}"
    is_new = _has_rdma(version)
    yield _claim("jaccl", build.has_jaccl == is_new, f"{detail}: jaccl {build.has_jaccl}")
    yield _claim("nax kernels", build.has_nax == is_new, f"{detail}: nax {build.has_nax}")


def check_fabric(readings: Readings) -> Iterator[Comparison]:
    """Yield the interfaces, Thunderbolt ports and RDMA devices."""
    ports = readings.parsed(mac.HARDWARE_PORTS)
    texts = (mac.THUNDERBOLT, mac.HARDWARE_PORTS, mac.INTERFACES, mac.RDMA_STATUS, mac.RDMA_DEVICES, mac.CHIP_SYSCTL, mac.BUILD)  # fmt: skip
    fabric = assemble_fabric(FabricOutput(*map(readings.out, texts)))
    if ports is None or not readings.out(mac.INTERFACES):
        yield Comparison(name="interfaces", verdict=Verdict.MISSING, detail="networksetup, ifconfig")  # fmt: skip
        return
    ours = {(interface.name, interface.address) for interface in fabric.interfaces}
    yield _same("addresses", ifconfig=sorted(ours), psutil=sorted(readings.sources.addresses))
    sockets = sorted(port.receptacle for port in fabric.ports)
    named = sorted(port.removeprefix("Thunderbolt ") for port in ports if port.startswith("Thunderbolt ") and port[-1].isdigit())  # fmt: skip
    yield _claim("thunderbolt ports", sockets == named, f"system_profiler: {sockets}; networksetup: {named}")  # fmt: skip
    if not _has_rdma(parse_pairs(readings.out(mac.VERSION)).get("ProductVersion", "")):
        yield _not_asked("rdma", "this macOS has no RDMA over Thunderbolt")
        return
    yield _claim(
        "rdma", fabric.is_rdma_enabled is not None, f"rdma_ctl: {readings.out(mac.RDMA_STATUS).strip()!r}"
    )  # fmt: skip
    over = thunderbolt_devices(ports)
    strange = [device.name for device in fabric.rdma if device.interface not in over]
    has_both = bool(fabric.rdma) == bool(fabric.is_rdma_enabled)
    yield _claim(
        "rdma devices", has_both and not strange,
        f"rdma_ctl: {fabric.is_rdma_enabled}; ibv_devinfo: {len(fabric.rdma)} devices, not on Thunderbolt: {strange}",
    )  # fmt: skip


def check_rights(readings: Readings) -> Iterator[Comparison]:
    """Yield whether the service's account and a LaunchDaemon read what the user reads."""
    for context in (RunContext.ROLE, RunContext.DAEMON):
        name = f"read as {context}"
        if context not in readings.runs:
            if "sudo" in readings.asked:
                yield Comparison(name=name, verdict=Verdict.MISSING, detail="; ".join(readings.notes))  # fmt: skip
            else:
                yield _not_asked(name, "--sudo was not given")
            continue
        other = [
            command.name
            for command in STABLE
            if parse(command, readings.out(command))
            != parse(command, readings.out(command, context))
        ]
        yield _claim(name, not other, f"read differently: {', '.join(other) or 'nothing'}")


def check_parsers(readings: Readings) -> Iterator[Comparison]:
    """Yield the commands whose parser raised, and those that ran and gave nothing."""
    raised = [
        f"{command.name} as {context}"
        for context, runs in readings.runs.items()
        for command, run in runs.items()
        if command in PARSERS and "parserRaised" in str(parse(command, run.out))
    ]
    yield _claim("parsers", not raised, f"raised: {', '.join(raised) or 'none'}")


def check_launchd(readings: Readings) -> Iterator[Comparison]:
    """Yield what production assumes of launchd."""
    timings = readings.launchd
    if timings is None:
        if "sudo" in readings.asked:
            yield Comparison(name="launchd", verdict=Verdict.MISSING, detail="; ".join(readings.notes))  # fmt: skip
        else:
            yield _not_asked("launchd", "--sudo was not given")
        return
    yield _same("open files", job=timings.open_files, definition=OPEN_FILES)
    yield _claim(
        "launchd pid",
        timings.pid_matches is True,
        f"launchctl print agrees with ps: {timings.pid_matches}",
    )
    codes = sorted({code for tries in timings.bootstrap_codes for code in tries[:-1]})
    ends = [tries[-1] for tries in timings.bootstrap_codes if tries]
    # fleetctl/services/launchd.py retries 5, 36 and 37.
    holds = bool(ends) and not any(ends) and set(codes) <= {5, 36, 37}
    yield _claim("bootstrap after bootout", holds, f"{len(ends)} times; codes before 0: {codes}")
    slowest = max(timings.bootout_s, default=None)
    yield _claim("bootout", slowest is not None and slowest < 30, f"slowest: {slowest} s")
    stopped = timings.stopped_bootout_s
    yield _claim("bootout of a stopped process", stopped is not None and 4 < stopped < 30, f"{stopped} s, with an ExitTimeOut of 5 s")  # fmt: skip
    size, before = timings.log_bytes_after_truncate, timings.log_bytes_before
    yield _claim("log after truncate", size is not None and size < before, f"{before} bytes before, {size} after")  # fmt: skip


def check_network(readings: Readings) -> Iterator[Comparison]:
    """Yield which kinds of processes macOS keeps from the local network, against Apple's TN3179."""
    kinds = dict.fromkeys(probe.process for probe in readings.network)
    if not kinds:
        yield _not_asked("local network", "--sudo was not given, or no neighbour is known")
        return
    for kind in kinds:
        probes = [probe for probe in readings.network if probe.process == kind]
        denied = [probe for probe in probes if probe.error in _DENIED]
        shown = ", ".join(f"{p.interface} {p.action} {p.target}: {p.error}" for p in denied)
        # Daemons, root, and the children of Terminal are exempt; the rest is what the report is to find out.
        if kind in ("terminal", "daemon-root", "daemon-role"):
            yield _claim(f"local network of {kind}", not denied, f"denied: {shown or 'nothing'}")
        else:
            yield _not_asked(f"local network of {kind}", f"denied: {shown or 'nothing'}")


def check_engine(readings: Readings) -> Iterator[Comparison]:
    """Yield the memory of an engine by two sources, and what stays wired after its end."""
    memory = readings.engine
    if memory is None:
        if "model" in readings.asked:
            yield Comparison(name="engine", verdict=Verdict.MISSING, detail="; ".join(readings.notes))  # fmt: skip
        else:
            yield _not_asked("engine", "--with-model was not given")
        return
    yield _claim(
        "footprint", memory.footprint >= memory.weights > 0,
        f"phys_footprint: {memory.footprint}; weights: {memory.weights}",
    )  # fmt: skip
    for name, after in (("SIGTERM", memory.wired_after_end), ("SIGKILL", memory.wired_after_kill)):
        rest = after - memory.wired_before
        yield _claim(f"wired after {name}", rest <= _GIB, f"{rest} bytes more than before")
    thermal = (memory.thermal_before, memory.thermal_after)
    yield _claim("thermal level", None not in thermal, f"before and after the load: {thermal}")


_CHECKS: Final[Sequence[Callable[[Readings], Iterator[Comparison]]]] = (
    check_parsers, check_machine, check_memory, check_mlx, check_fabric, check_rights, check_launchd, check_network,
    check_engine,
)  # fmt: skip
