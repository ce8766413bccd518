"""One module per client, ours and others': each has `connect(url, option)`, run in its own process."""
