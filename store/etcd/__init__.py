"""etcd as a store: where it is, two ways there, what its refusals mean, and a member of our own."""
