"""Errors of questions to the processes of a fleet. Both doors show the message."""


class ProcessError(Exception):
    """A process could not be asked, or refused; the message says which, why, and what to do."""

    @property
    def message(self) -> str:
        """The text for people."""
        return str(self)


class ProcessUnreachableError(ProcessError):
    """The process does not answer, or has no address; callers may continue without it."""


class ProcessRefusedError(ProcessError):
    """The process refused the request; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
