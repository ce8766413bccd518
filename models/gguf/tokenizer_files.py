"""The tokenizer in a GGUF file as tokenizer.json and tokenizer_config.json: byte-level BPE, and SentencePiece's BPE."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from models.gguf.file_reader import GgufFile, GgufRefusedError

# `llama_token_type` of llama.cpp.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_MAX_TOKENS: Final = 1 << 20
# Merges are looked for at each place of a token; the longest of published vocabularies has 256 characters.
_MAX_TOKEN_CHARACTERS: Final = 1024
# Tokens that end an answer, by their text, as in `llama-vocab.cpp`.
_ENDS: Final = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<end_of_turn>"}
)
_SPACE: Final = "▁"
_ADDED_TOKEN: Final = {"normalized": False, "single_word": False, "lstrip": False, "rstrip": False}


def _split(regex: str) -> dict[str, Any]:
    pattern = {"Regex": regex}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    fields = {"add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "ByteLevel", **fields}


_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASES: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreTokenizer:
    """The steps before BPE for one value of `tokenizer.ggml.pre`, as the tokenizer.json of these models has them."""

    steps: tuple[dict[str, Any], ...]
    normalizer: dict[str, Any] | None = None
    ignores_merges: bool = False
    """True if a word that is a token is not split."""
    adds_bos: bool = False


_LLAMA3: Final = _PreTokenizer(
    steps=(_split(_CONTRACTIONS + r"\p{N}{1,3}" + _REST), _byte_level(use_regex=False)),
    ignores_merges=True,
    adds_bos=True,
)
_QWEN2: Final = _PreTokenizer(
    steps=(_split(_CONTRACTIONS + r"\p{N}" + _REST), _byte_level(use_regex=False)),
    normalizer={"type": "NFC"},
)
_DIGITS: Final = {"type": "Digits", "individual_digits": True}
_PRE_TOKENIZERS: Final = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _PreTokenizer(steps=(_DIGITS, _byte_level(use_regex=True))),
    "tekken": _PreTokenizer(
        steps=(_split(_CASES), _byte_level(use_regex=False)), ignores_merges=True, adds_bos=True
    ),
    "gpt-2": _PreTokenizer(steps=(_byte_level(use_regex=True),)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The content of the files, and what config.json says of tokens."""

    tokenizer: Mapping[str, Any]
    config: Mapping[str, Any]
    token_ids: Mapping[str, Any]
    """`bos_token_id`, `eos_token_id` and `pad_token_id`, as far as there are such tokens."""
    size: int


