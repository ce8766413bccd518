"""The Batch API: files of requests that run at the lowest priority, kept in a folder of the gateway's machine."""
