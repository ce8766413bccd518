"""The process environment: variables for child processes, and standard variables such as NO_COLOR and OTEL_*.

Our own settings (FLEET_*) are read by click, at the command line.
"""

import os
from collections.abc import Mapping


def drop_variables(prefix: str) -> None:
    """Remove the variables that start with `prefix`, so that child processes do not inherit them."""
    for name in [name for name in os.environ if name.startswith(prefix)]:
        del os.environ[name]


def child_environment(added: Mapping[str, str], *, without: tuple[str, ...]) -> dict[str, str]:
    """Return our environment plus `added`, minus our variables that start with one of `without`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    return {**kept, **added}


def are_traces_enabled() -> bool:
    """Return whether OpenTelemetry's standard variables ask for traces.

    Raises:
        ValueError: they ask for an exporter or a protocol that is not supported.

    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = {name.strip() for name in os.environ.get("OTEL_TRACES_EXPORTER", "").split(",")}
    exporters.discard("")
    if not exporters:
        if not any(
            map(_is_set, ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
        ):
            return False
    elif exporters == {"none"}:
        return False
    elif exporters != {"otlp"}:
        value = ",".join(sorted(exporters))
        raise ValueError(f"OTEL_TRACES_EXPORTER={value}: only otlp and none are supported")
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        value = os.environ.get(name, "")
        if value not in ("", "http/protobuf"):
            raise ValueError(
                f"{name}={value}: only http/protobuf is supported; remove the variable, and set the endpoint "
                "to the collector's HTTP port (usually 4318)"
            )
    return True


def _is_set(name: str) -> bool:
    return bool(os.environ.get(name))


def color_preference() -> bool | None:
    """Return whether the environment asks for colors; None if the terminal decides.

    NO_COLOR (no-color.org: set and not empty) wins over FORCE_COLOR (force-color.org), which wins over TERM=dumb.
    """
    if _is_set("NO_COLOR"):
        return False
    if _is_set("FORCE_COLOR"):
        return True
    return None if has_capable_terminal() else False


def has_capable_terminal() -> bool:
    """Return whether TERM names a terminal that can move its cursor."""
    return os.environ.get("TERM", "") not in ("", "dumb")
