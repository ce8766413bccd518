"""Side by side with other Python clients of etcd: `python -m bench.store`."""
