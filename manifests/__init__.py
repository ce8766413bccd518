"""From YAML to changes of the store: load, validate, merge, plan, apply, delete."""
