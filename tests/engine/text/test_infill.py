"""Prompts that fill a gap: as each family's own documentation writes them."""

import pytest

from engine.text.infill import InfillFile, find_infill

FILES = (InfillFile("a.py", "x = 1"), InfillFile("b.py", "y = 2"))
QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
STARCODER = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
QWEN_GAP = "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>"
PLAIN_FILES = "x = 1\n\ny = 2\n\n"


@pytest.mark.parametrize(
    ("vocabulary", "gap", "files", "end"),
    [
        pytest.param(
            [*QWEN, "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>"],
            QWEN_GAP,
            "<|repo_name|>project\n<|file_sep|>a.py\nx = 1\n<|file_sep|>b.py\ny = 2\n<|file_sep|>\n",
            "<|fim_pad|>",
            id="qwen2.5-coder",
        ),
        pytest.param(
            [*QWEN, "<|file_separator|>"],
            QWEN_GAP,
            "<|file_separator|>a.py\nx = 1\n<|file_separator|>b.py\ny = 2\n<|file_separator|>\n",
            "<|file_separator|>",
            id="codegemma",
        ),
        pytest.param(
            [*QWEN, "<|fim_pad|>", "<|end_of_text|>"],
            QWEN_GAP,
            PLAIN_FILES,
            "<|fim_pad|>",
            id="granite",
        ),
        pytest.param(
            [*STARCODER, "<fim_pad>", "<file_sep>", "<repo_name>"],
            "<fim_prefix>P<fim_suffix>S<fim_middle>",
            "<repo_name>project\n<file_sep>a.py\nx = 1\n<file_sep>b.py\ny = 2\n<file_sep>\n",
            "<file_sep>",
            id="starcoder2",
        ),
        pytest.param(
            STARCODER,
            "<fim_prefix>P<fim_suffix>S<fim_middle>",
            PLAIN_FILES,
            "<fim_prefix>",
            id="granite-code",
        ),
        pytest.param(
            ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<|EOT|>"],
            "<｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>",
            PLAIN_FILES,
            "<|EOT|>",
            id="deepseek-coder",
        ),
        pytest.param(
            ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"],
            "▁<PRE>P▁<SUF>S▁<MID>",
            PLAIN_FILES,
            " <EOT>",
            id="codellama",
        ),
        pytest.param(
            ["[PREFIX]", "[SUFFIX]", "[MIDDLE]"],
            "[SUFFIX]S[PREFIX]P",
            PLAIN_FILES,
            "[SUFFIX]",
            id="codestral",
        ),
    ],
)
def test_families(vocabulary: list[str], gap: str, files: str, end: str) -> None:
    form = find_infill(vocabulary)
    assert form is not None
    assert form.render("P", "S") == gap
    assert form.render("P", "S", FILES) == files + gap
    assert end in form.ends
    assert {text.replace(" ", "▁") for text in form.ends} <= set(vocabulary)


def test_a_vocabulary_without_the_tokens_has_no_format() -> None:
    assert find_infill(["<|im_start|>", "<fim_prefix>", "[SUFFIX]"]) is None
