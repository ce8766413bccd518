"""Other gateways, each one worker in front of the same engines. Missing ones are named and left out.

They live in a folder of their own, FLEET_BENCH_PEERS or ~/.cache/mlx-fleet-bench; a bench installs what is missing there.
"""

import asyncio
import json
import os
import platform
import resource
import secrets
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.gateway.parts import Engine, answers, child, free_port, own_core
from bench.result import PeerError, of_peer, recorded

FOLDER = Path(os.environ.get("FLEET_BENCH_PEERS", "~/.cache/mlx-fleet-bench")).expanduser()
SYSTEM = FOLDER / "system"
"""Folder in which Debian's packages are unpacked."""

_NGINX = """
worker_processes 1; pid {folder}/pid; error_log {folder}/error.log; daemon off;
events {{ worker_connections {connections}; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engines {{ least_conn; {servers} keepalive 128; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port}; keepalive_requests 100000000;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_connect_timeout 1s; proxy_read_timeout {patience_s}s;
      proxy_next_upstream error timeout invalid_header http_502 http_503 http_504 non_idempotent;
    }}
  }}
}}
"""

_HAPROXY = """
global
  nbthread 1
  maxconn {clients}
defaults
  mode http
  timeout connect 1s
  timeout client 600s
  timeout server {patience_s}s
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

# One process on one thread, as the others; connections to engines are kept.
_CADDY = """
{{
  admin off
  auto_https off
  persist_config off
  log {{
    level ERROR
  }}
}}
:{port} {{
  bind 127.0.0.1
  reverse_proxy {engines} {{
    lb_policy least_conn
    flush_interval -1
    fail_duration 1s
    transport http {{
      keepalive_idle_conns_per_host 1024
      dial_timeout 1s
      response_header_timeout {patience_s}s
    }}
  }}
}}
"""

_PATIENCE_S = 1
"""Silence of an engine that other gateways put up with, as ours in `bench.gateway.faults`."""


@dataclass
class Peer:
    """One way to the engines."""

    name: str
    port: int
    pid: int | None = None
    key: str = ""
    header: str = ""
    """One more line that its requests need."""
    is_llm_router: bool = False
    is_slow: bool = False
    """So slow that it is measured in fewer rounds."""
    is_tls: bool = False
    """True if its clients speak TLS."""


@dataclass(frozen=True)
class Place:
    """The folder, the port and the engines of a peer that is to be started."""

    folder: Path
    port: int
    engines: Sequence[Engine]
    patience_s: int
    """The longest silence of an engine, where it can be set."""

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{engine.port}" for engine in self.engines]

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path


@dataclass(frozen=True)
class Kind:
    """One kind of peer: its program and its command; `command` writes the configuration into the folder."""

    name: str
    program: Callable[[], Path | None]
    command: Callable[[Path, Place], list[str]]
    health: str
    header: Callable[[Sequence[Engine]], str] = lambda _: ""
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


def _nginx(program: Path, place: Place) -> list[str]:
    # As it comes, nginx leaves an engine alone for 10 s after one error.
    servers = "".join(
        f"server 127.0.0.1:{e.port} max_fails=1 fail_timeout=1s; " for e in place.engines
    )
    text = _NGINX.format(
        folder=place.folder,
        port=place.port,
        servers=servers,
        patience_s=place.patience_s,
        connections=open_files(),
    )
    config, errors = place.write("nginx.conf", text), str(place.folder / "error.log")
    return [str(program), "-p", str(place.folder), "-c", str(config), "-e", errors]


def _haproxy(program: Path, place: Place) -> list[str]:
    servers = "\n".join(f"  server e{n} 127.0.0.1:{e.port}" for n, e in enumerate(place.engines))
    text = _HAPROXY.format(
        port=place.port,
        servers=servers,
        patience_s=place.patience_s,
        clients=open_files() // 2 - 100,
    )
    return [str(program), "-db", "-f", str(place.write("haproxy.cfg", text))]


def _caddy(program: Path, place: Place) -> list[str]:
    engines = " ".join(f"127.0.0.1:{engine.port}" for engine in place.engines)
    text = _CADDY.format(port=place.port, engines=engines, patience_s=place.patience_s)
    config = place.write("Caddyfile", text)
    return [str(program), "run", "--adapter", "caddyfile", "--config", str(config)]


def _litellm(program: Path, place: Place) -> list[str]:
    lines = ["model_list:"]
    for url in place.urls:
        lines += [
            "  - model_name: bench",
            f"    litellm_params: {{model: openai/bench, api_base: '{url}/v1', api_key: none}}",
        ]
    config = place.write("litellm.yaml", "\n".join(lines) + "\n")
    flags = ["--host", "127.0.0.1", "--port", str(place.port), "--num_workers", "1"]
    return [str(program), "--config", str(config), *flags]


def _portkey(program: Path, place: Place) -> list[str]:
    server = FOLDER / "portkey/node_modules/@portkey-ai/gateway/build/start-server.js"
    return [str(program), str(server), f"--port={place.port}", "--headless"]


def _portkey_header(engines: Sequence[Engine]) -> str:
    """Return the header by which a request tells Portkey's gateway where to send it."""
    targets = [
        {"provider": "openai", "api_key": "none", "custom_host": f"http://127.0.0.1:{e.port}/v1"}
        for e in engines
    ]
    config = {"strategy": {"mode": "loadbalance"}, "targets": targets}
    return f"x-portkey-config: {json.dumps(config)}"


