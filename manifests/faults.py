"""What the YAML scanner complains of, in words for people. Pure."""

# A piece of the scanner's complaint, what it means, and what cures it; first match wins.
_FAULTS: tuple[tuple[str, str, str], ...] = (
    (
        "found character '\\t'",
        "a tab stands where YAML wants spaces",
        "Indent with spaces",
    ),
    (
        "mapping values are not allowed",
        "a ':' stands where no field can begin",
        "Look at the indentation of this line and the one above; quote a text that has ': ' in it",
    ),
    (
        "found unexpected end of stream",
        "the file ends inside a quoted text",
        "Close the quote",
    ),
    (
        "found unexpected document separator",
        "the document ends inside a quoted text",
        "Close the quote",
    ),
    (
        "found unknown escape character",
        "an unknown escape stands in a text in double quotes",
        "Use single quotes, in which a backslash is a backslash",
    ),
    (
        "could not find expected ':'",
        "a line that should be a field has no ':'",
        "Write it as: name: value",
    ),
    (
        "expected <block end>",
        "this line does not belong to the block above",
        "Look at its indentation: fields of one mapping begin in the same column",
    ),
    (
        "expected ',' or",
        "a bracket is not closed, or a ',' is missing",
        "Close every [ and { and put ',' between their items",
    ),
    (
        "incompatible YAML document",
        "it declares another version of YAML",
        "Remove the %YAML line; manifests are YAML 1.2",
    ),
    (
        "expected '<document start>'",
        "a document ends before this line, and no other begins",
        "Put --- between documents",
    ),
)


def explain(problem: str, context: str, text: str, line: int) -> tuple[str, str]:
    """Return what is wrong and what would cure it."""
    lines = text.splitlines()
    # The scanner names the token after a tab, or the block; the tab is what people can mend.
    here = lines[line] if line < len(lines) else ""
    if "\t" in here[: len(here) - len(here.lstrip())]:
        problem = "found character '\\t'"
    for piece, message, hint in _FAULTS:
        if piece in problem or piece in repr(problem):
            return message, hint
    if problem.startswith("found character") and "cannot start" in problem:
        char = problem.split("'")[1] if "'" in problem else ""
        return f"a text cannot begin with {char} unless it is quoted", "Put it in double quotes"
    return f"{problem} {context}".strip(), ""
