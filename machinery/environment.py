"""The environment as what child processes inherit. Settings are read from it elsewhere: by click, at the edge."""

import os
from collections.abc import Mapping


def drop_variables(prefix: str) -> None:
    """Have the processes that we start from here on not inherit variables that begin so."""
    for name in [name for name in os.environ if name.startswith(prefix)]:
        del os.environ[name]


def child_environment(added: Mapping[str, str], *, without: tuple[str, ...]) -> dict[str, str]:
    """Return our environment with more variables, and without those of ours that begin so."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    return {**kept, **added}


def are_traces_enabled() -> bool:
    """Return whether OpenTelemetry's standard variables ask for traces.

    Raises:
        ValueError: they ask for what only other exporters can do.

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
        said = ",".join(sorted(exporters))
        raise ValueError(f"OTEL_TRACES_EXPORTER={said}: only otlp and none are possible")
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        said = os.environ.get(name, "")
        if said not in ("", "http/protobuf"):
            raise ValueError(
                f"{name}={said}: traces are sent over http/protobuf only; leave it out, and give the "
                "collector's HTTP port (4318 as a rule)"
            )
    return True


def _is_set(name: str) -> bool:
    return bool(os.environ.get(name))


def color_preference() -> bool | None:
    """Return what the environment says about colours; None if it leaves it to whether there is a terminal.

    NO_COLOR (no-color.org: set, and not empty) is stronger than FORCE_COLOR (force-color.org), that than TERM=dumb.
    """
    if _is_set("NO_COLOR"):
        return False
    if _is_set("FORCE_COLOR"):
        return True
    return None if has_capable_terminal() else False


def has_capable_terminal() -> bool:
    """Return whether TERM names a terminal that can go back in its line."""
    return os.environ.get("TERM", "") not in ("", "dumb")
