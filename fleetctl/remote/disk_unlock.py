"""Unlocks the disk of a Mac over ssh: macOS 26 takes the password of a FileVault user before its disk can be read.

Its answers are those that shoon/fv-ssh-unlock recorded and apple_ssh_and_filevault(7) describes; this has not run on a
Mac. Nothing is sent before the host key is accepted: a locked Mac shows the same one as ever.
"""

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import asyncssh
from typing_extensions import override

from fleetctl.remote import session
from fleetctl.remote.errors import LoginRefusedError
from fleetctl.remote.session import SshPolicy
from fleetctl.remote.target import RemoteTarget

UnlockState: TypeAlias = Literal["Unlocked", "NotLocked", "Disconnected"]
"""Disconnected: the Mac ended the connection after the password and did not say why."""
_LOCKED: Final = "system is locked"
_UNLOCKED: Final = "system successfully unlocked"
_MAX_TEXT: Final = 8192
# The Mac derives a key from the password and mounts its disk.
_ANSWER_S: Final = 60.0


class _PasswordLogin(asyncssh.SSHClient):
    """Sends a password once, in answer to a single hidden question for one, and collects what the Mac says."""

    def __init__(self, password: str) -> None:
        self._password: str | None = password
        self.before = ""
        self.after = ""

    @property
    def was_sent(self) -> bool:
        return self._password is None

    def _hear(self, text: str) -> None:
        if self.was_sent:
            self.after = (self.after + text)[:_MAX_TEXT]
        else:
            self.before = (self.before + text)[:_MAX_TEXT]

    @override
    def auth_banner_received(self, msg: str, lang: str) -> None:
        self._hear(msg)

    @override
    def kbdint_auth_requested(self) -> str | None:
        return None if self.was_sent else ""

    @override
    def kbdint_challenge_received(
        self, name: str, instructions: str, lang: str, prompts: Sequence[tuple[str, bool]]
    ) -> list[str] | None:
        self._hear(f"{name}\n{instructions}\n")
        if not prompts:
            return []
        ((question, is_shown), *others) = prompts
        if others or is_shown or "password" not in question.lower():
            return None
        password = self.password_auth_requested()
        return None if password is None else [password]

    @override
    def password_auth_requested(self) -> str | None:
        password, self._password = self._password, None
        return password


async def unlock(target: RemoteTarget, policy: SshPolicy) -> UnlockState:
    """Ask the person for the password of FileVault, and give it to the Mac.

    Raises:
        HostKeyError: the host key is refused.
        LoginRefusedError: the Mac refuses the password, or there is no terminal to ask for it.
        UnreachableHostError: nothing answers, or the Mac asks for no password.

    """
    if policy.prompts is None:
        raise LoginRefusedError(
            f"{target.host}: run this in a terminal, which asks for the password of FileVault"
        )
    async with session.reach(target, policy) as (route, key):
        login = _PasswordLogin(await policy.prompts.secret(f"Password of {target}, for FileVault"))
        try:
            connection = await asyncssh.connect(
                route.target.host,
                route.target.port,
                tunnel=route.tunnel,
                username=route.target.user,
                known_hosts=([key], [], []),
                config=None,
                client_factory=lambda: login,
                client_keys=None,
                agent_path=None,
                preferred_auth="keyboard-interactive,password",
                connect_timeout=policy.connect_limit_s,
                login_timeout=_ANSWER_S,
            )
        except (OSError, TimeoutError, asyncssh.Error) as error:
            if _UNLOCKED in login.after.lower():
                return "Unlocked"
            if isinstance(error, asyncssh.PermissionDenied):
                raise LoginRefusedError(
                    f"{target.host} refuses the password of {target.user}. It must be a user who may unlock FileVault "
                    "(`fdesetup list`) and may use Remote Login. macOS makes you wait after some wrong passwords"
                ) from error
            if login.was_sent:
                return "Disconnected"
            raise session.unreachable(target, error, policy.connect_limit_s) from error
        connection.abort()
    return "Unlocked" if _LOCKED in login.before.lower() else "NotLocked"