def _router(policy: str, *module: str) -> Callable[[Path, Place], list[str]]:
    def command(program: Path, place: Place) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(place.port)]
        metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        flags = [*where, *metrics, "--policy", policy, "--log-level", "error"]
        flags += ["--health-check-interval-secs", "1"]
        return [str(program), *module, *flags, "--worker-urls", *place.urls]

    return command


def _floor(program: Path, place: Place) -> list[str]:
    ports = [str(engine.port) for engine in place.engines]
    return [str(program), "-m", "bench.gateway.floor", str(place.port), *ports]


FLOOR = "floor"
KINDS = (
    Kind(FLOOR, lambda: Path(sys.executable), _floor, "/health", is_llm_router=False),
    Kind("nginx", _system("nginx"), _nginx, "/health", is_llm_router=False),
    Kind("haproxy", _system("haproxy"), _haproxy, "/health", is_llm_router=False),
    Kind("caddy", _installed("caddy", "caddy"), _caddy, "/health", is_llm_router=False),
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
    Kind(
        "portkey",
        _installed("portkey", "node"),
        _portkey,
        "/",
        header=_portkey_header,
        is_slow=True,
    ),
)


def open_files() -> int:
    """Return the number of files that a process may open, which a proxy needs two of for each stream."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def _environment(key: str) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    libraries = SYSTEM / "usr/lib" / f"{platform.machine()}-linux-gnu"
    if libraries.exists():
        found["LD_LIBRARY_PATH"] = str(libraries)
    # LiteLLM does not start without a key.
    litellm = {"LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return {**found, **litellm, "LITELLM_LOG": "ERROR"}


async def started(
    stack: AsyncExitStack,
    folder: Path,
    engines: Sequence[Engine],
    names: Sequence[str],
    patience_s: int = _PATIENCE_S,
) -> tuple[list[Peer], dict[str, str]]:
    """Start the peers of these names, all at once; return them, and why others cannot be measured."""
    peers: dict[str, Peer] = {}
    failed: dict[str, str] = {}

    async def start(kind: Kind) -> None:
        with recorded(failed, kind.name):
            peers[kind.name] = await _start(stack, folder, kind, engines, patience_s)

    kinds = [kind for kind in KINDS if kind.name in names]
    await asyncio.gather(*(start(kind) for kind in kinds))
    return [peers[kind.name] for kind in kinds if kind.name in peers], failed


async def _start(
    stack: AsyncExitStack, folder: Path, kind: Kind, engines: Sequence[Engine], patience_s: int
) -> Peer:
    program = kind.program()
    if program is None:
        raise PeerError("not installed (a run without --smoke installs it)")
    own = folder / kind.name.replace(" ", "-")
    own.mkdir()
    place = Place(own, free_port(), engines, patience_s)
    log, key = own / "log", "sk-" + secrets.token_hex(32)
    async with AsyncExitStack() as mine:
        with of_peer():
            command = kind.command(program, place)
            with own_core(is_gateway=True):
                running = await mine.enter_async_context(
                    child(*command, log=log, env=_environment(key))
                )
            await answers(place.port, kind.health, log)
        stack.push_async_exit(mine.pop_all())
    return Peer(
        kind.name,
        place.port,
        running,
        key=key if kind.name == "litellm" else "",
        header=kind.header(engines),
        is_llm_router=kind.is_llm_router,
        is_slow=kind.is_slow,
    )
