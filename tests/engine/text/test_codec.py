"""Traits of a tokenizer and its template, and the bytes of single tokens. Tokenizers are created here."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from engine.errors import RefusedError, TextTooLongError
from tests.support.text_codecs import TEXT, byte_level, load

pytestmark = pytest.mark.mlx


def sentencepiece() -> Any:
    pieces = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a"]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    tokenizer: Any = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("\u2581", "a")], byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_pieces_are_exact_bytes_even_of_half_characters(tmp_path: Path, make: Any) -> None:
    codec = load(tmp_path, make())
    tokens = codec.encode_text(TEXT)
    assert b"".join(codec.piece(token) for token in tokens) == TEXT.encode()
    assert len(tokens) > len(TEXT.split())
    assert codec.piece(codec.eos_ids[0]) == b"</s>"
    assert codec.piece(10_000) == b""  # logits are longer than vocabularies


def test_a_special_token_is_spelled_as_itself(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<é>", special=False), AddedToken("    ", special=False)])
    codec = load(tmp_path, tokenizer)
    (token,) = codec.encode_text("<é>")
    assert codec.piece(token) == "<é>".encode()
    assert codec.traits.specials["<é>"] == token
    assert "    " not in codec.traits.specials


HERMES_TEMPLATE = "{% if tools %}<tool_call>{{ tools }}{{ tool_call.name }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "plain"),
        ("{{ messages }}", "plain"),
        ("{{ messages }}<tool_call>{{ tool_call.name }}", "plain"),
        ("{{ tools }}<unknown_call>", "plain"),
        ('{{ tools }}<tool_call>{"name": {{ tool_call.name }}', "hermes"),
        ("{{ tools }}<longcat_tool_call>", "longcat"),
        ("{{ tools }}<tool_call>\n<function={{ name }}", "qwen_coder"),
        ("{{ tools }}<seed:tool_call>\n<function={{ name }}", "seed"),
        ("{{ tools }}<tool_call>{{ name }}<arg_key>", "glm"),
        # Laguna's.
        ("{{ tools }}<tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value>", "glm"),
        ("{{ tools }}<minimax:tool_call>", "minimax"),
        ("""{{ tools }}'<function name="' ~ name ~ '">'<param name="' ~ key""", "minicpm"),
        ("{{ tools }}<atem:function_calls>", "muse"),
        ("", "kimi_k3"),
        ("{{ tools }}<|tool_calls_section_begin|>", "kimi"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek"),
        ("{{ tools }}<｜tool▁calls▁begin｜>```json", "deepseek_v3"),
        ("{{ tools }}<｜DSML｜function_calls>", "deepseek_v32"),
        ("{{ tools }}[TOOL_CALLS] [{{ name }}", "mistral"),
        ("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]", "mistral_v11"),
        ("{{ tools }}[TOOL_CALLS]{{ name }}[CALL_ID]x[ARGS]", "mistral_call_id"),
        ('{{ tools }}"parameters": dictionary of argument name', "llama"),
        ("{{ tools }}<|python_start|>", "llama_pythonic"),
        ("{{ tools }}<|tool_call_start|>", "lfm2"),
        ("{{ tools }}<|tool_call>call:x<tool_call|>", "gemma4"),
        ("{{ tools }}<start_function_call>", "function_gemma"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
    ],
)
def test_the_template_and_the_vocabulary_show_the_format(
    tmp_path: Path, template: str | None, name: str
) -> None:
    more: dict[str, Any] = {} if template is None else {"chat_template": template}
    tokenizer = byte_level()
    marks = {
        "harmony": ("<|start|>", "<|channel|>", "<|message|>"),
        "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    }.get(name, ())
    if marks:
        tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    traits = load(tmp_path, tokenizer, **more).traits
    assert traits.answer_format.name == name
    assert traits.answer_format.is_native is (name != "plain")
    assert pickle.loads(pickle.dumps(traits)) == traits


def test_thinking_markers_are_found_in_the_vocabulary(tmp_path: Path) -> None:
    assert load(tmp_path, byte_level()).traits.thinking is None
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    traits = load(tmp_path, tokenizer, chat_template="{{ enable_thinking }}").traits
    assert traits.thinking is not None
    assert (traits.thinking.start, traits.thinking.end) == ("<think>", "</think>")
    assert traits.mentions("enable_thinking")
    assert not traits.mentions("reasoning_effort")


def normalized() -> Any:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, sentencepiece, normalized])
def test_only_a_text_that_is_too_long_for_certain_is_refused_unread(
    tmp_path: Path, make: Any
) -> None:
    tokenizer = make()
    tokenizer.add_tokens([AddedToken("x" * 30, special=False)])
    codec = load(tmp_path, tokenizer, chat_template="{{ messages[0].content }}")
    longest = 30 * (3 if make is normalized else 1)
    for text in (TEXT * 40, "x" * 900, "\u1112\u1161\u11ab" * 200, " " * 500, "é" * 300):
        tokens = codec.encode_text(text)
        chat = codec.encode_chat([{"role": "user", "content": text}])
        assert codec.encode_text(text, max_tokens=len(tokens)) == tokens
        assert codec.encode_chat([{"content": text}], max_tokens=len(chat)) == chat
        most = len(text.encode()) // longest - 1
        with pytest.raises(TextTooLongError):
            codec.encode_text(text, max_tokens=most)
        with pytest.raises(TextTooLongError):
            codec.encode_chat([{"content": text}], max_tokens=most)


def test_a_tokenizer_that_drops_text_accepts_any_length(tmp_path: Path) -> None:
    tokenizer: Any = Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    codec = load(tmp_path, tokenizer)
    assert codec.encode_text("a" + " " * 10_000, max_tokens=2)


def test_a_text_on_which_the_tokenizer_panics_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level()
    split: Any = vars(pre_tokenizers)["Split"]
    regex: Any = Regex
    backtracking = split(regex("(a+)+$"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([backtracking, tokenizer.pre_tokenizer])
    codec = load(tmp_path / "m", tokenizer, chat_template="{{ messages[0].content }}")
    text = "a" * 40 + "!"
    for messages in ([], [{"role": "user", "content": text}]):
        with pytest.raises(RefusedError) as caught:
            _ = codec.encode_chat(messages) if messages else codec.encode_text(text)
        assert (caught.value.refusal.status, caught.value.refusal.code) == (400, "unreadable_text")
        assert "tokenizer cannot read this text" in caught.value.refusal.message
    assert codec.encode_text("a")
