"""Guesses: an engine with them beside one without: `make bench-speculation`, under ten minutes.

`copy` and `new` are guesses from n-grams, on texts that repeat their prompt and on new ones. `mtp_any` and `mtp_wrong`
are those of a multi-token prediction head of a synthetic checkpoint (tests/support/mtp_models.py): random weights, and a
head that was made to be right mostly, or never. They show what guesses cost and save, not how often a published head is
right. `hybrid` models have recurrent states (qwen3_5), `window` models have sliding windows (llama); `repeat` are their
texts that repeat themselves every twelve tokens, `new` those that do not, both guessed from n-grams. Both engines answer the same chats in turns, one request at a time. Compared are the tokens a second from the first
token to the last, as the median of all pairs. `differ` counts answers that are not equal: a pass over several tokens
rounds differently, which may move a sampled token.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.harness import finish, sized, turns
from bench.servers import Json, Reply, Server, mtp_model, real_model, serving, start_ours

_PAIRS: Final = sized(6, smoke=1)
_TOKENS: Final = sized(64, smoke=16)
# No pair of a kind of chat begins later than this: all kinds, and a last pair of each, fit into ten minutes.
_CHAT_S: Final = 40.0
_NAMES: Final = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta", "zeta")
_TOPICS: Final = ("a lighthouse", "a market", "a winter", "a train", "a violin", "a river")


def copying(seed: int) -> Json:
    """Return a chat whose answer repeats what the user sent, as an edit of code does."""
    dice, parts = random.Random(seed), []
    for name in dice.sample(_NAMES, 4):
        first, second = dice.sample(_NAMES, 2)
        parts.append(
            f"def {name}({first}, {second}):\n"
            f'    """Return the {name} of {first} and {second}."""\n'
            f"    result = {first} * {dice.randrange(2, 99)} + {second}\n"
            f"    print('{name} is', result)\n    return result\n"
        )
    text = "\n\n".join(parts)
    turns_ = [
        {"role": "user", "content": f"Repeat this file, and change nothing:\n\n{text}"},
        {"role": "assistant", "content": text[:40]},
    ]
    return {"messages": turns_, "continue_final_message": True, "add_generation_prompt": False}


def inventing(seed: int) -> Json:
    """Return a chat whose answer is new text."""
    story = f"Write a long story about {_TOPICS[seed % len(_TOPICS)]}."
    return {
        "messages": [{"role": "user", "content": story}], "temperature": 0.8, "seed": seed,
    }  # fmt: skip


def repeating(seed: int) -> Json:
    """Return a chat that a model made for it answers with a text that repeats itself."""
    return {"messages": inventing(seed)["messages"], "temperature": 0}


def compare(
    plain: Server, guessing: Server, make: Callable[[int], Json]
) -> tuple[list[float], dict[str, Any]]:
    """Return the ratios of all pairs, and what was proposed, accepted and different."""
    names = ("draft_tokens_total", "draft_accepted_tokens_total")
    before, began_s = [guessing.metric(name) for name in names], time.perf_counter()
    pairs: list[float] = []
    differ, replies = 0, dict[str, Reply]()
    for seed, server in turns(_PAIRS, (plain, guessing)):
        if pairs and not replies and time.perf_counter() - began_s > _CHAT_S:
            break
        role = "plain" if server is plain else "guessing"
        replies[role] = server.ask("", _TOKENS, ignore_eos=True, **make(seed))
        if len(replies) == 2:
            pairs.append(replies["guessing"].decode_per_s / replies["plain"].decode_per_s)
            differ += replies["guessing"].text != replies["plain"].text
            replies.clear()
    proposed, accepted = (
        int(guessing.metric(name) - old) for name, old in zip(names, before, strict=True)
    )
    rounded = [round(ratio, 2) for ratio in pairs]
    return pairs, {
        "pairs": rounded, "proposed": proposed, "accepted": accepted, "differ": differ,
    }  # fmt: skip


def main() -> None:
    """Measure SmolLM2 and two synthetic models."""
    ratios: dict[str, float] = {}
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = real_model(scratch)
        ngram, mtp = {"ngram_tokens": 8}, {"mtp_tokens": 3}
        hybrid, window, period = ("--arch", "qwen3_5"), ("--arch", "llama"), ("--period", "12")
        for path, guesses, chats in (
            (model, ngram, {"copy": copying, "new": inventing}),
            (mtp_model(scratch / "mtp"), mtp, {"mtp_any": inventing}),
            (mtp_model(scratch / "wrong", "--wrong"), mtp, {"mtp_wrong": inventing}),
            (mtp_model(scratch / "h1", *hybrid), mtp, {"mtp_hybrid": inventing}),
            (mtp_model(scratch / "h2", *hybrid, "--wrong"), mtp, {"mtp_hybrid_wrong": inventing}),
            (mtp_model(scratch / "h3", *hybrid), ngram, {"hybrid_new": inventing}),
            (mtp_model(scratch / "h4", *hybrid, *period), ngram, {"hybrid_repeat": repeating}),
            (mtp_model(scratch / "w1", *window), ngram, {"window_new": inventing}),
            (mtp_model(scratch / "w2", *window, *period), ngram, {"window_repeat": repeating}),
        ):
            both = (
                start_ours(path, {"concurrency": 2}),
                start_ours(path, {"concurrency": 2, **guesses}),
            )
            with serving(*both) as (plain, guessing):
                for server in both:  # what is compiled and loaded at first use
                    server.ask("", _TOKENS, ignore_eos=True, **inventing(99))
                for name, make in chats.items():
                    pairs, figures[name] = compare(plain, guessing, make)
                    ratios[f"{name}_tokens_per_s"] = round(statistics.median(pairs), 2)
                    print(f"{name}: {statistics.median(pairs):.2f} {figures[name]}", flush=True)
    finish("speculation", ratios, {"tokens": _TOKENS, **figures})


if __name__ == "__main__":
    main()
