"""Publication of a model that was made on this Mac: a plain folder becomes contents by digest, and a model of the fleet."""

import os
from hashlib import sha256
from pathlib import Path
from typing import Final

from models import inspection_process, model_files
from models.hf_config import ModelConfig
from models.hub.digests import BlobDigest, hash_file
from models.hub.file_selection import DEFAULT_PATTERNS, is_selected
from models.hub.model_hub import contents_version
from models.hub.remote_inspection import config_text, snapshot_weights
from models.model_store.store import ModelStore, StoredModel
from schemas.blob_share import ListedFile, ModelListing

MAKING_SUFFIX: Final = ".making"
"""The suffix of a folder that is half made: an agent that starts removes those of processes that were killed."""


def making_room(repo: str) -> BlobDigest:
    """Return the digest under which room is reserved for contents that are not known yet."""
    return BlobDigest("sha256", sha256(f"contents of {repo}".encode()).hexdigest())


def publish_folder(store: ModelStore, repo: str, folder: Path) -> StoredModel:
    """Move the files of a folder into the store, and publish them as a repository. Reads every byte.

    Only the files of a model go with it; its commit is computed from them. A crash leaves contents without a model, which
    the next publication uses and a collection removes.

    Raises:
        FileExistsError: the model's folder exists and is not the store's.
        OSError: the disk failed.
        ValueError: the folder has no model.

    """
    files: dict[str, BlobDigest] = {}
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.is_symlink() or not is_selected(path.name, DEFAULT_PATTERNS):
            continue
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        files[path.name] = hash_file(path).sha256
    if not any(name.endswith(".safetensors") for name in files):
        raise ValueError(f"{folder} has no *.safetensors: it is no model in MLX format")
    commit = contents_version(files)
    store.check_owner(repo, commit)
    for name, digest in files.items():
        store.add_blob(folder / name, digest, digest)
    return store.publish(repo, commit, files, DEFAULT_PATTERNS)


def list_model(model: StoredModel) -> ModelListing:
    """Return what other Macs need to know of a model that no hub lists. Reads config.json and the headers of weights.

    Raises:
        ModelUnusableError: it cannot be served.
        ValueError: it has more files than a listing holds.

    """
    facts = inspection_process.inspect_model(model.folder)
    config = model_files.parse_json_file(ModelConfig, model.folder / "config.json")
    return ModelListing(
        repo=model.repo,
        commit=model.commit,
        files=tuple(
            ListedFile(path=file.path, size_bytes=file.size, sha256=file.sha256)
            for file in model.files
        ),
        config=config_text(config),
        weights=snapshot_weights(facts.weights),
    )
