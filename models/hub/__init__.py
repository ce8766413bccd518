"""Models from a hub: the port to hubs, the choice of files, and the resumable fetcher."""
