"""Each family of models in a real engine: alone, in a batch, in a second turn, from files after kill -9, with guesses and tools.

What was measured is a row of tests/golden/families.json, from which `make docs` writes the table of docs/models.md.
"""

import contextlib
import json
import random
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.cache.interface import BLOCK_TOKENS
from engine.text import template_traits
from engine.text.formats.answer import AnswerContext
from engine.text.formats.tools import ToolSet
from engine.text.reasoning import ThinkingState
from engine.text.spans import SpanRole
from models.catalogue.catalogue import shipped_catalogue
from schemas.kv_cache import KvCache
from tests.engine.text.renderers import RENDERERS
from tests.support.engine_process import START_S, Engine, Start, eventually
from tests.support.golden_cases import Golden
from tests.support.mlx_models import Late
from tests.support.model_families import save, save_draft
from tests.support.model_geometries import SERVED_FAMILIES

pytestmark = [pytest.mark.mlx, pytest.mark.ci, pytest.mark.timeout(300)]
mx: Any = Late("mlx.core")
mlx_lm: Any = Late("mlx_lm")
tokenizers: Any = Late("tokenizers")
cache: Any = Late("mlx_lm.models.cache")

PROMPT, TURN, ANSWER = 700, 40, 12
"""Tokens. A prompt is longer than each window of these configs, and than one piece of reading."""
LONG = 96
"""Tokens of an answer in which many random models repeat themselves."""
REASONING = {
    "gemma4": ("<|channel>thought", "<channel|>"),
    "harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
}
"""Marks that a format writes around its reasoning, if not those of `<think>`."""
MARKS = re.compile(r"<[|/]?[\w:\uff5c\u2581]+\|?>|\[[A-Z_]{3,}\]")


class Plain:
    """The same folder in plain mlx-lm."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer = mlx_lm.load(str(folder))
        self.tokens: list[int] = []
        """Those of the last answer."""

    def answer(self, prompt: list[int], count: int = ANSWER) -> Any:
        """Return about the log probabilities of a greedy answer without end tokens, the prompt read at once and alone."""
        caches = cache.make_prompt_cache(self.model)
        scores: list[float] = []
        ends = mx.array(sorted(self.tokenizer.eos_token_ids))
        self.tokens, piece = [], prompt
        for _ in range(count):
            logits = self.model(mx.array([piece]), cache=caches)[0, -1].astype(mx.float32)
            scored = logits - mx.logsumexp(logits)
            scored[ends] = -mx.inf
            piece = [int(mx.argmax(scored).item())]
            scores.append(float(scored[piece[0]].item()))
            self.tokens += piece
        return pytest.approx(scores, abs=2e-3)

    def guessable(self, tokens: list[int]) -> list[int]:
        """Return a prompt whose end is in it before, followed by what a random model most likely answers."""

        def prompt(reply: list[int]) -> list[int]:
            return [*tokens[:100], *reply, *tokens[100:], *tokens[84:100]]

        self.answer(prompt(tokens[:8]), 8)
        return prompt(self.tokens)


def ask(engine: Engine, prompt: list[int], count: int = ANSWER) -> tuple[list[float], int]:
    """Return the log probabilities of a greedy answer, and the number of cached tokens of its prompt."""
    fields: dict[str, Any] = {
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
    }
    reply = engine.post("/v1/completions", prompt=prompt, **fields)
    assert reply.status == 200, reply.raw
    details = reply.json["usage"].get("prompt_tokens_details") or {}
    scores = reply.json["choices"][0]["logprobs"]["token_logprobs"]
    return scores, int(details.get("cached_tokens") or 0)


class Publication:
    """Format of most of the catalogue's models of a family, and whether any of them reasons."""

    def __init__(self, name: str) -> None:
        family = name.removesuffix("_text")
        models = [
            m for m in shipped_catalogue().models.values() if m.config["model_type"] == family
        ]
        formats = Counter(model.format for model in models if model.format)
        self.format = formats.most_common(1)[0][0] if formats else "plain"
        self.reasons = any(model.reasons for model in models)
        self.answer = RENDERERS[self.format][0]([("f", {"text": "x"})])
        start, end = REASONING.get(self.format, ("<think>", "</think>"))
        self.end = MARKS.findall(end)[0]
        if self.reasons:
            self.answer = f"{start}\nHm.\n{end}{self.answer}"

    def write(self, folder: Path) -> None:
        """Give the folder a template that writes calls in the format, and tokens for the format's marks."""
        text = self.answer
        if self.format == "llama":
            text += (
                '{"name": function name, "parameters": dictionary of argument name and its value}'
            )
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        marks = [tokenizers.AddedToken(mark, normalized=False) for mark in MARKS.findall(text)]
        tokenizer.add_tokens(marks)
        tokenizer.save(str(folder / "tokenizer.json"))
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        if self.format != "plain":
            config["chat_template"] += (
                f"{{% if false %}}{{% raw %}}{text}{{% endraw %}}{{% endif %}}"
            )
        path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", SERVED_FAMILIES)
