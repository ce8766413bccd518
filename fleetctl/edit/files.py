"""A user's own file in the editor: its text is kept as it is written, comments and all; once valid, saved and applied."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click

from fleetctl.edit.objects import RejectedError, load_text
from fleetctl.errors import FleetctlError
from machinery.clock import Clock
from manifests import apply as applying
from manifests import sources
from manifests.errors import ApplyError, ManifestError, ManifestErrors
from store.codec import UndecodableError
from store.errors import StoreError
from store.port import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A file as it was when it was opened."""

    path: Path
    text: str

    @classmethod
    def of(cls, name: str) -> "Opened":
        """Read a file.

        Raises:
            FleetctlError: it is none, or cannot be read or written.

        """
        path = Path(name)
        if name == sources.STDIN or path.is_dir():
            raise FleetctlError(f"{name}: only files can be edited; name each with its own -f")
        [(_, found)] = sources.read_all([name], recursive=False, stdin=None)
        if isinstance(found, ManifestError):
            raise FleetctlError(str(found))
        if not os.access(path, os.W_OK):
            raise FleetctlError(f"{name}: may not be written by you; see: ls -l {name}")
        return cls(path=path, text=found)

    @property
    def suffix(self) -> str:
        """What editors know the language by."""
        return self.path.suffix if self.path.suffix in (".yaml", ".yml", ".json") else ".yaml"

    async def save(self, transport: Transport, clock: Clock, text: str) -> None:
        """Check the text, save it as the file, and apply it; and say what became of the objects.

        The file first: were it the last, a power cut between them would leave a file that takes the change back.

        Raises:
            RejectedError: it is not valid; nothing was saved.
            FleetctlError: it was saved, and could not be applied; or it could not be saved.

        """
        loaded = load_text(text, self.suffix)
        try:
            await applying.prepare(transport, loaded, clock)
        except ManifestErrors as errors:
            head = "nothing was saved or written, for this does not go with what the fleet has:"
            raise RejectedError(head, errors.problems) from None
        self._replace(text)
        try:
            applied = await applying.apply(transport, loaded, clock)
        except (ManifestErrors, ApplyError, UndecodableError, StoreError) as error:
            raise FleetctlError(
                f"{self.path} is saved, and was not applied: {error}. Apply it: fleetctl apply -f {self.path}"
            ) from error
        click.echo(f"{self.path} saved")
        for outcome in applied.outcomes:
            click.echo(f"{outcome.obj.kind.lower()}/{outcome.obj.name} {outcome.result}")
        for clash in applied.kept:
            click.echo(f"warning: {clash.kept}", err=True)

    def _replace(self, text: str) -> None:
        """Put the text into the file's place, whole or not at all."""
        target = self.path.resolve()
        try:
            if target.read_bytes().decode(errors="replace") != self.text:
                raise FleetctlError(
                    f"{self.path} was changed by somebody else while it was edited; it is left as it is"
                )
            mode = target.stat().st_mode
            number, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(text.encode())
                    file.flush()
                    os.fsync(file.fileno())
                Path(name).chmod(mode)
                Path(name).replace(target)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise FleetctlError(f"{self.path} cannot be written: {error.strerror}") from error
