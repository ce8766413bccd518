"""etcd over gRPC: what the fleet uses."""