def test_a_family_answers_as_plain_mlx_lm(
    start: Start, tmp_path: Path, golden: Golden, name: str
) -> None:
    folder, files = tmp_path / "model", tmp_path / "kv"
    published = Publication(name)
    save(folder, name, vocabulary=576)
    published.write(folder)
    fields = {"kv_cache": KvCache(disk_bytes="1Gi"), "prefix_disk_dir": files, "concurrency": 4}
    engine = start(folder, **fields)
    plain = Plain(folder)
    dice = random.Random(5)
    first, *others = (dice.choices(range(4, 260), k=PROMPT - 90 * n) for n in range(4))
    eventually(engine.is_ready, within_s=START_S)

    wanted = plain.answer(first)
    assert ask(engine, first)[0] == wanted, "alone"
    gate = threading.Barrier(len(others))

    def together(prompt: list[int]) -> list[float]:
        gate.wait(START_S)
        return ask(engine, prompt)[0]

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(together, others))
    assert answers == [plain.answer(prompt) for prompt in others], "in a batch"

    turn = [*first, *dice.choices(range(4, 260), k=TURN)]
    wanted = plain.answer(turn)
    scores, cached = ask(engine, turn)
    assert cached >= PROMPT - 1, "second turn"
    assert scores == wanted, "second turn"

    wait_for_files(files)
    engine.process.send_signal(signal.SIGKILL)
    engine.process.wait(START_S)
    engine = start(folder, **fields, ngram_tokens=4)
    eventually(engine.is_ready, within_s=START_S)
    turn += [7, 8, 9]
    scores, cached = ask(engine, turn)
    assert cached >= len(turn) - 3 - BLOCK_TOKENS, "after kill -9"
    assert scores == plain.answer(turn), "from files"
    prompt = plain.guessable(first[:200])
    assert ask(engine, prompt, LONG)[0] == plain.answer(prompt, LONG), "with guesses"
    assert engine.metrics()["draft_tokens_total"] > 0

    system = {"role": "system", "content": "".join(map(chr, dice.choices(range(97, 123), k=400)))}
    shared = []
    for question in ("Why is that?", "How do I start?"):
        messages = [system, {"role": "user", "content": question}]
        reply = engine.post("/v1/chat/completions", messages=messages, max_tokens=2)
        assert reply.status == 200, reply.raw
        shared.append((reply.json["usage"].get("prompt_tokens_details") or {})["cached_tokens"])
    assert shared[0] < BLOCK_TOKENS <= 200 <= shared[1], "another chat with the same system message"

    cells = dict.fromkeys(("greedy", "batch", "turn", "disk", "guesses"), "yes")
    cells |= read_answer(plain.tokenizer, published)
    call_ping(engine, plain.tokenizer.get_vocab()[published.end])
    golden.check_row("families.json", name.removesuffix("_text"), cells)


