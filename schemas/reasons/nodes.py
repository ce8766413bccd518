"""Reasons of nodes: lease, machine and policies."""

from typing import Final

from schemas.reasons.reason import ReasonSection, normal, problem

SECTION: Final = ReasonSection(
    title="Node",
    shown_by="fleetctl describe node NAME",
    reasons=(
        problem(
            "LeaseLost",
            "off, asleep or cut off",
            "The agent does not renew its lease: the Mac is off, asleep or cut off.",
            "Wake the Mac and start `fleet-nodeagent`. Set `FLEET_ETCD` to the address of etcd.",
        ),
        problem(
            "NodeNotReady",
            "",
            "The node lost its lease (event).",
            "Wake the Mac and start `fleet-nodeagent`.",
        ),
        problem(
            "MemoryShort",
            "programs wait for memory",
            "MemoryPressure: programs wait for memory.",
            "Close programs, or move replicas away with `fleetctl drain NODE`.",
        ),
        problem(
            "DiskAlmostFull",
            "the disk is almost full",
            "DiskPressure: less than 5 % or 5 GiB is free on the disk of the models, or less than 1 GiB on another disk of the "
            "agent's state. The message names the path.",
            "Remove models or files until more than 7 % and 8 GiB are free.",
        ),
        problem(
            "TooWarm",
            "the processor is throttled by heat",
            "ThermalPressure: the processor is throttled.",
            "Cool the Mac, or reduce its load.",
        ),
        problem(
            "MemoryStranded",
            "memory stays wired without an engine",
            "NeedsReboot: memory stays wired although no engine runs.",
            "Quit other programs that hold models (Ollama, LM Studio). Else `fleetctl node reboot NODE --drain`.",
        ),
        problem(
            "MetalAborted",
            "the check of the GPU was aborted",
            "MetalAvailable: the process that checks the GPU was aborted; the message has its last line.",
            "Restart the Mac. MLX needs a GPU with Metal: virtual machines often have none.",
        ),
        problem(
            "MetalHangs",
            "the check of the GPU hangs",
            "MetalAvailable: the check of the GPU did not end within 10 s.",
            "It is repeated. If it stays, quit other programs that use the GPU, and restart the Mac.",
        ),
        problem(
            "MetalMissing",
            "MLX finds no GPU",
            "MetalAvailable: MLX found no Metal device.",
            "Run the agent on macOS itself, not in a virtual machine without a GPU.",
        ),
        problem(
            "MetalWrong",
            "the GPU multiplies wrongly",
            "MetalAvailable: the GPU multiplied wrongly.",
            "Restart the Mac, and compare its macOS and MLX versions with those of the others.",
        ),
        problem(
            "MetalCheckFailed",
            "the check of the GPU could not run",
            "MetalAvailable: the check of the GPU could not run, or printed nothing.",
            "Run `python -m engine.device_check` on that Mac with the Python of the agent.",
        ),
        problem(
            "UpdateWaiting",
            "an update waits for a restart",
            "NeedsReboot: an update waits for a restart.",
            "`fleetctl node reboot NODE --drain`.",
        ),
        problem(
            "ProcessUndying",
            "a killed engine does not end",
            "NeedsReboot: an engine was killed and does not end.",
            "`fleetctl node reboot NODE --drain`.",
        ),
        problem(
            "RdmaDown",
            "an RDMA device stays down",
            "NeedsReboot: an RDMA device stays down after a rank has ended.",
            "Pull and replug the cable. If that does not help, `fleetctl node reboot NODE --drain`.",
        ),
        problem(
            "RdmaExhausted",
            "RDMA needs a restart",
            "NeedsReboot: ranks on this Mac failed in two epochs in a row with an error of RDMA that only a restart mends.",
            "`fleetctl node reboot NODE --drain`. The message names the error and its cause.",
        ),
        problem(
            "CameBackTooOften",
            "lost and back too often",
            "Flapping: the node was lost and came back too often.",
            "Look for sleep, a bad cable or a restarting agent. The message has the time of its return.",
        ),
        problem(
            "AgentVersion",
            "agent and reconciler differ in version",
            "VersionSkew: agent and reconciler are more than one minor version apart.",
            "Upgrade the older one.",
        ),
        problem(
            "MlxLmVersion",
            "an untested release of mlx-lm",
            "VersionSkew: mlx-lm is not the release that memory proofs were tested with.",
            "Install the version that the message names.",
        ),
        problem(
            "SameHardware",
            "another node is the same machine",
            "DuplicateHardware: another node is the same machine.",
            "For a clone, start the agent with a new `--state-dir`. After a rename, "
            "`fleetctl delete node OLD`. For two agents on one machine, start both with `--part-of-machine`, "
            "as `fleetctl up --nodes 2` does.",
        ),
        problem(
            "PoolPolicy",
            "a pool keeps it for its owner",
            "Withheld: a pool keeps the Mac for its owner now.",
            "Wait, or change `spec.policy` of the pool.",
        ),
        problem(
            "AddressesChange",
            "addresses of cables change again and again",
            "CablesUnstable: the addresses of Thunderbolt cables change again and again, which ends groups.",
            "Set them by hand instead of DHCP, with a small network of its own for each cable.",
        ),
        problem(
            "MacPanicked",
            "",
            "The kernel of the Mac panicked, and the Mac restarted (event). The message has the beginning of the panic string.",
            "Update macOS. For IOGPUMemory.cpp:550, set `memory: {wired: Off}` in the pool or the deployment.",
        ),
        problem(
            "PanicsRepeatedly",
            "macOS panics repeatedly",
            "KernelPanics: the kernel panicked twice or more within three days; engines start unwired.",
            "Update macOS. `spec.policy.afterPanics: Withhold` of the pool moves replicas away instead.",
        ),
        normal("NoMorePanics", "KernelPanics: no two panics within three days any more."),
        normal("AddressesStable", "CablesUnstable: the addresses of the cables no longer change."),
        problem(
            "LimitDiffers",
            "the wired limit differs from the pool's",
            "WiredLimitDiffers: the GPU may wire another amount of memory than `spec.wiredLimit` of the pool.",
            "Run the command in the message on that Mac; or change or remove the field.",
        ),
        problem(
            "PoolsDisagree",
            "two pools ask for different limits",
            "WiredLimitDiffers: two pools of the Mac ask for different limits.",
            "Give both the same `spec.wiredLimit`, or remove one.",
        ),
        problem(
            "LimitTooLarge",
            "the pool asks for too much memory",
            "WiredLimitDiffers: the pool asks for more memory than the Mac has.",
            "Lower `spec.wiredLimit`, and leave some GiB to macOS; or select other Macs.",
        ),
        problem(
            "NoWiredLimit",
            "only macOS has a wired limit",
            "WiredLimitDiffers: only macOS has a wired limit.",
            "Keep machines with Linux out of the pool, or remove `spec.wiredLimit`.",
        ),
        problem(
            "LimitUnknown",
            "its wired limit is unknown",
            "WiredLimitDiffers: the agent has not reported the effective limit.",
            "Wait ten seconds, and upgrade an older agent.",
        ),
        normal("LimitSet", "WiredLimitDiffers: the Mac has the limit that its pool asks for."),
        problem(
            "PortTaken",
            "the agent's API cannot listen",
            "ApiServing: the agent's API cannot listen. Models are served all the same.",
            "Start the agent with another `--api-port`, or stop the other program.",
        ),
        problem(
            "IdentityRequired",
            "the agent's API needs an identity",
            "ApiServing: other machines can reach the agent's address, and it has no identity. Models are served all the "
            "same; logs and metrics are not.",
            "Give the Mac an identity with `fleetctl join` or `fleetctl secure`, or start the agent with `--insecure-http`.",
        ),
        problem(
            "NotReadable",
            "a part of the machine cannot be read",
            "A part of the machine could not be read for a minute.",
            "The agent's log names it: `fleetctl logs node/NAME`.",
        ),
        problem(
            "WrongSums",
            "sums over its cables are wrong",
            "FabricHealthy: sums over the cables were wrong, so models would give wrong answers.",
            "Replace the cable. Compare the versions of macOS and MLX: `fleetctl version --nodes`.",
        ),
        problem(
            "TooSlow",
            "its cables are too slow",
            "FabricHealthy: JACCL summed 64 MB at less than 5 GB/s.",
            "Look for a cable or a port that is not Thunderbolt 5.",
        ),
        problem(
            "TestBrokeOff",
            "the last cable test lost a rank",
            "FabricHealthy: the last test lost a rank, on this Mac or another.",
            "Run `fleetctl fabric bench GROUP` again.",
        ),
        normal("MetalWorks", "MetalAvailable: MLX computes on the GPU."),
        normal("LeaseHeld", "The agent renews its lease."),
        normal("EnoughMemory", "Memory is not short."),
        normal("EnoughDisk", "There is space for more models."),
        normal("CoolEnough", "Heat slows nothing down."),
        normal("NoSensor", "The machine has no sensor for heat; usual in virtual machines."),
        normal("NothingWaits", "No restart is needed."),
        normal("NothingFound", "No other node is this machine, and no policy withholds it."),
        normal("Steady", "The node does not flap."),
        normal("VersionsAgree", "All versions fit together."),
        normal("Measured", "Sums over the cables are right, and fast enough."),
    ),
)
