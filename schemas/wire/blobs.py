"""The route by which agents give files of models to each other."""

from typing import Final

PATH: Final = "/v1/blobs"
RECEIVED: Final = "x-fleet-received-bytes"
"""Header with the bytes that the sender has of the file, also those that it does not give yet."""
