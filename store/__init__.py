"""The port to etcd: typed objects, compare-and-swap, watch, informer, leases, election, embedded etcd."""
