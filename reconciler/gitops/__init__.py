"""GitSources: what a repository says is applied. Decides in `status` and `due` (pure); Git itself is another process."""
