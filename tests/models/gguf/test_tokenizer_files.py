"""Tokenizers of GGUF files: SentencePiece against its algorithm, and the steps before byte-level BPE."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from models.gguf.file_reader import GgufFile, GgufRefusedError, Value
from models.gguf.tokenizer_files import read_tokenizer

# The order of the scores is that of the list, as SentencePiece trains BPE.
PIECES = [
    "▁t",
    "he",
    "▁the",
    "in",
    "▁a",
    "▁an",
    "er",
    "th",
    "re",
    "▁there",
    "aa",
    "aaa",
    "▁▁",
    "n▁",
]
LETTERS = [*"▁thenira", "é"]
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *LETTERS]
KINDS = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) + len(LETTERS))]
SCORES = [*[0.0] * 259, *(-float(at) for at in range(len(PIECES) + len(LETTERS)))]
SPM: dict[str, Value] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": tuple(TOKENS),
    "tokenizer.ggml.token_type": tuple(KINDS),
    "tokenizer.ggml.scores": tuple(SCORES),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def tokenizer(metadata: dict[str, Value]) -> Any:
    found = read_tokenizer(GgufFile(path=Path("a.gguf"), metadata=metadata, tensors={}))
    return Tokenizer.from_str(json.dumps(found.tokenizer))


def sentencepiece_ids(text: str) -> list[int]:
    """Return the ids by SentencePiece's rule: the neighbours with the best score are joined, the first ones of equals."""
    symbols = list("▁" + text.replace(" ", "▁"))
    scores = dict(zip(PIECES, SCORES[259:], strict=False))
    while True:
        pairs = [left + right for left, right in itertools.pairwise(symbols)]
        known = [(-scores[pair], at) for at, pair in enumerate(pairs) if pair in scores]
        if not known:
            break
        at = min(known)[1]
        symbols[at : at + 2] = [pairs[at]]
    ids = []
    for symbol in symbols:
        is_known = symbol in TOKENS
        ids += [TOKENS.index(symbol)] if is_known else [3 + byte for byte in symbol.encode()]
    return ids


@given(st.text(st.sampled_from([*"thenira é", "日", "🎉", "z", "\n"]), min_size=1, max_size=40))
def test_sentencepiece_gives_the_ids_of_its_algorithm_and_the_text_again(text: str) -> None:
    tokens = tokenizer(SPM)
    ids = tokens.encode(text).ids
    assert ids == [1, *sentencepiece_ids(text)]
    assert tokens.decode(ids) == text


def test_a_model_without_space_in_front_and_without_first_token_gets_none() -> None:
    flags = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokens = tokenizer(SPM | flags)
    assert tokens.encode("then</s>").tokens == ["t", "he", "n", "</s>"]


def byte_bpe(pre: str, **more: Value) -> dict[str, Value]:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789'.,!/ĠĊĉÃ©¦Ã"
    tokens = (*dict.fromkeys(letters), "<|begin_of_text|>", "<|eot_id|>", "<tool>")
    kinds = (*[1] * (len(tokens) - 3), 3, 3, 4)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": (),
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        **more,
    }


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        # What tiktoken splits by the pattern that the model's authors published.
        ("llama-bpe", ["I", "'LL", "Ġsay", "Ġ", "123", "45", "!!Ċ", "Ġ", "Ġx"]),
        ("qwen2", ["I", "'LL", "Ġsay", "Ġ", "1", "2", "3", "4", "5", "!!Ċ", "Ġ", "Ġx"]),
        ("tekken", ["I", "'LL", "Ġsay", "Ġ", "1", "2", "3", "4", "5", "!!Ċ", "Ġ", "Ġx"]),
        ("smollm", ["I", "'", "LL", "Ġsay", "Ġ", "1", "2", "3", "4", "5", "!!", "ĊĠ", "Ġx"]),
        ("gpt-2", ["I", "'", "LL", "Ġsay", "Ġ12345", "!!", "ĊĠ", "Ġx"]),
    ],
)
def test_a_text_is_split_as_the_models_of_this_name_split_it(pre: str, words: list[str]) -> None:
    pieces = tokenizer(byte_bpe(pre)).pre_tokenizer.pre_tokenize_str("I'LL say 12345!!\n  x")
    assert [piece for piece, _ in pieces] == words


def test_ends_of_answers_and_added_tokens_are_known() -> None:
    found = read_tokenizer(GgufFile(path=Path("a"), metadata=byte_bpe("llama-bpe"), tensors={}))
    first = found.token_ids["bos_token_id"]
    assert found.token_ids == {"bos_token_id": first, "eos_token_id": first + 1}
    tokens = tokenizer(byte_bpe("llama-bpe"))
    ids = tokens.encode("a<tool><|eot_id|>").ids
    assert ids == [first, 0, first + 2, first + 1]
    assert tokens.decode(ids) == "a<tool>"


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (byte_bpe("qwen2", **{"tokenizer.ggml.merges": ("a b",)}), "its merge 'a b' is not of two"),
        (SPM | {"tokenizer.ggml.scores": (1.0,)}, "scores, one for each token"),
        (SPM | {"tokenizer.ggml.token_type": (1,)}, "types, one for each token"),
        (SPM | {"tokenizer.ggml.tokens": ("a", "a")}, "different tokens"),
        (SPM | {"tokenizer.ggml.tokens": ("a" * 2000,)}, "tokens of at most 1024 characters"),
        (SPM | {"tokenizer.ggml.tokens": (1, 2)}, "expected a list with a text in each place"),
        (SPM | {"tokenizer.chat_template": 5}, "tokenizer.chat_template is '5'; expected a text"),
    ],
)
def test_a_damaged_tokenizer_is_refused(metadata: dict[str, Value], words: str) -> None:
    with pytest.raises(GgufRefusedError) as info:
        tokenizer(metadata)
    assert words in str(info.value)
