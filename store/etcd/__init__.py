"""etcd as a store: addresses, users, two transports, error mapping, and a member as a child process."""
