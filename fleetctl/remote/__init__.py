"""Sessions with other Macs over ssh: host keys, sudo, commands and uploads. The only importer of asyncssh in fleetctl."""
