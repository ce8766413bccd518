"""The process that talks to Git servers and reads what they send; the only importer of dulwich and asyncssh.

A process of its own (`python -m reconciler.gitops.fetch_process`), for what it reads is somebody else's: it may hang, swell or
crash, and the leader goes on.
"""
