"""Reasons of ShardGroups: why a group cannot be formed, and what is wrong with its cables."""

from typing import Final

from schemas.reasons.reason import ReasonSection, problem

_RECOVERY: Final = (
    "Start the Mac into Recovery, run `rdma_ctl enable` in Terminal, and restart. "
    "This cannot be done remotely."
)

SECTION: Final = ReasonSection(
    title="A shard group cannot be formed",
    shown_by="fleetctl explain placement NAME",
    reasons=(
        problem(
            "NoSuchGroup",
            "its ShardGroup does not exist",
            "`spec.sharding` names a ShardGroup that does not exist.",
            "Create the group, apply it again if it was deleted by hand, or correct the name.",
        ),
        problem(
            "UnknownNode",
            "a member never joined",
            "A member never joined the fleet.",
            "Correct `spec.members`, or start the agent with that `--name`.",
        ),
        problem(
            "TooFew",
            "its group has fewer than two Macs",
            "A group needs two Macs at least.",
            "Add a member, or leave out `spec.sharding` of the deployment.",
        ),
        problem(
            "TooMany",
            "JACCL connects 8 Macs at most",
            "JACCL connects 8 Macs at most.",
            "Write `backend: ring`, or a smaller `size`.",
        ),
        problem(
            "TooFewMembers",
            "too few Macs match the group's selector",
            "The group's selector matches fewer Macs than `size`.",
            "Label more Macs, or lower `size`.",
        ),
        problem(
            "NodeUnknown",
            "a member has never reported",
            "The agent of a member has never reported.",
            "Start the agent, or correct `spec.members`.",
        ),
        problem(
            "NotReady",
            "a member of its group is offline",
            "The agent of a member does not answer, and the group has no spare.",
            "Start the agent, or add a spare to `spec.members`.",
        ),
        problem(
            "TensorImpossible",
            "its heads cannot be split over these Macs",
            "The model's heads cannot be split over this number of Macs.",
            "Use a number from the message, or `parallelism: Pipeline`.",
        ),
        problem(
            "PipelineImpossible",
            "its layers cannot be divided over these Macs",
            "The model's layers cannot be divided over this number of Macs.",
            "Use a number from the message, or another model.",
        ),
        problem(
            "UnequalMembers",
            "tensor parallelism needs equal Macs",
            "Tensor needs equal Macs.",
            "Set `parallelism: Pipeline`, or `allowUnequal: true`.",
        ),
        problem(
            "ModelsDiffer",
            "its Macs have different models",
            "The Macs have different models at the same path.",
            "Copy one model to all of them.",
        ),
    ),
)

