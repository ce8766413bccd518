"""The names of objects, asked of the store that a half-typed line means."""

from typing import Any

import click

from fleetctl import documents
from fleetctl.config.settling import settled
from fleetctl.connect import find
from machinery.clock import SystemClock
from store import keys
from store.etcd.quick.reads import QuickReads, drive

_STORE = ("data_dir", "etcd", "etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password",
          "etcd_password_file", "etcd_prefix", "etcd_transport")  # fmt: skip


def names(context: click.Context, options: dict[str, Any], kind: str) -> list[str]:
    """Return the names of a kind's objects; of `Gateway`, the ids of those that are registered.

    Raises:
        click.ClickException: the line names no store.
        StoreError: it does not answer.

    """
    if any(name not in options for name in _STORE):
        return []
    with context.scope(cleanup=False):
        said = settled({name: options[name] for name in _STORE}, options.get("context"))
        address = find(said)
    store = QuickReads(address, SystemClock())
    try:
        if kind == "Gateway":
            items = drive(store.list(keys.GATEWAY_LEASE_PREFIX)).items
            return [item.key.removeprefix(keys.GATEWAY_LEASE_PREFIX) for item in items]
        return sorted({documents.name_of(t) for t in drive(documents.list_all(store, kind))})
    finally:
        store.close()
