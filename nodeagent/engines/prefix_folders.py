"""Folders of cached prompts on this node's disk, one for each deployment, which its engines share.

They outlive engines and replicas, so that a rollout or a restart starts warm, and go with `kvCache.diskBytes` or the
deployment.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final

from machinery.clock import Clock
from schemas.model_use import ModelUse

log = logging.getLogger(__name__)

_PERIOD_S: Final = 60.0


class PrefixFolders:
    """The folders below one folder of the agent."""

    def __init__(
        self, root: Path, uses: Callable[[], Iterable[ModelUse] | None], clock: Clock
    ) -> None:
        """Prepare. `uses` returns those of all deployments of the fleet; None while they are not known."""
        self._root = root
        self._uses = uses
        self._clock = clock

    async def run(self) -> None:
        """Remove the folders that no deployment needs, forever."""
        while True:
            known = self._uses()
            if known is not None:
                await asyncio.to_thread(remove_others, self._root, needed_folders(known))
            await self._clock.sleep(_PERIOD_S)


def needed_folders(uses: Iterable[ModelUse]) -> set[str]:
    """Return the names of the folders that these deployments need."""
    return {use.deployment for use in uses if use.keeps_prompts}


def folder_of(root: Path, deployment: str) -> Path:
    """Return the folder of a deployment."""
    return root / deployment


def remove_others(root: Path, kept: Collection[str]) -> None:
    """Remove the folders of all deployments but these. An engine that still runs goes on without its files."""
    try:
        paths = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("cached prompts not looked at", extra={"folder": str(root), "why": str(error)})
        return
    for folder in paths:
        if folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)
            log.info("cached prompts removed", extra={"deployment": folder.name})
