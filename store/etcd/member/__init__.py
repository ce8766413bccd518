"""One etcd member of our own: the program, its start, its care."""