def read_tokenizer(file: GgufFile) -> TokenizerFiles:
    """Return the tokenizer. Takes time in proportion to the vocabulary.

    Raises:
        GgufRefusedError: it is of another kind, or damaged.

    """
    tokens = file.values("tokenizer.ggml.tokens", str)
    vocab = {token: at for at, token in enumerate(tokens)}
    if not 0 < len(vocab) == len(tokens) <= _MAX_TOKENS:
        raise file.refused("tokenizer.ggml.tokens", f"1 to {_MAX_TOKENS} different tokens")
    if any(len(token) > _MAX_TOKEN_CHARACTERS for token in tokens):
        raise file.refused(
            "tokenizer.ggml.tokens", f"tokens of at most {_MAX_TOKEN_CHARACTERS} characters"
        )
    key = "tokenizer.ggml.token_type"
    kinds = file.values(key, int) if key in file.metadata else (1,) * len(tokens)
    if len(kinds) != len(tokens):
        raise file.refused(key, f"{len(tokens)} types, one for each token")
    kind = file.get("tokenizer.ggml.model", str)
    if kind == "gpt2":
        parts, adds_bos = _byte_bpe(file, vocab)
    elif kind == "llama":
        parts, adds_bos = _sentencepiece_bpe(file, tokens, vocab, kinds), True
    else:
        raise GgufRefusedError(
            f"{file.path}: its tokenizer is of the kind {kind[:40]!r}; gpt2 (byte-level BPE) and llama (SentencePiece) are "
            "read. Use the model that it was made of"
        )
    special = {
        name: file.integer(key, most=len(tokens) - 1)
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
        if (key := f"tokenizer.ggml.{name}_token_id") in file.metadata
    }
    is_control = [kind == _CONTROL for kind in kinds]
    ends = [special[name] for name in ("eos", "eot", "eom") if name in special]
    ends += [at for text in sorted(_ENDS) if (at := vocab.get(text)) is not None and is_control[at]]
    ends = list(dict.fromkeys(ends))
    ids: dict[str, Any] = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    ids |= {f"{to}_token_id": special[of] for to, of in _ID_NAMES.items() if of in special}
    adds_bos = file.get("tokenizer.ggml.add_bos_token", bool, adds_bos) and "bos" in special
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{to}_token": tokens[special[of]] for to, of in _TEXT_NAMES.items() if of in special},
    }
    if "tokenizer.chat_template" in file.metadata:
        config["chat_template"] = file.get("tokenizer.chat_template", str)
    added = [
        {"id": at, "content": token, "special": kind != _USER_DEFINED} | _ADDED_TOKEN
        for at, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED) or (kind == _UNKNOWN and "unk_token" in parts["model"])
    ]
    first = _prepend(tokens[special["bos"]], special["bos"]) if adds_bos else None
    tokenizer = {"version": "1.0", "added_tokens": added, "post_processor": first} | parts
    return TokenizerFiles(tokenizer=tokenizer, config=config, token_ids=ids, size=len(tokens))


_ID_NAMES: Final = {"bos": "bos", "pad": "padding"}
_TEXT_NAMES: Final = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def _prepend(token: str, at: int) -> dict[str, Any]:
    """Return the step that puts a token before a text."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, *texts],
        "special_tokens": {token: {"id": token, "ids": [at], "tokens": [token]}},
    }


def _byte_bpe(file: GgufFile, vocab: Mapping[str, int]) -> tuple[dict[str, Any], bool]:
    """Return the parts of tokenizer.json, and whether texts begin with the first token."""
    name = file.get("tokenizer.ggml.pre", str, "")
    if name not in _PRE_TOKENIZERS:
        raise GgufRefusedError(
            f"{file.path}: its key tokenizer.ggml.pre is {name[:40]!r}; {', '.join(_PRE_TOKENIZERS)} are known. Another one "
            "would give other tokens than the model was trained with: use the model that it was made of"
        )
    pre = _PRE_TOKENIZERS[name]
    merges = []
    for merge in file.values("tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise GgufRefusedError(
                f"{file.path}: its merge {merge[:80]!r} is not of two tokens that make a third one: it is damaged; "
                "download it again"
            )
        merges.append((left, right))
    return {
        "normalizer": pre.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre.steps},
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": merges,
            "ignore_merges": pre.ignores_merges,
        },
    }, pre.adds_bos


def _sentencepiece_bpe(
    file: GgufFile, tokens: Sequence[str], vocab: Mapping[str, int], kinds: Sequence[int]
) -> dict[str, Any]:
    """Return the parts of tokenizer.json, with merges in the order of the scores, as transformers converts them."""
    scores = file.values("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise file.refused("tokenizer.ggml.scores", f"{len(tokens)} scores, one for each token")
    merges: list[tuple[float, int, int, str, str]] = []
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == 1}
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind == 1:
            pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
            merges += [
                (-score, -len(left), -len(right), left, right)
                for left, right in pairs
                if left in normal and right in normal
            ]
    merges.sort()
    unknown = next(
        (token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None
    )
    has_prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    ]
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        steps.insert(0, {"type": "Prepend", "prepend": _SPACE})
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model: dict[str, Any] = {"type": "BPE", "vocab": vocab, "fuse_unk": True, "byte_fallback": True}
    model |= {"merges": [merge[3:] for merge in merges]}
    if unknown is not None:
        model["unk_token"] = unknown
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": model,
    }
