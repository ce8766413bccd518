"""Under which title of `fleetctl --help` each verb stands."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Declare": ("apply", "diff", "plan", "create", "replace", "edit", "patch", "delete"),
    "Look": ("get", "describe", "explain", "events", "logs", "top", "wait", "routes"),
    "Use": ("chat",),
    "Roll out": ("rollout", "scale", "label", "annotate"),
    "Nodes and fabric": ("cordon", "uncordon", "drain", "taint", "fabric"),
    "Git, and from elsewhere": ("sync", "suspend", "resume", "export", "import"),
    "Find out what is wrong": ("doctor", "support-bundle", "version", "simulate"),
    "Fleets": ("up", "down", "demo", "backup", "restore", "init-auth"),
    "fleetctl itself": ("config", "completion", "api-resources", "help"),
}
