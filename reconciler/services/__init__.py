"""Services of the reconciler beside its reconciles: the join port, the signer, GitOps, the audit file, and records that the leader keeps."""
