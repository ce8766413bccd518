"""Reasons of ModelDeployments, ModelRoutes, NodePools and ShardGroups, and of events about what the reconciler does."""

from typing import Final

from schemas.reasons.reason import ReasonSection, normal, problem

SECTION: Final = ReasonSection(
    title="ModelDeployment: Available, Placed, Progressing, Scaling, Preempted, ObjectivesMet",
    shown_by="fleetctl describe md NAME",
    reasons=(
        problem(
            "Unschedulable",
            "no Mac can take a replica",
            "At least one replica has no node. The message counts the nodes by reason.",
            "`fleetctl explain placement NAME` gives the reason for each Mac.",
        ),
        problem(
            "CrashLooping",
            "its group failed in every shape",
            "A shard group's ranks failed three times in a row in every shape.",
            "It is tried again within five minutes. To try at once: `fleetctl rollout restart NAME`.",
        ),
        problem(
            "ReplicaNotReady",
            "a replica is not ready",
            "A replica has a node, but does not serve. The message names it.",
            "`fleetctl describe md/NAME` shows the replica, its reason and what to do.",
        ),
        problem(
            "ObjectiveMissed",
            "it misses its objectives",
            "More requests than `spec.objectives` allows were too slow or failed. The message has the figures.",
            "Add replicas, lower `spec.concurrency`, or correct the objective. `fleetctl top models` shows the load.",
        ),
        normal("ObjectivesMet", "What `spec.objectives` promises was kept over an hour and a day."),
        normal("TooFewRequests", "Too few requests ended within a day to judge `spec.objectives`."),
        problem(
            "Stalled",
            "its rollout makes no progress",
            "The rollout made no progress for `spec.rollout.progressDeadline`.",
            "Correct the cause in the message. `fleetctl rollout history NAME` lists the revisions that you can return to.",
        ),
        problem(
            "CanaryFailed",
            "its new version was rolled back",
            "The new version was worse than the analysis allows, and was rolled back.",
            "Read the figures in the message. Correct the manifest and apply it again.",
        ),
        problem(
            "Paused",
            "its rollout is paused",
            "`spec.rollout.paused` is true.",
            "`fleetctl rollout resume NAME`",
        ),
        problem(
            "HigherPriority",
            "a higher priority took its memory",
            "A replica ended because a deployment of a higher priority needed its memory.",
            "Add memory, or change `spec.priority`.",
        ),
        problem(
            "DemandUnknown",
            "a gateway does not report its load",
            "A gateway does not report its load, so no replica is removed.",
            "Start the gateway that the message names, or correct its `--advertise-address`.",
        ),
        problem(
            "AtMaximum",
            "the load needs more than maxReplicas",
            "The load needs more replicas than `maxReplicas`.",
            "Raise `spec.autoscaling.maxReplicas` if the Macs have room.",
        ),
        normal("AllReplicasReady", "As many replicas serve as are declared."),
        normal("ScaledToZero", "No replica is declared or needed."),
        normal("ReplicasStarting", "Replicas have nodes and start."),
        normal("AllPlaced", "Each replica has a node."),
        normal("Placing", "Nodes are being chosen."),
        normal("RollingOut", "Replicas are being replaced by the new version."),
        normal("RolloutComplete", "Each replica runs the newest version."),
        normal("CanaryRunning", "The new version gets its share of requests and is measured."),
        normal("NotPreempted", "The replicas that were displaced have a node again."),
        normal("Fixed", "`spec.replicas` sets the number; autoscaling is off."),
        normal("Steady", "The load fits the number of replicas."),
        normal("ScaledUp", "The load needs more replicas."),
        normal("ScaledDown", "The load, or the declaration, needs fewer replicas."),
        normal("Stabilizing", "The load changed, but not for long enough yet."),
        normal("Idle", "There are no requests; the first one starts a replica."),
        normal(
            "GaveWay",
            "Idle replicas ended so that a model at zero has room; the next request starts one again.",
        ),
        normal("Unloaded", "A client unloaded the model; the next request starts it again."),
        normal("Woken", "A request waits, so the first replica starts."),
        normal("AtMinimum", "`minReplicas` keeps more replicas than the load needs."),
    ),
)

OTHER_KINDS: Final = ReasonSection(
    title="ModelRoute, NodePool, ShardGroup: Accepted, Ready, FabricHealthy",
    shown_by="fleetctl describe KIND NAME",
    reasons=(
        problem(
            "BackendNotFound",
            "it names a deployment that does not exist",
            "The route names a ModelDeployment that does not exist.",
            "Create the deployment, or correct the name in the route.",
        ),
        problem(
            "NoNodes",
            "none of its Macs is ready",
            "No Mac of the pool is ready.",
            "Compare `spec.selector` and `spec.nodes` with `fleetctl get nodes --show-labels`.",
        ),
        problem(
            "MemberNotReady",
            "too few of its Macs are ready",
            "Fewer Macs of the group are ready than it needs.",
            "Start the agents that the message names, or add a spare to `spec.members`.",
        ),
        problem(
            "UnknownNode",
            "a member never joined",
            "The group names a node that never joined.",
            "Correct the name in `spec.members`, or start the agent with that `--name`.",
        ),
        problem(
            "SlowerThanUsual",
            "its cables are slower than usual",
            "FabricHealthy: a regular check reached less than half of the usual speed of these Macs.",
            "Replug or replace the cable, compare `fleetctl fabric check`, and see `fleetctl describe shardgroup`.",
        ),
        normal(
            "NotMeasured",
            "FabricHealthy: no regular check of the cables has run yet; they wait while a replica uses the group.",
        ),
        normal("BackendsFound", "All deployments of the route exist."),
        normal("NodesReady", "The pool has a Mac that is ready."),
        normal("MembersReady", "The group has as many ready Macs as it needs."),
    ),
)

