"""etcd over its JSON gateway: for clients that must work over plain HTTP."""
