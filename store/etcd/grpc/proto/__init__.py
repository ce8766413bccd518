"""Messages of etcd's API, made of etcd.proto by `make proto`."""