ON_DEMAND: Final = ReasonSection(
    title="ModelPolicy: refusals of models that clients ask for",
    shown_by="fleetctl describe modelpolicy NAME",
    reasons=(
        problem(
            "TooLarge",
            "",
            "The files of a model that a client asked for are larger than `maxSize`.",
            "Ask for a smaller quantization, or raise `spec.onDemand.maxSize`.",
        ),
        problem(
            "LicenseNotAllowed",
            "",
            "The card of a model that a client asked for names none of the allowed licences.",
            "Read the licence. If you accept it, add it to `spec.onDemand.licenses`.",
        ),
        problem(
            "TooManyModels",
            "",
            "As many models as `maxModels` are deployed on demand.",
            "`fleetctl get md -l fleet/on-demand` lists them: delete one, or raise `spec.onDemand.maxModels`.",
        ),
        problem(
            "TooManyBytes",
            "",
            "The files of all models on demand would be larger than `maxTotalSize`.",
            "`fleetctl get md -l fleet/on-demand` lists them: delete one, or raise `spec.onDemand.maxTotalSize`.",
        ),
    ),
)

EVENTS: Final = ReasonSection(
    title="Events: what the fleet did",
    shown_by="fleetctl events",
    reasons=(
        normal(
            "DeployedOnDemand",
            "A client asked for a model that a ModelPolicy allows; it was deployed.",
        ),
        normal(
            "DeletedUnused", "A model on demand was unused for `unusedFor`, or its policy is gone."
        ),
        normal(
            "ModelCollected",
            "A Mac's disk was full, so its agent removed a model that nothing uses.",
        ),
        normal(
            "GaveWay",
            "An idle replica ends, because requests wait for a model at zero. `spec.autoscaling.swap: Pinned` keeps it.",
        ),
        problem(
            "Preempted",
            "",
            "A replica ends because a deployment of a higher priority needs its memory.",
            "Add memory, or change `spec.priority`.",
        ),
        problem(
            "ReplicaMoved",
            "",
            "A replica got another node, because its Mac stayed away for the grace period.",
            "`fleetctl get nodes` shows which Mac is lost.",
        ),
        problem(
            "ReplicaReformed",
            "",
            "A shard group starts again, perhaps on other Macs or as a fallback.",
            "`fleetctl status` shows what to do if it does not serve again.",
        ),
        problem(
            "ProofCorrected",
            "",
            "A replica takes more memory than was proven; the proof was raised.",
            "Set `spec.resources.memory` as the message says, or lower `contextLength` or `concurrency`.",
        ),
        problem(
            "Drifted",
            "",
            "Somebody changed an object that a GitSource keeps, and `driftPolicy` is Warn.",
            "Commit the change, or set `driftPolicy: Correct`.",
        ),
        problem(
            "DriftCorrected",
            "",
            "An object of a GitSource was changed by hand, and was put back.",
            "Change the manifest in the repository.",
        ),
        problem(
            "ReplicaNotReady",
            "",
            "A replica stopped serving; the message has its reason.",
            "`fleetctl status` shows what to do.",
        ),
        normal("ReplicaReady", "A replica began to serve."),
        normal("Deleted", "The deletion of an object is complete."),
        normal("NodeReady", "A node renews its lease again."),
        normal("ReplicaPlaced", "A replica got a node."),
        normal("ReplicaAdopted", "A replica without a deployment belongs to this one now."),
        normal("ReplicaOrphaned", "A replica keeps running without its deployment."),
        normal("ReplicaRemoved", "A replica has ended."),
        normal("NewRevision", "The deployment has a new version."),
        normal("Scaled", "The number of desired replicas changed."),
        normal("Outdated", "A replica of an older version ends."),
        normal("OutdatedInPlace", "It ends before its replacement starts, as both do not fit."),
        normal("Evicted", "A replica leaves a Mac that is drained or withheld."),
        normal("OwnerDeleted", "A replica ends because its deployment was deleted."),
        normal("OwnerReplaced", "A replica of a deleted deployment of the same name ends."),
        normal("GroupLost", "A replica ends because its ShardGroup cannot run it any more."),
        normal("Pruned", "A GitSource deleted objects that its repository no longer has."),
    ),
)
