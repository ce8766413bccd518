"""Tokenizers that are made here, as the codec that an engine has."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.text.codec import TextCodec
from tests.support.mlx_models import module

TEXT = 'Größe 漢字 🦜 <think> a  b\n\tcafé "x" é'


def byte_level() -> Any:
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 2, trainer)
    return tokenizer


def load(folder: Path, tokenizer: Any, **config: Any) -> TextCodec:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    given = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    return TextCodec(module("mlx_lm.tokenizer_utils").load(folder))
