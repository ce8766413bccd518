"""Control characters in text from elsewhere, made visible before a terminal or a person reads them."""

from collections.abc import Mapping

# Unicode's embeddings, overrides, isolates and marks: with them text is shown in another order than it has.
_BIDIRECTIONAL = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
# C0 except tab and newline, and DEL, become Unicode's control pictures; the others the replacement character. Each is
# one cell wide, so that tables stay aligned.
_PICTURES: Mapping[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)},
    0x7F: "\u2421",
    **dict.fromkeys((*range(0x80, 0xA0), *_BIDIRECTIONAL), "\ufffd"),
}


def make_printable(text: str) -> str:
    """Return the text without control characters; tabs and newlines stay, a carriage return before a newline goes.

    A terminal obeys control characters: they move the cursor, change the title, and write to the clipboard.
    """
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return text.replace("\r\n", "\n").translate(_PICTURES)
