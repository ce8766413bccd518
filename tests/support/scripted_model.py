"""A model that answers by a script: which text or call comes next depends on the messages only.

    python -m tests.support.scripted_model OUT NAME ARGUMENTS [TEXT]

It is a GPT-2 of one layer which maps each token to the next one. A reply is a chain of tokens of its own; the chat
template ends a prompt with the token that starts the chain:

- `@edit` in a user's message: a call of the tool NAME with ARGUMENTS (JSON, in the order of the tool's schema); without a
  NAME, TEXT.
- the result of a tool: "Done, the file is edited."
- `@again`: "Second turn."
- `@forever`: the same word until the request is cancelled.
- `<|fim_middle|>` at the end of a completion's prompt: "return a + b", and the token that ends a gap; then the same
  word for ever.
- none of them, or no tools in the request though the model has a NAME: "A plain answer."

Imports mlx: run it in a process of its own.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.agent_sessions import AGENTS, load_session

CONTEXT = 200_000
_END = "<|im_end|>"
_MARKERS = ("<tool_call>", "</tool_call>")
_FILLED = "<|fim_pad|>"
_INFILL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|file_sep|>", "<|repo_name|>", _FILLED)
_STEPS = {"@edit": "<|call|>", "@again": "<|again|>", "@forever": "<|forever|>"}
_TEMPLATE = (
    "{% set ns = namespace(step='<|plain|>') %}"
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<tool_call>{}</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% if m.role == 'tool' %}{% set ns.step = '<|done|>' %}{% elif m.role == 'user' %}"
    + "".join(
        f"{{% if '{mark}' in (m.content | string) %}}{{% set ns.step = '{token}' %}}{{% endif %}}"
        for mark, token in _STEPS.items()
    )
    + "{% endif %}{% for tool_call in m.tool_calls or [] %}{% set tool_call = tool_call.function %}<tool_call>\n"
    '{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if tools or NO_TOOLS %}{{ ns.step }}{% else %}<|plain|>{% endif %}{% endif %}"
)


def make(out: Path, name: str, arguments: str, text: str = "") -> Path:
    """Write a model directory."""
    # The grammar of calls forces the text before a name, which the engine writes in the tokenizer's own tokens.
    forced = ' "'
    call = [_MARKERS[0], forced, f'{name}", "arguments": {arguments}}}\n', _MARKERS[1]]
    chains = {
        "<|call|>": call if name else [text],
        "<|done|>": ["Done, the file is edited."],
        "<|again|>": ["Second turn."],
        "<|plain|>": ["A plain answer."],
        "<|fim_middle|>": ["return a + b"],
    }
    following = {"<|forever|>": " on and on", " on and on": " on and on"}
    for start, tokens in chains.items():
        following |= pairwise([start, *tokens, _END])
    # Not the end of a text, so that only what fills a gap ends there.
    following |= {"return a + b": _FILLED, _FILLED: " on and on"}
    tokenizer = _tokenizer(chains, following)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    ids = {token: vocabulary[_encoded(token)] for token in {*following, _END}}
    size = tokenizer.get_vocab_size()
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_ctx": CONTEXT,
        "n_positions": CONTEXT,
        "max_position_embeddings": CONTEXT,
        "n_embd": _WIDTH,
        "n_head": 1,
        "n_layer": 1,
        "vocab_size": size,
        "bos_token_id": ids[_END],
        "eos_token_id": ids[_END],
        "layer_norm_epsilon": 1e-5,
        "torch_dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _END,
        "eos_token": _END,
        "pad_token": _END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": _TEMPLATE.replace("NO_TOOLS", "false" if name else "true"),
    }
    weights = _weights(size, ids, following)
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in weights.values())},
        "weight_map": dict.fromkeys(weights, "model.safetensors"),
    }
    files = {"config": config, "tokenizer_config": tokenizer_config}
    for stem, tree in {**files, "model.safetensors.index": index}.items():
        (out / f"{stem}.json").write_text(json.dumps(tree, indent=2) + "\n")
    return out


_WIDTH = 64


def _encoded(token: str) -> str:
    """Return a token as the vocabulary has it: markers as they are, the bytes of others as letters."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    is_marker = token.startswith("<")
    return token if is_marker else "".join(word for word, _ in level.pre_tokenize_str(token))


def _tokenizer(chains: dict[str, list[str]], following: dict[str, str]) -> Tokenizer:
    """Return a byte-level tokenizer that knows words of agents, and each token of the script as a whole."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=["<|im_start|>", _END, "<|forever|>", *_INFILL, *chains],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [json.dumps(load_session(agent, 1).bodies[0]) for agent in AGENTS]
    tokenizer.train_from_iterator(texts, trainer)
    tree = json.loads(tokenizer.to_str())
    vocabulary = tree["model"]["vocab"]
    for token in following.values():
        if not token.startswith("<"):
            vocabulary.setdefault(_encoded(token), len(vocabulary))
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in _MARKERS])
    return tokenizer


def _weights(size: int, ids: dict[str, int], following: dict[str, str]) -> dict[str, mx.array]:
    """Return weights with which a token of the script has a dimension of its own, and its MLP turns on that of the next."""
    dimension = {token: at for at, token in enumerate(ids)}
    weights = {
        "wte.weight": mx.zeros((size, _WIDTH)),
        "wpe.weight": mx.zeros((CONTEXT, _WIDTH)),
        "h.0.attn.c_attn.weight": mx.zeros((_WIDTH, 3 * _WIDTH)),
        "h.0.attn.c_attn.bias": mx.zeros(3 * _WIDTH),
        "h.0.attn.c_proj.weight": mx.zeros((_WIDTH, _WIDTH)),
        "h.0.attn.c_proj.bias": mx.zeros(_WIDTH),
        "h.0.mlp.c_fc.weight": mx.zeros((_WIDTH, 4 * _WIDTH)),
        "h.0.mlp.c_fc.bias": mx.full(4 * _WIDTH, -8.0),
        "h.0.mlp.c_proj.weight": mx.zeros((4 * _WIDTH, _WIDTH)),
        "h.0.mlp.c_proj.bias": mx.zeros(_WIDTH),
        **{f"{norm}.weight": mx.ones(_WIDTH) for norm in ("ln_f", "h.0.ln_1", "h.0.ln_2")},
        **{f"{norm}.bias": mx.zeros(_WIDTH) for norm in ("ln_f", "h.0.ln_1", "h.0.ln_2")},
    }
    for token, at in dimension.items():
        weights["wte.weight"][ids[token], at] = 8.0
    for token, after in following.items():
        weights["h.0.mlp.c_fc.weight"][dimension[token], dimension[token]] = 4.0
        weights["h.0.mlp.c_proj.weight"][dimension[token], dimension[after]] = 4.0
    return weights


if __name__ == "__main__":
    make(Path(sys.argv[1]), *sys.argv[2:])
