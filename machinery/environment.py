"""The process environment: variables for child processes, and standard variables such as NO_COLOR and OTEL_*.

Our own settings (FLEET_*) are read by click, at the command line.
"""

import os
import platform
import re
from collections.abc import Mapping
from typing import Final

# FLEET_ETCD_PASSWORD, FLEET_API_KEY, HF_TOKEN, AWS_SECRET_ACCESS_KEY; not FLEET_API_KEY_FILE, which is a path.
_SECRET = re.compile(
    r"(?i)(?:^|_)(?:PASSWORD|PASSWD|PASSPHRASE|SECRET|TOKEN|API_?KEY|ACCESS_KEY|PRIVATE_KEY)$"
)


def is_secret_name(name: str) -> bool:
    """Return whether a variable, or a flag without its dashes, holds a secret itself and not the path of one."""
    return _SECRET.search(name.replace("-", "_")) is not None


def drop_secrets(*prefixes: str) -> None:
    """Remove variables that hold secrets, and those that start with a prefix: child processes do not inherit them.

    Call it when the variables have been read. The kernel goes on showing this process's own ones to its user.
    """
    kept = environment_without_secrets(*prefixes)
    for name in set(os.environ) - kept.keys():
        del os.environ[name]


def environment_without_secrets(*prefixes: str) -> dict[str, str]:
    """Return our environment for a child, minus variables that hold secrets, and those that start with a prefix."""
    return {
        name: value
        for name, value in os.environ.items()
        if not (_SECRET.search(name) or name.startswith(prefixes))
    }


def child_environment(added: Mapping[str, str], *, without: tuple[str, ...]) -> dict[str, str]:
    """Return `environment_without_secrets` plus `added`."""
    return {**environment_without_secrets(*without), **added}


def no_proxy_for(host: str) -> dict[str, str]:
    """Return the variables by which other programs reach a host without a proxy, as those that our own names."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    return dict.fromkeys(("no_proxy", "NO_PROXY"), f"{given},{host}" if given else host)


# Of huggingface_hub and Ollama.
_MODEL_FOLDERS = ("HF_HUB_CACHE", "HF_HOME", "OLLAMA_MODELS")


def model_folders() -> dict[str, str]:
    """Return the variables by which other programs are told where to keep models."""
    return {name: os.environ[name] for name in _MODEL_FOLDERS if os.environ.get(name)}


def has_screen() -> bool:
    """Return whether a browser with a window can be opened here: not in a session of ssh, and not without a desktop."""
    if platform.system() == "Darwin":
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


TRACE_PREFIX: Final = "OTEL_"
"""The prefix of OpenTelemetry's variables. OTEL_EXPORTER_OTLP_HEADERS holds the token of a collector."""


def trace_settings() -> dict[str, str]:
    """Return OpenTelemetry's variables, for a child that traces; nothing if they ask for no traces.

    Raises:
        ValueError: they ask for an exporter or a protocol that is not supported.

    """
    if not are_traces_enabled():
        return {}
    return {name: value for name, value in os.environ.items() if name.startswith(TRACE_PREFIX)}


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