CABLES: Final = ReasonSection(
    title="Cables and settings of a shard group",
    shown_by="fleetctl fabric check GROUP",
    reasons=(
        problem(
            "NoCable",
            "a Thunderbolt cable is missing",
            "Two Macs that need a Thunderbolt cable have none.",
            "Plug in the cables that the message names, use the ring that it offers (`backend: jaccl-ring`), or "
            "change the order of the members.",
        ),
        problem(
            "WrongCable",
            "a cable leads to another port",
            "A cable leads to another port than `spec.members[].rdma` says; names change at restarts (mlx #3207).",
            "Correct `spec.members[].rdma`, or leave it out: agents find the cables.",
        ),
        problem(
            "SlowCable",
            "a cable is slower than Thunderbolt 5",
            "The cable or a port is slower than Thunderbolt 5 (80 Gbit/s).",
            "Use a Thunderbolt 5 cable between Thunderbolt 5 ports.",
        ),
        problem(
            "PortDown",
            "an RDMA port is down",
            "The RDMA device of a cable is down: RDMA is off at the other end, the port is dead (exo #1973), or it is the "
            "port next to Ethernet on a Mac Studio.",
            "Turn RDMA on at both ends, and replug the cable. If it stays, restart the Mac, or use another port.",
        ),
        problem(
            "InBridge",
            "a cable belongs to the Thunderbolt Bridge",
            "The cable's interface belongs to an active Thunderbolt Bridge.",
            "`sudo fleetctl fabric setup` on that Mac.",
        ),
        problem(
            "NoLinkAddress",
            "a cable has no IPv4 address",
            "The cable's interface has no IPv4 address, by which JACCL finds a cable (mlx #3467, #4191).",
            "`sudo fleetctl fabric setup` on that Mac.",
        ),
        problem(
            "SameAddress",
            "both ends of a cable share an address",
            "Both ends of a cable have the same address.",
            "`sudo fleetctl fabric setup` on both Macs.",
        ),
        problem(
            "NoDevice",
            "a port has no RDMA device",
            "A port has no RDMA device, or `spec.members[].rdma` names one that does not exist.",
            "Use a port that has one. Leave `spec.members[].rdma` out if agents find the cables.",
        ),
        problem(
            "DevicesDiffer",
            "two ends name different numbers of devices",
            "`spec.members` names a different number of devices at the two ends.",
            "Name one device for each cable at both ends, or none.",
        ),
        problem(
            "NoAddress",
            "a Mac reports no address",
            "A Mac reports no address.",
            "Start its agent with `--address`, or write `spec.members[].addresses`.",
        ),
        problem(
            "LoopbackAddress",
            "a Mac gives a loopback address",
            "One of several Macs gives 127.0.0.1, an address that only itself reaches.",
            "Start its agent with `--address`, or write `spec.members[].addresses`.",
        ),
        problem(
            "NotPointToPoint",
            "ranks would listen on a shared network",
            "A rank would listen on a network that other machines share. Ranks neither encrypt prompts nor authenticate "
            "each other.",
            "Write addresses of Thunderbolt ports or of the Thunderbolt bridge in `spec.members[].addresses`, or "
            "`spec.allowUnencryptedRing: true` if you trust every machine on that network.",
        ),
        problem(
            "NotItsAddress",
            "a Mac lacks its written address",
            "A Mac does not have the address that is written for it.",
            "Correct `spec.members[].addresses`.",
        ),
        problem(
            "NoMeetingPlace",
            "rank 0 has no common address",
            "The first address of rank 0 belongs to one cable, and its agent has no other address.",
            "Start the agent with an `--address` in the common network.",
        ),
        problem(
            "NotAMac",
            "RDMA over Thunderbolt needs a Mac",
            "RDMA over Thunderbolt needs a Mac.",
            "Use `backend: ring`.",
        ),
        problem(
            "FabricUnknown",
            "an agent has not reported its ports",
            "The agent has not reported its ports yet, could not read them, or is older.",
            "Wait a minute. Then see `fleetctl logs node/NODE`, and upgrade an older agent.",
        ),
        problem(
            "NoThunderbolt5",
            "a Mac has no Thunderbolt 5",
            "The Mac has no Thunderbolt 5 port. M4 Pro, M4 Max, M3 Ultra, M5 Pro, M5 Max and M5 Ultra have one.",
            "Use `backend: ring`, or another Mac.",
        ),
        problem(
            "NoRdma",
            "macOS before 26.2 has no RDMA",
            "macOS before 26.2 has no RDMA over Thunderbolt.",
            "Upgrade macOS, or use `backend: ring`.",
        ),
        problem(
            "RdmaOff",
            "RDMA is turned off on a Mac",
            "RDMA is turned off on the Mac: `rdma_ctl status` says disabled.",
            _RECOVERY,
        ),
        problem(
            "NoRdmaDevice",
            "RDMA lists no device on a Mac",
            "RDMA is on, but `ibv_devinfo` lists no device (mlx #3777).",
            "Restart the Mac. If that does not help, switch RDMA off and on again in Recovery.",
        ),
        problem(
            "NoJacclInMlx",
            "a Mac's MLX lacks JACCL",
            "The MLX of the Mac was built for macOS 14 or 15, without JACCL. Only the wheels for macOS 26 have it.",
            "Install mlx-fleet there from an archive with the wheels of all versions, which `fleetctl bundle create` "
            "writes.",
        ),
        problem(
            "BuildsDiffer",
            "the Macs run different builds of macOS",
            "The Macs run different builds of macOS.",
            "Install the same version on all of them.",
        ),
        problem(
            "NeedsReboot",
            "a member must be restarted",
            "A Mac must be restarted before it can be a member.",
            "`fleetctl node reboot NODE --drain`; the message says why.",
        ),
        problem(
            "FabricUnhealthy",
            "the cables failed their last measurement",
            "The last measurement of the cables failed.",
            "Correct what the message says, and run `fleetctl fabric bench GROUP`.",
        ),
    ),
)
