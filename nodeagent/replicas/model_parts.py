"""The part of a hub model that this node's rank of a group needs; blocks, for use in a thread."""

from collections.abc import Callable
from typing import Final

from models import partial_model, weight_headers
from models.hub.fetcher import ModelPart
from models.layer_files import rank_files
from models.model_files import ModelUnusableError
from models.model_store.store import StoredModel
from models.weight_headers import WeightHeaders
from nodeagent.engines import group_launch
from schemas.replica import Replica

_MAX_KNOWN: Final = 16


class HeadersUnknownError(Exception):
    """The store has not told yet which headers there are."""


class ModelParts:
    """Computes parts from the headers of weight files, and keeps the last ones."""

    def __init__(
        self, node: str, packed_headers: Callable[[str], str | None] = lambda _: ""
    ) -> None:
        """`packed_headers` returns those of a model's folder, as the reconciler read them; "" if it has none.

        None: the store has not answered yet.
        """
        self.node: Final = node
        self._packed_headers = packed_headers
        self._known: dict[tuple[str, tuple[int, ...], int], ModelPart] = {}

    def part_of(self, replica: Replica, stored: StoredModel | None) -> ModelPart | None:
        """Return the part that this node's rank needs; None if it needs the whole model, or if no headers are known.

        `stored` is what the store has of the model: its mark has the headers when the reconciler's are of another
        commit.

        Raises:
            HeadersUnknownError: without the headers it would be all files, and they are not known yet.

        """
        formation, source = replica.spec.formation, replica.spec.model.hub
        rank = group_launch.rank_of_node(replica, self.node)
        if source is None or rank is None or formation is None:
            return None
        if formation.parallelism != "Pipeline":
            return None  # a Tensor rank has a slice of every layer
        layers = tuple(assignment.layers for assignment in replica.spec.ranks)
        key = (source.folder, layers, rank)
        if key not in self._known:
            headers = self._headers(source.folder, stored)
            if headers is None:
                return None
            while len(self._known) >= _MAX_KNOWN:
                self._known.pop(next(iter(self._known)))
            files = rank_files(headers.weight_map, layers, rank)
            self._known[key] = ModelPart(files=files, headers=headers)
        part = self._known[key]
        return part if part.left_out else None

    def _headers(self, folder: str, stored: StoredModel | None) -> WeightHeaders | None:
        packed = self._packed_headers(folder)
        try:
            if not packed and stored is not None and stored.is_partial:
                mark = partial_model.read_mark(stored.folder)
                packed = packed if mark is None else mark.headers
            if packed is None:
                raise HeadersUnknownError(folder)
            return weight_headers.unpack(packed) if packed else None
        except (ValueError, ModelUnusableError):
            return None
