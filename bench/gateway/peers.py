"""Our gateway and others, each one worker in front of the same engines: ours with everything on that costs time.

The others are installed into folders of their own, without root rights. Missing ones are named and left out.
"""

import json
import os
import re
import resource
import secrets
import shutil
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.gateway.load import Engine
from bench.harness import PeerError, child, get, install, of_peer, own_core, until_answers
from schemas.routing import Routing, Timeouts
from store.etcd.connect import connect
from store.etcd.member.embedded import EmbeddedEtcd
from tests.support.etcd import running_etcd
from tests.support.gateway_world import World, deployment, endpoint, put_api_key
from tests.support.ports import free_port

OURS, DIRECT = "ours", "direct"
"""`direct` is the load on an engine without a gateway."""
KEY = "sk-fleet-" + "b" * 43
NGINX = "nginx"
ROUTERS = ("vllm-router p2c", "vllm-router cache", "litellm")
PREFIX_ROUTERS = ("vllm-router cache",)
"""Those that remember which engine has a prompt's prefix."""
SLOW = "litellm"
"""So slow that it is measured in fewer rounds."""
_CHATS, _STAYS = 20, 15
"""Chats of two turns, and how many of them must stay at their engine: of two, chance keeps half."""

_NGINX = """
worker_processes 1; pid {folder}/pid; error_log {folder}/error.log; daemon off;
events {{ worker_connections {files}; }}
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
_PIP = {"vllm-router": "vllm-router", "litellm": "litellm[proxy]"}


@dataclass
class Peer:
    """One way to the engines."""

    name: str
    port: int
    pid: int | None = None
    key: str = ""
    etcd: EmbeddedEtcd | None = None
    """The store of ours."""


def compiled_python() -> str:
    """Return a Python as users of nginx and of releases have it, compiled with profiles; else the one that runs the bench.

    Pythons that are built from source mostly are not; they run the gateway 10 % slower. Debian's are.
    """
    of_debian = Path("/usr/bin") / f"python3.{sys.version_info.minor}"
    is_own = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
    return sys.executable if is_own or not of_debian.exists() else str(of_debian)


def open_files() -> int:
    """Return the number of files that a process may open, which a proxy needs two of for each stream."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def program(name: str) -> Path:
    """Return a peer's program; install it if it is missing.

    Raises:
        PeerError: it cannot be installed.

    """
    package = name.split()[0]
    if package in _PIP:
        steps = f"{sys.executable} -m venv . && bin/pip install -q --disable-pip-version-check '{_PIP[package]}'"
        return install(package, "sh", "-c", steps) / "bin" / package
    if path := shutil.which(package, path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
        return Path(path)
    steps = f"apt-get download -q {package} && for each in *.deb; do dpkg -x $each .; done"
    return install(package, "sh", "-c", steps) / "usr/sbin" / package


async def start(
    stack: AsyncExitStack, folder: Path, name: str, engines: Sequence[Engine], patience_s: int = 1
) -> Peer:
    """Start another gateway, which gives a silent engine so many seconds where that can be set.

    Raises:
        PeerError: it cannot be installed, or does not start.

    """
    path, own, port, key = program(name), folder / name.replace(" ", "-"), free_port(), ""
    own.mkdir()
    values = {"folder": own, "port": port, "patience_s": patience_s, "files": open_files()}
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    config, health = own / "config", "/health"
    urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
    if name == NGINX:
        # As it comes, nginx leaves an engine alone for 10 s after one error.
        servers = "".join(
            f"server 127.0.0.1:{engine.port} max_fails=1 fail_timeout=1s; " for engine in engines
        )
        config.write_text(_NGINX.format(servers=servers, **values))
        command = ["-p", str(own), "-c", str(config), "-e", str(own / "error.log")]
    elif name == "litellm":
        key, health = "sk-" + secrets.token_hex(32), "/health/liveliness"
        environment |= {"LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        environment["LITELLM_LOG"] = "ERROR"
        models = [
            {
                "model_name": "bench",
                "litellm_params": {
                    "model": "openai/bench",
                    "api_base": f"{url}/v1",
                    "api_key": "none",
                },
            }
            for url in urls
        ]
        config.write_text(json.dumps({"model_list": models}))  # JSON is YAML
        command = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--num_workers", "1"]
    else:
        policy = "power_of_two" if name.endswith("p2c") else "cache_aware"
        command = ["--host", "127.0.0.1", "--port", str(port), "--policy", policy]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        command += ["--log-level", "error", "--health-check-interval-secs", "1"]
        command += ["--worker-urls", *urls]
    with of_peer():
        log = own / "log"
        with own_core(is_measured=True):
            process = await stack.enter_async_context(
                child(str(path), *command, log=log, env=environment)
            )
        await until_answers(port, health, process, log)
    return Peer(name, port, process.pid, key=key)


async def start_ours(
    stack: AsyncExitStack,
    folder: Path,
    fleet: Mapping[str, Sequence[Engine]],
    timeouts: Timeouts | None = None,
    concurrency: int = 64,
) -> Peer:
    """Start etcd and our gateway in front of the engines of each model; scoring, sessions, resumption and keys are on."""
    folder.mkdir(exist_ok=True)
    port, log = free_port(), folder / "gateway.log"
    with own_core(is_measured=False):
        etcd = await stack.enter_async_context(running_etcd(folder / "etcd"))
    world = World(connect(etcd.address))
    await put_api_key(world, KEY, "bench")
    for model, engines in fleet.items():
        declared = deployment(model, replicas=len(engines))
        routing = Routing(timeouts=timeouts or Timeouts())
        spec = declared.spec.model_copy(update={"routing": routing})
        await world.put(declared.model_copy(update={"spec": spec}))
        for engine in engines:
            where = endpoint(engine.replica, model, f"http://127.0.0.1:{engine.port}", node="bench")
            capacity = where.spec.model_copy(update={"concurrency": concurrency})
            await world.put(where.model_copy(update={"spec": capacity}))
    await world.transport.close()
    flags = ["--port", str(port), "--etcd", str(etcd.address), "--log-level", "error"]
    flags += ["--auth", "on", "--state-dir", str(folder / "state")]
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    with own_core(is_measured=True):
        process = await stack.enter_async_context(
            child(compiled_python(), "-m", "gateway", *flags, log=log, env=environment)
        )
    await until_answers(port, "/health", process, log)
    return Peer(OURS, port, process.pid, KEY, etcd)


def proof(port: int, engines: Sequence[Engine]) -> dict[str, object]:
    """Return signs that what costs time was on while our gateway was measured.

    Raises:
        PeerError: something was off, so that its figures would flatter.

    """
    metrics = get(port, "/metrics").decode()
    tokens = re.search(
        r'^fleet_gateway_key_tokens_total\{key="bench"\} (\S+)', metrics, re.MULTILINE
    )
    stays = 0
    for number in range(_CHATS):
        first = [f"key=0 chat {number}: " + "what follows? " * 40]
        stays += _chat(port, first, KEY) == _chat(port, [*first, "This.", "And then?"], KEY)
    signs: dict[str, object] = {
        "status_without_key": _chat(port, ["key=0"], "wrong"),
        "tokens_of_key": float(tokens[1]) if tokens is not None else 0,
        "chats_that_stay": f"{stays} of {_CHATS}",
        "streams_with_marks": sum(engine.stat("marked") for engine in engines),
    }
    if signs["status_without_key"] != "401" or stays < _STAYS or not all(signs.values()):
        raise PeerError(f"our gateway was measured without all that it does: {signs}")
    return signs


def _chat(port: int, messages: Sequence[str], key: str) -> str:
    """Send a chat, user and assistant in turns; return the engine that answered, or the status of an error."""
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(messages)]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps({"model": "bench", "messages": turns}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return str(response.headers["x-fleet-replica"])
    except urllib.error.HTTPError as error:
        return str(error.code)
