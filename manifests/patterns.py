"""The patterns of fields that users write, in words. Imports the models of all kinds: for errors only."""

from typing import Final, get_args

from pydantic import StringConstraints

from schemas.deployment import AdapterName, HubEndpoint, HubRepo, HubRevision, ServedName
from schemas.gitsource import Commit, Folder, RefName, SecretFile
from schemas.meta import LabelKey, LabelValue, ModelPath, ObjectName
from schemas.modelpolicy import HubOwner, License
from schemas.pools import TimeOfDay
from schemas.quantity import Percent, Quantity
from schemas.route import HeaderName
from schemas.shardgroup import Device, Variable, VariableValue


def _of(annotated: object) -> str:
    """Return the pattern that a type of schemas/ was declared with, so that it is defined only there."""
    return next(
        str(mark.pattern) for mark in get_args(annotated) if isinstance(mark, StringConstraints)
    )


NAME: Final = _of(ObjectName)
LABEL_KEY: Final = _of(LabelKey)
QUANTITY: Final = _of(Quantity)
RULES: Final = {
    NAME: 'expected lower-case letters, digits, "-" and ".", beginning and ending with a letter or digit',
    LABEL_KEY: 'a label\'s key has letters, digits, "-", "_" and ".", beginning with a letter or digit, '
    'and before it optionally a prefix in lower case and "/"',
    _of(
        LabelValue
    ): 'expected letters, digits, "-", "_" and ".", beginning and ending with a letter or digit',
    _of(ServedName): 'expected letters, digits, ".", "_", ":", "/" and "-"',
    _of(
        AdapterName
    ): 'expected letters, digits, ".", "_" and "-", beginning with a letter or digit',
    _of(ModelPath): "expected a path without control characters",
    QUANTITY: "expected a quantity of bytes such as 512Mi, 96Gi or 1.5G",
    _of(Percent): 'expected a percentage from "0%" to "100%"',
    _of(HubRepo): "expected ORGANISATION/NAME, such as mlx-community/Qwen3-4B-4bit",
    _of(HubRevision): "expected a branch, a tag or a commit, such as main",
    _of(HubEndpoint): "expected an address such as https://hf-mirror.com",
    _of(HubOwner): "expected the part of a repository before the slash, such as mlx-community",
    _of(License): "expected a licence as model cards write it, in lower case, such as apache-2.0",
    _of(TimeOfDay): 'expected a time of the day from "00:00" to "23:59", in quotes',
    _of(HeaderName): "expected the name of a header, such as x-team",
    _of(RefName): "expected a name as Git allows it, such as main or v1.2",
    _of(Commit): "expected a whole commit: 40 digits from 0 to 9 and a to f",
    _of(Folder): "expected a path without control characters",
    _of(
        SecretFile
    ): 'expected the name of a file without a folder: letters, digits, "-", "_" and "."',
    _of(Device): "expected the name of an RDMA device, such as rdma_en2",
    _of(Variable): "expected a variable of MLX in capitals: MLX_... or JACCL_...",
    _of(VariableValue): "expected a text without NUL characters",
}


def rule(pattern: str) -> str:
    """Return what a pattern means."""
    return RULES.get(pattern, f"does not match {pattern}")
