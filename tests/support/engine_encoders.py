"""Encoders for tests: tiny models of each family, with weights from a formula, as transformers saves them."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, Metaspace
from tokenizers.processors import TemplateProcessing

from tests.support.engine_embedders import write_json

WORDS = (
    "the", "a", "cat", "dog", "mac", "model", "sits", "runs", "on", "in", "mat", "fleet", "fast", "small", "large",
    "of", "and", "token", "text", "vector",
)  # fmt: skip
TEXTS = (
    "the cat sits on the mat",
    "a small mac runs a large model",
    "fleet",
    "the dog and the cat " * 9,
    "text of token and vector " * 5,
)
PAIRS = (("the cat", "a dog sits"), ("fast fleet of mac", "the model runs " * 8), ("a", "a"))

WIDTH, FFN, HEADS, LAYERS, POSITIONS = 32, 48, 4, 3, 96
_SHARED = {
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {
        **_SHARED,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "pad_token_id": 0,
    },
    "xlm-roberta": {
        **_SHARED,
        "max_position_embeddings": POSITIONS + 2,
        "type_vocab_size": 1,
        "pad_token_id": 1,
        "layer_norm_eps": 1e-5,
    },
    "modernbert": {
        **_SHARED,
        "max_position_embeddings": POSITIONS,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "pad_token_id": 0,
        "classifier_pooling": "mean",
    },
    # The names of its own config.json, beside those that transformers reads.
    "nomic_bert": {
        **_SHARED,
        "max_position_embeddings": POSITIONS,
        "hidden_act": "silu",
        "n_embd": WIDTH,
        "n_inner": FFN,
        "n_head": HEADS,
        "n_layer": LAYERS,
        "n_positions": 4 * POSITIONS,
        "max_trained_positions": POSITIONS,
        "activation_function": "swiglu",
        "type_vocab_size": 2,
        "layer_norm_epsilon": 1e-12,
    },
}
_CLASSES = {
    "bert": "Bert", "xlm-roberta": "XLMRoberta", "modernbert": "ModernBert", "nomic_bert": "NomicBert",
}  # fmt: skip


def make_encoder(
    folder: Path, family: str, *, is_classifier: bool = False, mode: str = "mean"
) -> Path:
    """Write a tiny encoder, or a cross-encoder, with its tokenizer."""
    folder.mkdir(parents=True)
    vocab_size = _write_tokenizer(folder, family)
    kind = "ForSequenceClassification" if is_classifier else "Model"
    config = {
        "model_type": family,
        "architectures": [_CLASSES[family] + kind],
        "vocab_size": vocab_size,
        **CONFIGS[family],
    }
    if is_classifier:
        config["id2label"] = {"0": "LABEL_0"}
        config["label2id"] = {"LABEL_0": 0}
    else:
        kinds = ["Transformer", "Pooling", "Normalize"]
        listing = [
            {
                "idx": at,
                "path": f"{at}_{name}" if at else "",
                "type": f"sentence_transformers.models.{name}",
            }
            for at, name in enumerate(kinds)
        ]
        write_json(folder, "modules.json", listing)
        write_json(
            folder,
            "1_Pooling/config.json",
            {"pooling_mode": mode, "word_embedding_dimension": WIDTH},
        )
    write_json(folder, "config.json", config)
    shapes = {"bert": _bert, "xlm-roberta": _bert, "modernbert": _modern, "nomic_bert": _nomic}
    tensors = {
        name: _weight(at, name, shape)
        for at, (name, shape) in enumerate(
            shapes[family](config, is_classifier=is_classifier).items()
        )
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weight(at: int, name: str, shape: tuple[int, ...]) -> Any:
    """Return numbers that every machine and every version of numpy makes alike."""
    numbers = np.sin(np.arange(np.prod(shape), dtype=np.float64) * (0.7 + 0.013 * at) + at)
    is_norm = len(shape) == 1 and name.endswith("weight")
    scale = 0.1 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1])
    return (is_norm + scale * numbers).reshape(shape).astype(np.float32)


def _both(name: str, out: int, width: int | None = None) -> dict[str, tuple[int, ...]]:
    weight = (out,) if width is None else (out, width)
    return {f"{name}.weight": weight, f"{name}.bias": (out,)}


def _bert(config: dict[str, Any], *, is_classifier: bool) -> dict[str, tuple[int, ...]]:
    is_roberta = config["model_type"] == "xlm-roberta"
    prefix = ("roberta." if is_roberta else "bert.") if is_classifier else ""
    shapes = {
        f"{prefix}embeddings.word_embeddings.weight": (config["vocab_size"], WIDTH),
        f"{prefix}embeddings.position_embeddings.weight": (
            config["max_position_embeddings"],
            WIDTH,
        ),
        f"{prefix}embeddings.token_type_embeddings.weight": (config["type_vocab_size"], WIDTH),
        **_both(f"{prefix}embeddings.LayerNorm", WIDTH),
    }
    for layer in range(LAYERS):
        name = f"{prefix}encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            shapes |= _both(f"{name}.attention.self.{part}", WIDTH, WIDTH)
        shapes |= _both(f"{name}.attention.output.dense", WIDTH, WIDTH)
        shapes |= _both(f"{name}.attention.output.LayerNorm", WIDTH)
        shapes |= _both(f"{name}.intermediate.dense", FFN, WIDTH)
        shapes |= _both(f"{name}.output.dense", WIDTH, FFN)
        shapes |= _both(f"{name}.output.LayerNorm", WIDTH)
    if is_roberta and is_classifier:
        return (
            shapes
            | _both("classifier.dense", WIDTH, WIDTH)
            | _both("classifier.out_proj", 1, WIDTH)
        )
    shapes |= _both(f"{prefix}pooler.dense", WIDTH, WIDTH)
    return shapes | (_both("classifier", 1, WIDTH) if is_classifier else {})


def _modern(config: dict[str, Any], *, is_classifier: bool) -> dict[str, tuple[int, ...]]:
    prefix = "model." if is_classifier else ""
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}embeddings.tok_embeddings.weight": (config["vocab_size"], WIDTH),
        f"{prefix}embeddings.norm.weight": (WIDTH,),
    }
    for layer in range(LAYERS):
        name = f"{prefix}layers.{layer}"
        if layer:
            shapes[f"{name}.attn_norm.weight"] = (WIDTH,)
        shapes[f"{name}.attn.Wqkv.weight"] = (3 * WIDTH, WIDTH)
        shapes[f"{name}.attn.Wo.weight"] = (WIDTH, WIDTH)
        shapes[f"{name}.mlp_norm.weight"] = (WIDTH,)
        shapes[f"{name}.mlp.Wi.weight"] = (2 * FFN, WIDTH)
        shapes[f"{name}.mlp.Wo.weight"] = (WIDTH, FFN)
    shapes[f"{prefix}final_norm.weight"] = (WIDTH,)
    if is_classifier:
        shapes["head.dense.weight"] = (WIDTH, WIDTH)
        shapes["head.norm.weight"] = (WIDTH,)
        shapes |= _both("classifier", 1, WIDTH)
    return shapes


def _nomic(config: dict[str, Any], *, is_classifier: bool) -> dict[str, tuple[int, ...]]:
    assert not is_classifier
    shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], WIDTH),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], WIDTH),
        **_both("emb_ln", WIDTH),
    }
    for layer in range(LAYERS):
        name = f"encoder.layers.{layer}"
        shapes[f"{name}.attn.Wqkv.weight"] = (3 * WIDTH, WIDTH)
        shapes[f"{name}.attn.out_proj.weight"] = (WIDTH, WIDTH)
        shapes |= _both(f"{name}.norm1", WIDTH) | _both(f"{name}.norm2", WIDTH)
        shapes[f"{name}.mlp.fc11.weight"] = shapes[f"{name}.mlp.fc12.weight"] = (FFN, WIDTH)
        shapes[f"{name}.mlp.fc2.weight"] = (WIDTH, FFN)
    return shapes


def _write_tokenizer(folder: Path, family: str) -> int:
    if family == "xlm-roberta":
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
        pieces = [*special, *letters, *(f"\u2581{word}" for word in WORDS)]
        ranked = [(piece, 0.0 if at < 4 else -1.0 - at / 10) for at, piece in enumerate(pieces)]
        tokenizer = Tokenizer(Unigram(ranked, unk_id=3, byte_fallback=False))
        tokenizer.pre_tokenizer = Metaspace()
        begin, end, pair = "<s>", "</s>", "<s> $A </s> </s> $B </s>"
        names = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>",
                 "pad_token": "<pad>", "unk_token": "<unk>"}  # fmt: skip
    else:
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
        letters = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{x}" for x in "abcdefghijklmnopqrstuvwxyz")]
        pieces = list(dict.fromkeys([*special, *letters, *WORDS]))
        tokenizer = Tokenizer(
            WordPiece({piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]")
        )
        tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
        begin, end, pair = "[CLS]", "[SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
        names = {
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
        }
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=pair,
        special_tokens=[(token, pieces.index(token)) for token in (begin, end)],
    )
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    # Of these, only BERT's gives the second text of a pair a type of its own.
    kind = "BertTokenizer" if family == "bert" else "PreTrainedTokenizerFast"
    settings = {
        "tokenizer_class": kind,
        "model_max_length": POSITIONS,
        **names,
    }
    write_json(folder, "tokenizer_config.json", settings)
    return len(pieces)
