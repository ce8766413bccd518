"""An etcd member as a child process: its program, start and maintenance; and membership of clusters."""
