"""Rollouts: how the replicas of a deployment get from one version to the next. Pure.

Vocabulary:

- template: everything that an engine is started with; its hash names a version (`revisions.template_hash`).
- revision: a stored template with its number and change cause.
- stable: the version whose rollout completed last.
- target: the version that replicas should run now; canary: the newest version while it is analysed.
- phase: Rolling, Paused, Canary or RolledBack (`steps.RolloutPhase`).
- surge: replicas above the desired number during a rollout; unavailable: replicas that may be missing.
- step: what a rollout does next, as replicas to create and terminations (`steps.RolloutStep`).
- in place: a replica ends before its replacement starts, because there is no room for both.
"""
