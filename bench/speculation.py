"""Guesses: an engine with them beside one without.

`python -m bench.speculation [FOLDER]` takes a model's folder; without one it makes SmolLM2. `copy` and `new` are guesses
from n-grams, on texts that repeat their prompt and on new ones. `mtp_any` and `mtp_wrong` are those of a multi-token
prediction head, of a synthetic checkpoint (tests/support/mtp_models.py): random weights, and a head that was made to
be right mostly, or never. They show what guesses cost and save, not how often a published head is right.

Both engines run all the time and answer the same chats in turns, one request at a time. Compared are the tokens a
second from the first token to the last, with and without guesses, as the median of all pairs: up to six, fewer on a slow
machine. `differ` counts answers that are not equal: a pass over several tokens rounds differently, which may move a
sampled token.
"""

import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.engine_start import Fields, asked, free_port, real_model, start_engine, until
from bench.result import arguments, finish, sized

_PAIRS: Final = sized(6, smoke=1)
_TOKENS: Final = sized(64, smoke=16)
# No pair of a kind of chat begins later than this: the four kinds, and a last pair of each, fit into five minutes.
_CHAT_S: Final = 40.0
_GUESS: Final = 8
_MTP_GUESS: Final = 3
_NAMES: Final = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta", "zeta")
_TOPICS: Final = ("a lighthouse", "a market", "a winter", "a train", "a violin", "a river")
_METRICS: Final = ("draft_tokens_total", "draft_accepted_tokens_total")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, and how fast it came."""

    text: str
    tokens_per_s: float


def code(seed: int) -> str:
    """Return some functions, each time other ones."""
    dice = random.Random(seed)
    parts = []
    for name in dice.sample(_NAMES, 4):
        one, other = dice.sample(_NAMES, 2)
        parts.append(
            f"def {name}({one}, {other}):\n"
            f'    """Return the {name} of {one} and {other}."""\n'
            f"    result = {one} * {dice.randrange(2, 99)} + {other}\n"
            f"    print('{name} is', result)\n    return result\n"
        )
    return "\n\n".join(parts)


def copying(seed: int) -> dict[str, Any]:
    """Return a chat whose answer repeats what the user sent, as an edit of code does."""
    text = code(seed)
    turns = [
        {"role": "user", "content": f"Repeat this file, and change nothing:\n\n{text}"},
        {"role": "assistant", "content": text[:40]},
    ]
    return {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}


def inventing(seed: int) -> dict[str, Any]:
    """Return a chat whose answer is new text."""
    topic = _TOPICS[seed % len(_TOPICS)]
    turns = [{"role": "user", "content": f"Write a long story about {topic}."}]
    return {"messages": turns, "temperature": 0.8, "seed": seed}


_CHATS: Final = (("copy", copying), ("new", inventing))


@contextmanager
def engine(model: Path, guesses: Fields) -> Iterator[int]:
    """Run an engine; yield its port when it serves."""
    port = free_port()
    fields = {"concurrency": 2, **guesses}
    process = start_engine(model, port, fields=fields, stderr=subprocess.DEVNULL)
    try:
        until(lambda: asked(port, "GET", "/ready") == 200, time.perf_counter())
        yield port
    finally:
        process.terminate()
        process.wait()


def ask(port: int, fields: dict[str, Any]) -> Answer:
    """Send a chat, read its stream."""
    body = {"model": "bench", "max_tokens": _TOKENS, "temperature": 0, "stream": True} | fields
    body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=280)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    text, tokens, first_s = "", 0, 0.0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        for choice in event.get("choices", ()):
            text += choice["delta"].get("content") or ""
            first_s = first_s or time.perf_counter()
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    last_s = time.perf_counter()
    connection.close()
    if response.status != 200 or tokens < 2:
        raise RuntimeError(f"an engine answered {response.status} with {tokens} tokens")
    return Answer(text=text, tokens_per_s=(tokens - 1) / (last_s - first_s))


def metrics(port: int) -> list[float]:
    """Return the numbers of proposed and accepted tokens so far."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    found = {line.split()[0]: float(line.split()[-1]) for line in lines if line[:1] != "#"}
    return [found[f"fleet_engine_{name}"] for name in _METRICS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two engines with one model, one of which guesses."""

    name: str
    model: Path
    guesses: Fields
    """Those that make it guess."""
    chats: tuple[tuple[str, Callable[[int], dict[str, Any]]], ...]
    """Makers of what is asked, by name; a number makes each chat another one."""


def compare(one: Comparison) -> tuple[dict[str, float], dict[str, Any], int]:
    """Return the ratios and figures by name, and how many answers differ."""
    ratios: dict[str, float] = {}
    figures: dict[str, Any] = {}
    differ = 0
    with ExitStack() as engines:
        plain = engines.enter_context(engine(one.model, {}))
        guessing = engines.enter_context(engine(one.model, one.guesses))
        for port in (plain, guessing):  # what is compiled and loaded at first use
            ask(port, inventing(99))
        for chat, make in one.chats:
            pairs: list[float] = []
            before, name, began_s = metrics(guessing), f"{one.name}{chat}", time.perf_counter()
            for seed in range(_PAIRS):
                if pairs and time.perf_counter() - began_s > _CHAT_S:
                    break
                order = (plain, guessing) if seed % 2 else (guessing, plain)
                answers = {port: ask(port, make(seed)) for port in order}
                pairs.append(answers[guessing].tokens_per_s / answers[plain].tokens_per_s)
                differ += answers[guessing].text != answers[plain].text
            proposed, accepted = (
                after - old for after, old in zip(metrics(guessing), before, strict=True)
            )
            ratios[f"{name}_tokens_per_s"] = round(statistics.median(pairs), 2)
            figures[name] = {
                "pairs": [round(ratio, 2) for ratio in pairs],
                "proposed": int(proposed),
                "accepted": int(accepted),
            }
            print(f"{name}: {ratios[f'{name}_tokens_per_s']} {figures[name]}", flush=True)
    return ratios, figures, differ


def synthetic(folder: Path, *flags: str) -> Path:
    """Make a checkpoint with an MTP head, whose passes cost what those of SmolLM2 do; return its folder."""
    command = [sys.executable, "-m", "tests.support.mtp_models", str(folder), "--layers", "12"]
    command += ["--hidden", "576", "--influence", "0.2", *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def measure(model: Path, scratch: Path) -> None:
    """Compare, and print the last line."""
    ngram, mtp = {"ngram_tokens": _GUESS}, {"mtp_tokens": _MTP_GUESS}
    comparisons = (
        Comparison(name="", model=model, guesses=ngram, chats=_CHATS),
        Comparison(
            name="mtp_", model=synthetic(scratch / "mtp"), guesses=mtp, chats=(("any", inventing),)
        ),
        Comparison(
            name="mtp_",
            model=synthetic(scratch / "wrong", "--wrong"),
            guesses=mtp,
            chats=(("wrong", inventing),),
        ),
    )
    ratios: dict[str, float] = {}
    figures: dict[str, Any] = {"tokens": _TOKENS, "differ": 0}
    for comparison in comparisons:
        found = compare(comparison)
        ratios |= found[0]
        figures |= found[1]
        figures["differ"] += found[2]
    finish("speculation", ratios, figures)


def main() -> None:
    """Measure with a folder of the command line, or with SmolLM2."""
    words = arguments()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        measure(Path(words[0]) if words else real_model(scratch), scratch)


if __name__ == "__main__":
    main()
