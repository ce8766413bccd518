"""Other gateways, each one worker in front of the same engines. Missing ones are named and left out.

They live in a folder of their own, FLEET_BENCH_PEERS or ~/.cache/mlx-fleet-bench; `make bench-gateway-peers` fills it.
"""

import os
import platform
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.gateway.parts import Engine, answers, child, free_port
from bench.result import PeerError, of_peer, recorded

FOLDER = Path(os.environ.get("FLEET_BENCH_PEERS", "~/.cache/mlx-fleet-bench")).expanduser()
SYSTEM = FOLDER / "system"
"""Folder in which Debian's packages are unpacked."""

_NGINX = """
worker_processes 1; pid {folder}/pid; error_log {folder}/error.log; daemon off;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engines {{ least_conn; {servers} keepalive 128; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port}; keepalive_requests 100000000;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_connect_timeout 1s; proxy_read_timeout 1s;
      proxy_next_upstream error timeout invalid_header http_502 http_503 http_504 non_idempotent;
    }}
  }}
}}
"""

_HAPROXY = """
global
  nbthread 1
  maxconn 4096
defaults
  mode http
  timeout connect 1s
  timeout client 600s
  timeout server 1s
  timeout tunnel 600s
  retries 3
  retry-on all-retryable-errors
  option redispatch 1
  option http-keep-alive
  option http-no-delay
  http-reuse always
frontend in
  bind 127.0.0.1:{port}
  default_backend engines
backend engines
  balance leastconn
  option httpchk GET /health
  default-server check inter 200ms rise 1 fall 2 observe layer7 error-limit 3 on-error mark-down
{servers}
"""


@dataclass
class Peer:
    """One way to the engines."""

    name: str
    port: int
    pid: int | None = None
    key: str = ""
    is_llm_router: bool = False
    is_slow: bool = False
    """So slow that a burst of 64 would last for many seconds."""
    is_tls: bool = False
    """True if its clients speak TLS."""


@dataclass(frozen=True)
class Kind:
    """One kind of peer: its program and its command; `command` writes the configuration into the folder."""

    name: str
    program: Callable[[], Path | None]
    command: Callable[[Path, Path, int, Sequence[Engine]], list[str]]
    health: str
    is_llm_router: bool = True
    is_slow: bool = False


def _system(name: str) -> Callable[[], Path | None]:
    def find() -> Path | None:
        path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", str(SYSTEM / "usr/sbin")))
        found = shutil.which(name, path=path)
        return Path(found) if found is not None else None

    return find


def _installed(package: str, program: str) -> Callable[[], Path | None]:
    def find() -> Path | None:
        path = FOLDER / package / "bin" / program
        return path if path.exists() else None

    return find


def _urls(engines: Sequence[Engine]) -> list[str]:
    return [f"http://127.0.0.1:{engine.port}" for engine in engines]


def _nginx(program: Path, folder: Path, port: int, engines: Sequence[Engine]) -> list[str]:
    # As it comes, nginx leaves an engine alone for 10 s after one error.
    servers = " ".join(f"server 127.0.0.1:{e.port} max_fails=1 fail_timeout=1s;" for e in engines)
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, port=port, servers=servers))
    errors = str(folder / "error.log")
    return [str(program), "-p", str(folder), "-c", str(config), "-e", errors]


def _haproxy(program: Path, folder: Path, port: int, engines: Sequence[Engine]) -> list[str]:
    servers = "\n".join(f"  server e{n} 127.0.0.1:{e.port}" for n, e in enumerate(engines))
    config = folder / "haproxy.cfg"
    config.write_text(_HAPROXY.format(port=port, servers=servers))
    return [str(program), "-db", "-f", str(config)]


def _litellm(program: Path, folder: Path, port: int, engines: Sequence[Engine]) -> list[str]:
    lines = ["model_list:"]
    for url in _urls(engines):
        lines += [
            "  - model_name: bench",
            f"    litellm_params: {{model: openai/bench, api_base: '{url}/v1', api_key: none}}",
        ]
    config = folder / "litellm.yaml"
    config.write_text("\n".join(lines) + "\n")
    flags = ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    return [str(program), "--config", str(config), *flags]


def _router(policy: str, *module: str) -> Callable[[Path, Path, int, Sequence[Engine]], list[str]]:
    def command(program: Path, _: Path, port: int, engines: Sequence[Engine]) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port)]
        metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        flags = [*where, *metrics, "--policy", policy, "--log-level", "error"]
        flags += ["--health-check-interval-secs", "1"]
        return [str(program), *module, *flags, "--worker-urls", *_urls(engines)]

    return command


KINDS = (
    Kind("nginx", _system("nginx"), _nginx, "/health", is_llm_router=False),
    Kind("haproxy", _system("haproxy"), _haproxy, "/health", is_llm_router=False),
    Kind(
        "vllm-router p2c",
        _installed("vllm-router", "vllm-router"),
        _router("power_of_two"),
        "/health",
    ),
    Kind(
        "vllm-router cache",
        _installed("vllm-router", "vllm-router"),
        _router("cache_aware"),
        "/health",
    ),
    Kind(
        "sglang-router",
        _installed("sglang-router", "python"),
        _router("power_of_two", "-m", "sglang_router.launch_router"),
        "/health",
    ),
    Kind(
        "litellm",
        _installed("litellm", "litellm"),
        _litellm,
        "/health/liveliness",
        is_slow=True,
    ),
)


def _environment(key: str) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    libraries = SYSTEM / "usr/lib" / f"{platform.machine()}-linux-gnu"
    if libraries.exists():
        found["LD_LIBRARY_PATH"] = str(libraries)
    # LiteLLM does not start without a key.
    litellm = {"LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return {**found, **litellm, "LITELLM_LOG": "ERROR"}


async def started(
    stack: AsyncExitStack, folder: Path, engines: Sequence[Engine], names: Sequence[str]
) -> tuple[list[Peer], dict[str, str]]:
    """Start the peers of these names; return them, and why others cannot be measured."""
    peers: list[Peer] = []
    failed: dict[str, str] = {}
    for kind in (kind for kind in KINDS if kind.name in names):
        with recorded(failed, kind.name):
            peers.append(await _start(stack, folder, engines, kind))
    return peers, failed


async def _start(
    stack: AsyncExitStack, folder: Path, engines: Sequence[Engine], kind: Kind
) -> Peer:
    program = kind.program()
    if program is None:
        raise PeerError("not installed (make bench-gateway-peers)")
    own = folder / kind.name.replace(" ", "-")
    own.mkdir()
    port, log, key = free_port(), own / "log", "sk-" + secrets.token_hex(32)
    async with AsyncExitStack() as mine:
        with of_peer():
            command = kind.command(program, own, port, engines)
            pid = await mine.enter_async_context(child(*command, log=log, env=_environment(key)))
            await answers(port, kind.health, log)
        stack.push_async_exit(mine.pop_all())
    return Peer(
        kind.name,
        port,
        pid,
        key=key if kind.name == "litellm" else "",
        is_llm_router=kind.is_llm_router,
        is_slow=kind.is_slow,
    )
