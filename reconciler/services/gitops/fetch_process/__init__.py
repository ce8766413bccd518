"""The fetch process, which talks to Git servers and parses their data; the only importer of dulwich.

It is a process of its own (`python -m reconciler.services.gitops.fetch_process`) because its input is foreign: it may hang, use
up memory or crash, and the leader continues.
"""
