"""The files in which others say which Macs work together: read into a ShardGroup, and written from one."""
