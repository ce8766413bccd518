"""Conversion of GGUF files that llama.cpp's own package wrote: the result is the folder that they were written from."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from tokenizers import Tokenizer

from models.gguf import architectures, conversion, file_reader
from models.gguf.dequantization import unpack_numbers
from models.gguf.file_reader import PACKINGS, GgufRefusedError
from tests.support.gguf_files import read_weights, write_gguf
from tests.support.mlx_models import GEMMA, build, module

TEXTS = (
    "We hold these truths",
    "日本語 émigré 🎉 don't\n\n  x  12345\t",
    "<|im_start|>user\nhi<|im_end|>",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("gguf"), arch="llama")


def tiny(folder: Path, **changes: Any) -> Path:
    """Return a folder with heads of keys that several queries share, and the GGUF file beside it."""
    made: Path = module("tests.support.tiny_model").make(folder / "source", kv_heads=2, **changes)
    write_gguf(folder / "tiny.gguf", made)
    return made


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def tokenizer_of(folder: Path) -> Any:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def converted(path: Path) -> Path:
    out = path.with_suffix(".out")
    conversion.convert(path, out)
    return out


@pytest.mark.mlx
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_weights_config_and_tokenizer_are_those_of_the_original(tmp_path: Path, arch: str) -> None:
    source = tiny(tmp_path, arch=arch)
    out = converted(tmp_path / "tiny.gguf")
    before, after = read_weights(source), read_weights(out)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    config, original = read_json(out / "config.json"), read_json(source / "config.json")
    assert config.pop("eos_token_id") == [original.pop("eos_token_id"), 0]  # <|endoftext|>
    assert config.pop("pad_token_id") == 0
    assert config == {key: value for key, value in original.items() if key in config}
    assert original.keys() - config.keys() == {"architectures", "torch_dtype"}
    for text in TEXTS:
        ids = tokenizer_of(source).encode(text).ids
        assert tokenizer_of(out).encode(text).ids == ids
        assert tokenizer_of(out).decode(ids) == tokenizer_of(source).decode(ids)
    settings, expected = (read_json(f / "tokenizer_config.json") for f in (out, source))
    assert settings == expected
    assert (
        conversion.result_bytes(tmp_path / "tiny.gguf")
        >= sum(path.stat().st_size for path in out.iterdir()) * 0.9
    )


@pytest.mark.parametrize(
    ("packing", "dtype"),
    [("F16", "<f2"), ("BF16", "BF16"), ("Q8_0", "<f2"), ("Q4_0", "<f2"), ("Q4_1", "<f2")],
)
def test_packed_weights_are_what_llama_cpp_computes(
    source: Path, tmp_path: Path, packing: str, dtype: str
) -> None:
    out = converted(write_gguf(tmp_path / "tiny.gguf", source, packing))
    raw = (out / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    kind = GGMLQuantizationType[packing]
    for name, array in read_weights(source).items():
        expected = array
        if array.ndim == 2:
            expected = quants.dequantize(quants.quantize(array, kind), kind)
        first, end = (start + at for at in header[name]["data_offsets"])
        if dtype == "BF16":
            bits = np.frombuffer(raw[first:end], "<u2").astype(np.uint32) << 16
            assert np.array_equal(bits.view(np.float32), expected.reshape(-1))
        else:
            values = np.frombuffer(raw[first:end], dtype)
            assert np.array_equal(values, expected.astype(np.float16).reshape(-1))


@pytest.mark.parametrize("kind", sorted(PACKINGS))
def test_blocks_of_any_bytes_are_read_as_the_reference_reads_them(kind: int) -> None:
    packing = PACKINGS[kind]
    raw = np.random.default_rng(kind).integers(0, 256, (64, packing.bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        expected = quants.dequantize(raw, GGMLQuantizationType(kind)).reshape(-1)
    numbers = unpack_numbers(raw.tobytes(), packing.name, packing.bytes)
    assert np.array_equal(numbers, expected, equal_nan=True)


@pytest.mark.mlx
def test_gemma_3_computes_what_the_original_computes(source: Path, tmp_path: Path) -> None:
    mx, utils = module("mlx.core"), module("mlx.utils")
    original = build(
        {**GEMMA, "vocab_size": 512, "sliding_window_pattern": 6, "num_hidden_layers": 6}
    )
    mx.random.seed(1)
    drawn = [
        (name, array + mx.random.normal(array.shape) * 0.1)
        for name, array in utils.tree_flatten(original.parameters())
    ]
    original.load_weights(drawn)
    folder = tmp_path / "gemma"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    config = {**GEMMA, "num_hidden_layers": 6, "query_pre_attn_scalar": 32}
    original.args.query_pre_attn_scalar = 32
    for layer in original.layers:
        layer.self_attn.scale = 32**-0.5
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: np.array(array) for name, array in drawn}
    tied = {name: array for name, array in arrays.items() if name != "lm_head.weight"}
    out = converted(write_gguf(tmp_path / "gemma.gguf", folder, arrays=tied))
    model, _ = module("mlx_lm.utils").load_model(out)
    tokens = mx.array([list(range(3, 90))])
    original.tie_word_embeddings = True
    difference = mx.abs(model(tokens) - original(tokens)).max().item()
    assert difference < 1e-3


def test_the_scaling_of_llama_3_is_recognized_by_its_factors(source: Path, tmp_path: Path) -> None:
    config = read_json(source / "config.json") | {"rope_theta": 500_000.0}
    for number, name in enumerate(("config.json", "tokenizer.json", "tokenizer_config.json")):
        content = read_json(source / name)
        (tmp_path / name).write_text(json.dumps(config if number == 0 else content))
    utils = module("mlx_lm.models.rope_utils")
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    head = config["head_dim"]
    rope = utils.Llama3RoPE(dims=head, base=500_000.0, scaling_config=scaling)
    factors = np.array(rope._freqs) / 500_000.0 ** (np.arange(0, head, 2) / head)
    arrays = {**read_weights(source), "rope_freqs.weight": factors.astype(np.float32)}
    out = converted(write_gguf(tmp_path / "tiny.gguf", tmp_path, arrays=arrays))
    assert read_json(out / "config.json")["rope_scaling"] == scaling
    arrays["rope_freqs.weight"] = np.linspace(1, 32, head // 2, dtype=np.float32)
    with pytest.raises(GgufRefusedError, match="other factors than those of Llama 3"):
        converted(write_gguf(tmp_path / "other.gguf", tmp_path, arrays=arrays))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (
            {"general__architecture": "mamba"},
            "of GGUF files llama, qwen2, qwen3, gemma3 are read. Fetch",
        ),
        ({"llama__expert_count": 8}, "the mixture of experts of 'llama'"),
        ({"split__count": 2}, "llama-gguf-split --merge"),
        ({"llama__rope__scaling__type": "yarn"}, "scaled by 'yarn'"),
        ({"llama__block_count": 0}, "the num_hidden_layers of its model is 0"),
        ({"llama__block_count": 3}, "its tensor blk.2.attn_norm.weight is absent"),
        ({"llama__block_count": 1}, "has 9 tensors that a model of llama does not have"),
        ({"llama__embedding_length": 32}, "has the shape"),
        ({"llama__embedding_length": None}, "its key llama.embedding_length is not there"),
        ({"llama__attention__head_count_kv": 3}, "do not match"),
        ({"llama__rope__dimension_count": 8}, "8 with positions"),
        ({"tokenizer__ggml__model": "bert"}, "of the kind 'bert'"),
        ({"tokenizer__ggml__pre": "chameleon"}, "'chameleon'; llama-bpe, llama3, qwen2"),
        ({"tokenizer__ggml__eos_token_id": 99999}, "expected a whole number of 0 to"),
        ({"general__alignment": 24}, "expected a power of two"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_read_is_refused_with_what_to_do(
    source: Path, tmp_path: Path, metadata: dict[str, Any], words: str
) -> None:
    link: dict[str, Any] = {"general__base_model__0__repo_url": "https://huggingface.co/org/Base"}
    path = write_gguf(tmp_path / "bad.gguf", source, **link, **metadata)
    with pytest.raises(GgufRefusedError) as info:
        converted(path)
    assert words in str(info.value)
    assert str(path) in str(info.value)
    if "Fetch" in str(info.value):
        assert "`fleetctl models quantize org/Base`" in str(info.value)


def test_a_number_that_is_not_finite_is_refused(source: Path, tmp_path: Path) -> None:
    arrays = read_weights(source)
    arrays["model.norm.weight"] = np.full(64, np.nan, np.float32)
    with pytest.raises(
        GgufRefusedError, match=r"output_norm\.weight has numbers that are not finite"
    ):
        converted(write_gguf(tmp_path / "nan.gguf", source, arrays=arrays))


def test_each_beginning_of_a_file_is_refused(source: Path, tmp_path: Path) -> None:
    whole = (source.parent / "tiny.gguf").read_bytes()
    header = min(
        tensor.start
        for tensor in file_reader.read_header(source.parent / "tiny.gguf").tensors.values()
    )
    path = tmp_path / "cut.gguf"
    for size in [*range(0, header, 1 + header // 300), header, header + 1, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(GgufRefusedError):
            file_reader.read_header(path)


def test_changed_bytes_are_refused_or_give_a_model_never_another_error(
    source: Path, tmp_path: Path
) -> None:
    whole = (source.parent / "tiny.gguf").read_bytes()
    dice, path, refused = random.Random(44), tmp_path / "changed.gguf", 0
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(dice.randint(1, 3)):
            # Most of the header is the vocabulary: the beginning and the tensors' places are changed as often.
            at = dice.randrange(dice.choice((64, 1200, 20_000)))
            content[at] = dice.choice((0, 1, 127, 128, 255, dice.randrange(256)))
        path.write_bytes(content)
        try:
            file = file_reader.read_header(path)
            architectures.plan_model(file)
            module("models.gguf.tokenizer_files").read_tokenizer(file)
        except GgufRefusedError:
            refused += 1
    assert refused > 100


def gguf_bytes(*, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def tensor_row(name: str, shape: tuple[int, ...], start: int, kind: int = 0) -> bytes:
    head = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
    return head + struct.pack(f"<{len(shape)}QIQ", *shape, kind, start)


KEY = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\3\4", "is no GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian files of the versions 2 and 3"),
        (gguf_bytes(tensors=2**63), "9223372036854775808 tensors; at most"),
        (gguf_bytes(keys=2**40), "1099511627776 keys; at most"),
        (gguf_bytes(keys=1, rest=struct.pack("<Q", 2**60)), "bytes in a text; at most 256"),
        (gguf_bytes(keys=1, rest=KEY + struct.pack("<I", 99)), "the unknown type 99"),
        (
            gguf_bytes(keys=1, rest=KEY + struct.pack("<IIQ", 9, 0, 2**50)),
            "values in a list; at most",
        ),
        (gguf_bytes(keys=1, rest=KEY + struct.pack("<IIQ", 9, 9, 1)), "the unknown type 9"),
        (gguf_bytes(keys=1, rest=KEY + struct.pack("<IIQ", 9, 8, 3_999_999)), "behind the end"),
        (gguf_bytes(keys=2, rest=(KEY + struct.pack("<IB", 0, 1)) * 2), "the key 'k' twice"),
        (gguf_bytes(tensors=1, rest=tensor_row("a", (), 0)), "0 dimensions"),
        (gguf_bytes(tensors=1, rest=tensor_row("a", (2**62, 2**62), 0)), "impossible shape"),
        (
            gguf_bytes(tensors=1, rest=tensor_row("a", (31,), 0, 8)),
            "impossible shape (31,) in Q8_0",
        ),
        (gguf_bytes(tensors=1, rest=tensor_row("a", (8,), 0, 23)), "ggml's type 23; F32, F16"),
        (gguf_bytes(tensors=1, rest=tensor_row("a", (8,), 64)), "ends behind the end of the file"),
        (gguf_bytes(tensors=1, rest=tensor_row("a", (2,), 4)), "begins at byte 4"),
        (
            gguf_bytes(tensors=2, rest=tensor_row("a", (2,), 0) + tensor_row("b", (2,), 0))
            + bytes(99),
            "its tensor 'b' begins at byte 0, which another one has",
        ),
        (
            gguf_bytes(tensors=2, rest=tensor_row("a", (2,), 0) + tensor_row("a", (2,), 32))
            + bytes(99),
            "its tensor 'a' is there twice",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_headers_are_refused_before_anything_is_allocated(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufRefusedError) as info:
        file_reader.read_header(path)
    assert words in str(info.value)
