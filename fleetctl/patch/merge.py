"""RFC 7386: a patch that looks like what it changes, in which null takes a field away. Pure."""

from manifests.tree import Tree


def merged(document: Tree, patch: Tree) -> Tree:
    """Return the document as it is after the patch; lists are replaced as a whole."""
    if not isinstance(patch, dict):
        return patch
    found = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


def difference(before: Tree, after: Tree) -> Tree:
    """Return the patch that makes `after` of `before`; neither holds null, which such a patch cannot write."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    patch: dict[str, Tree] = {key: None for key in before if key not in after}
    for key, value in after.items():
        if key not in before:
            patch[key] = value
        elif not is_equal(before[key], value):
            patch[key] = difference(before[key], value)
    return patch


def is_equal(one: Tree, other: Tree) -> bool:
    """Return whether two values are equal as JSON means it: true is not 1, and 1 is 1.0."""
    if isinstance(one, dict) and isinstance(other, dict):
        same = one.keys() == other.keys()
        return same and all(is_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other
