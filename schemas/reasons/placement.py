"""Reasons why a node cannot take a replica."""

from typing import Final

from schemas.reasons.reason import ReasonSection, problem

SECTION: Final = ReasonSection(
    title="A replica has no node",
    shown_by="fleetctl explain placement NAME",
    reasons=(
        problem(
            "InsufficientMemory",
            "no Mac has enough memory",
            "The memory proof needs more than the Mac has left for models. For a mixture of experts the message has the rate "
            "that experts on the disk would allow, as the agent measured it; engines keep all experts in memory.",
            "Lower `spec.resources.memory` if the message names it, else `contextLength` or `concurrency`. Or choose a smaller "
            "or more quantised model, or free memory on a Mac. If no Mac is large enough, use a ShardGroup.",
        ),
        problem(
            "ModelNotFound",
            "its folder is not on the Macs",
            "The folder in `spec.model.path` is not on this Mac.",
            "Copy the model to the agent's models folder (`--models-dir`), or correct the path; the agent looks again "
            "by itself. Macs fetch a model by themselves where `spec.model.hub` names its repository.",
        ),
        problem(
            "ModelUnusable",
            "its folder is no complete MLX model",
            "The folder is there, but it is no complete model in MLX format.",
            "The message names the file. Download or convert the model again.",
        ),
        problem(
            "ModelPartial",
            "its folder has one rank's weights only",
            "The folder has only the weight files that one rank of a group needs, and `spec.model.path` names it.",
            "Name the model with `spec.model.hub`, so that the rest is fetched, or run `fleetctl models pull ORGANISATION/NAME` on that Mac.",
        ),
        problem(
            "ArchitectureUnsupported",
            "mlx-lm cannot run its architecture",
            "The installed mlx-lm has no code for this kind of model.",
            "Use a model that mlx-lm supports.",
        ),
        problem(
            "ModelNotInspected",
            "no Mac has inspected its folder yet",
            "The agent has not looked at the model folder yet.",
            "Wait some seconds. If it stays, see whether the agent runs: `fleetctl get nodes`.",
        ),
        problem(
            "ModelNotUnderstood",
            "its memory cannot be proven",
            "The memory of this architecture is not known, so nothing can be proven.",
            "Set `spec.resources.memory` to the memory of one replica.",
        ),
        problem(
            "AdapterNotFound",
            "its adapter is not on the Macs",
            "The folder in `spec.model.adapter` is not on this Mac.",
            "Copy the adapter to the Mac, or correct the path.",
        ),
        problem(
            "AdapterUnusable",
            "its adapter cannot be applied",
            "The folder is no adapter that the engine can apply.",
            "Use a LoRA adapter of `mlx_lm.lora` or PEFT. Merge others into the model.",
        ),
        problem(
            "ContextTooLong",
            "its contextLength exceeds the model's",
            "`spec.contextLength` is longer than the model supports.",
            "Lower `spec.contextLength` to the number in the message.",
        ),
        problem(
            "KvCacheUnsupported",
            "its kvCache does not suit the model",
            "The model's caches cannot be packed or limited as `spec.kvCache` asks.",
            "Remove the field that the message names.",
        ),
        problem(
            "DraftUnsupported",
            "its weights have no multi-token prediction",
            "`spec.model.mtp` needs a multi-token prediction head, and the weights have none that engines can use.",
            "Use `spec.model.ngram`, or remove `mtp`.",
        ),
        problem(
            "NodeNotReady",
            "its Macs are offline",
            "The agent does not renew its lease: the Mac is off, asleep or cut off.",
            "Wake the Mac and start `fleet-nodeagent`. After the grace period its replicas move.",
        ),
        problem(
            "NodeCordoned",
            "the Macs are cordoned",
            "`spec.unschedulable` keeps new replicas away.",
            "`fleetctl uncordon NODE`",
        ),
        problem(
            "NodeDraining",
            "the Macs are being drained",
            "The Mac is being taken out of service.",
            "`fleetctl uncordon NODE`",
        ),
        problem(
            "NodeTainted",
            "it does not tolerate the Macs' taints",
            "The Mac has a taint that the deployment does not tolerate.",
            "Add a toleration to `spec.placement.tolerations`, or remove the taint: "
            "`fleetctl taint NODE KEY-`.",
        ),
        problem(
            "NodeWithheld",
            "pools keep the Macs for their owners",
            "The policy of a pool keeps the Mac for its owner: quiet hours, battery, or activity.",
            "Wait, or change `spec.policy` of the pool that the message names.",
        ),
        problem(
            "NodeFlapping",
            "the Macs come and go",
            "The Mac came back too often in a short time.",
            "It is used again at the time in the message. Look for sleep, a bad cable or a restarting agent.",
        ),
        problem(
            "NotInPool",
            "no Mac with room is in its pools",
            "The Mac is in none of the pools of `spec.placement.pools`.",
            "Add the Mac to a pool, or remove the pool from the deployment.",
        ),
        problem(
            "SelectorMismatch",
            "no Mac has the labels that it selects",
            "The Mac lacks a label of `spec.placement.nodeSelector`.",
            "`fleetctl label node NODE KEY=VALUE`, or change the selector.",
        ),
        problem(
            "ChipMismatch",
            "no Mac has a chip that it lists",
            "`spec.placement.chips` does not list the chip of this Mac.",
            "Add the chip, or remove the field.",
        ),
        problem(
            "TooFewGpuCores",
            "no Mac has enough GPU cores",
            "The Mac has fewer GPU cores than `spec.placement.minGpuCores`.",
            "Lower the number, or use a larger Mac.",
        ),
        problem(
            "AntiAffinity",
            "antiAffinity keeps it off the Macs",
            "The Mac runs a deployment that `spec.placement.antiAffinity` keeps apart.",
            "Add a Mac, or remove the rule.",
        ),
        problem(
            "ReplicaLimit",
            "each Mac has its limit of replicas",
            "The Mac has as many replicas of this deployment as `spec.placement.maxReplicasPerNode` allows.",
            "Raise the limit, lower `spec.replicas`, or add a Mac.",
        ),
        problem(
            "ReservedForGroup",
            "ShardGroups reserve the Macs",
            "A ShardGroup reserves the Mac (`reservation: Exclusive`).",
            "Use another Mac, or set `reservation: Shared` in the group.",
        ),
        problem(
            "InsufficientDisk",
            "the Macs lack free disk space",
            "The Mac has less free disk space than its pool reserves.",
            "Remove files, or lower `spec.reserved.disk` of the pool.",
        ),
        problem(
            "MemoryPressure",
            "other programs take the Macs' memory",
            "Memory is short on this Mac: other programs take it.",
            "Close programs on the Mac, or move replicas away with `fleetctl drain NODE`.",
        ),
        problem(
            "DiskPressure",
            "the Macs' disks are almost full",
            "The disk with the models, or with the agent's state, is almost full.",
            "Remove models or files; the Mac's condition names the path.",
        ),
        problem(
            "ThermalPressure",
            "the Macs are too hot",
            "The Mac slows down because it is hot.",
            "Cool the Mac or reduce its load. New replicas come again a minute after it has cooled down.",
        ),
        problem(
            "NeedsReboot",
            "the Macs need a restart",
            "The Mac must be restarted; the message says why.",
            "`fleetctl node reboot NODE --drain`.",
        ),
        problem(
            "MetalUnavailable",
            "the Macs' GPUs do not compute",
            "MLX cannot compute on the GPU of this Mac; its condition MetalAvailable says why.",
            "Restart the Mac. The agent checks again at its start, and every five minutes at most.",
        ),
        problem(
            "DuplicateHardware",
            "two nodes report the same hardware",
            "Two nodes report the same hardware: a cloned state folder, or a renamed Mac.",
            "For a clone, start the agent with a new `--state-dir`. After a rename, "
            "`fleetctl delete node OLD`. For two agents on one machine, start both with `--part-of-machine`.",
        ),
        problem(
            "VersionSkew",
            "agents and reconciler differ in version",
            "The agent is more than one minor version away from the reconciler.",
            "Upgrade the older one.",
        ),
        problem(
            "NotInGroup",
            "the Macs are not in its ShardGroup",
            "The Mac is no member of the deployment's ShardGroup.",
            "Nothing, if others are. Else add the Mac to `spec.members` of the group.",
        ),
    ),
)
