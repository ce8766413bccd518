"""GitSources: applies the manifests of a Git repository. A process of its own speaks Git."""
