"""Import of GGUF files: a file becomes a folder that mlx-lm reads, and then a model of the store, or nothing does."""

import re
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from models.gguf import child
from models.gguf.file_reader import GgufRefusedError
from models.hub.errors import InsufficientDiskError
from models.hub.model_hub import check_repo
from models.model_store.admission import reserve
from models.model_store.cache_import import ImportRefusedError
from models.model_store.folder_publication import MAKING_SUFFIX, making_room, publish_folder
from models.model_store.store import ModelStore, StoredModel
from schemas.deployment import FLEET_ORGANISATION


def repo_of(path: Path) -> str:
    """Return the repository of a file: `fleet/` and its name, as no hub has the result."""
    name = re.sub(r"(?:[^A-Za-z0-9._]|\.{2,})+", "-", path.name.removesuffix(".gguf")).strip("-.")
    return f"{FLEET_ORGANISATION}/{name[:96]}"


def import_gguf(store: ModelStore, path: Path, repo: str) -> StoredModel:
    """Convert a GGUF file, and publish it, pinned: no hub can give it again. The file stays as it is.

    Raises:
        ImportRefusedError: it is damaged or of an architecture that is not read, or the disk has no room.
        FileExistsError: the store's folder exists and is not the store's.
        OSError: the disk failed.

    """
    room = making_room(repo)
    making = store.part_path(room).with_suffix(MAKING_SUFFIX)
    with ExitStack() as stack:
        try:
            check_repo(repo)
            size = child.look_into(path)
            reservation = reserve(store, f"{repo.replace('/', '--')}@import", {room: size})
            if reservation is None:
                raise ImportRefusedError(f"{repo} is being imported by another process")
            stack.callback(reservation.release)
            stack.callback(shutil.rmtree, making, ignore_errors=True)
            shutil.rmtree(making, ignore_errors=True)
            child.convert(path, making)
            model = publish_folder(store, repo, making)
        except InsufficientDiskError as error:
            raise ImportRefusedError(f"{error.reason}: {error}") from error
        except (GgufRefusedError, ValueError) as error:
            raise ImportRefusedError(str(error)) from error
    store.pin(model.name)
    return replace(model, is_pinned=True)
