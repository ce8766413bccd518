"""etcd over its JSON gateway, for networks in which only plain HTTP passes."""