def read_answer(tokenizer: Any, published: Publication) -> dict[str, str]:
    """Return the format of calls and the mark of reasoning that the engine finds, after an answer with both came back."""
    traits = template_traits.read_traits(tokenizer)
    form, marks = traits.answer_format, traits.thinking if published.reasons else None
    context = AnswerContext(thinking=marks, state=ThinkingState.FREE, tools=ToolSet((tool("f"),)))
    parser = form.new_parser(context)
    spans = [*parser.feed(published.answer), *parser.flush(is_cut=False)]
    calls = [call for span in spans for call in span.calls]
    assert [call.name for call in calls if call.name] == ["f"]
    assert json.loads("".join(call.arguments for call in calls)) == {"text": "x"}
    texts = {role: "".join(span.text for span in spans if span.role is role) for role in SpanRole}
    assert texts[SpanRole.CONTENT].strip() == ""
    assert texts[SpanRole.REASONING].strip() == ("Hm." if published.reasons else "")
    return {"tools": form.name, "reasoning": "" if marks is None else marks.start}


def tool(name: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    if name == "f":
        parameters["properties"] = {"text": {"type": "string"}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call_ping(engine: Engine, end_of_reasoning: int) -> None:
    """Demand a call without arguments, and ask once more with the call and its result."""
    fields: dict[str, Any] = {
        "tools": [tool("ping")],
        "tool_choice": {"type": "function", "function": {"name": "ping"}},
        "parallel_tool_calls": False,
        "max_tokens": 64,
        "logit_bias": {str(end_of_reasoning): 100},  # a random model reasons for ever
    }
    reply = engine.chat(**fields)
    assert reply.status == 200, reply.raw
    message = reply.json["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("ping", {})
    result = {"role": "tool", "tool_call_id": call["id"], "content": "pong"}
    messages = [{"role": "user", "content": "hello"}, message, result]
    assert engine.chat(**fields, messages=messages).status == 200


@pytest.mark.parametrize(
    "name", ["qwen3_next", "qwen3_5", "kimi_linear", "nemotron_h", "mamba2", "lfm2", "gemma3_text", "gpt_oss"]
)  # fmt: skip
def test_guesses_of_a_draft_change_no_answer(start: Start, tmp_path: Path, name: str) -> None:
    folder, draft = tmp_path / "model", tmp_path / "draft"
    save(folder, name, tie_word_embeddings=False)
    save_draft(draft, folder)
    engine = start(folder, draft_model=draft, draft_tokens=3, concurrency=4)
    plain = Plain(folder)
    dice = random.Random(5)
    first, *others = (dice.choices(range(4, 260), k=PROMPT - 90 * n) for n in range(4))
    eventually(engine.is_ready, within_s=START_S)
    wanted = plain.answer(first)
    turn = [*first, *plain.tokens, *dice.choices(range(4, 260), k=TURN)]
    assert ask(engine, first)[0] == wanted, "alone"
    assert engine.metrics()["draft_accepted_tokens_total"] > 0

    gate = threading.Barrier(len(others))

    def together(prompt: list[int]) -> list[float]:
        gate.wait(START_S)
        return ask(engine, prompt)[0]

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(together, others))
    assert answers == [plain.answer(prompt) for prompt in others], "in a batch"

    body = {"model": "tiny", "prompt": others[0], "max_tokens": 900, "ignore_eos": True}
    with contextlib.closing(engine.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
        lines = connection.getresponse()
        for _ in range(40):
            lines.readline()
    eventually(lambda: engine.busy() == (0, 0), what="the cancelled request")

    scores, cached = ask(engine, turn)
    assert cached >= PROMPT + ANSWER - 1, "second turn"
    assert scores == plain.answer(turn), "second turn"
    guessed = engine.metrics()
    assert guessed["draft_accepted_tokens_total"] < guessed["draft_tokens_total"]


def wait_for_files(folder: Path) -> None:
    """Wait until files came, and no other came for half a second."""
    counts = [0]

    def is_quiet() -> bool:
        time.sleep(0.5)
        counts.append(len(list(folder.glob("*.kv"))))
        return counts[-1] == counts[-2] > 0

    eventually(is_quiet, what="the prompt on disk")
