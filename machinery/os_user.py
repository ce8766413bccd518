"""The user of this process, for records that people read."""

import os
import pwd
import socket


def current_user() -> str:
    """Return the user and host of this command, such as `anna@studio`."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # the user id has no name, as in a container
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"
