"""Reasons of replicas: the state of their engines and of the epochs of shard groups."""

from typing import Final

from schemas.reasons.reason import ReasonSection, normal, problem

SECTION: Final = ReasonSection(
    title="Replica: Ready, EpochOver, CrashLooping, PrefixesPinned",
    shown_by="fleetctl describe replica NAME",
    reasons=(
        problem(
            "EngineEnded",
            "its engine ended",
            "The engine process ended; the message has its code and last line.",
            "It is restarted with growing delays. Read `fleetctl logs NAME`.",
        ),
        problem(
            "ModelUnusable",
            "its engine cannot load the model",
            "The engine cannot load the model, or refuses a flag (exit code 2).",
            "The message names the file, the flag or the memory: correct it. It is tried again within five minutes. "
            "`fleetctl logs NAME` shows what the engine wrote.",
        ),
        problem(
            "MemoryExceeded",
            "its engine used too much memory",
            "The engine used more than 1.5 times the proven memory and 1 GiB for 10 s, and was ended.",
            "It starts again with growing delays. Lower `contextLength` or `concurrency`, or raise "
            "`spec.resources.memory`.",
        ),
        problem(
            "LoadStuck",
            "loading the model stood still",
            "The engine's load stood still for 10 minutes, so it was ended.",
            "It starts again with growing delays. Look at the disk of that Mac.",
        ),
        problem(
            "EngineStuck",
            "its engine stopped computing",
            "The engine answers its health check, but the thread that computes made no progress for 25 s more than its "
            "slowest step (120 s before its first one), so it was ended.",
            "Its requests go on elsewhere, and it starts again with growing delays. If that repeats, restart that Mac, and "
            "compare its macOS and MLX versions with those of the others.",
        ),
        problem(
            "PortInUse",
            "another program has the engine's port",
            "Another program took the engine's port or socket first.",
            "It starts again on another one. If that repeats, end that program, or start the agent with "
            "another `--engine-port`.",
        ),
        problem(
            "EngineFailed",
            "its engine cannot serve",
            "The engine reports that it cannot serve.",
            "It is restarted. Read `fleetctl logs NAME`.",
        ),
        problem(
            "EngineSilent",
            "its engine does not answer checks",
            "The engine runs, but does not answer its health check.",
            "The agent ends it after 60 s, and starts it again with growing delays. Look for swapping on the Mac.",
        ),
        problem(
            "ProbeFailed",
            "the model gives wrong answers",
            "The model is loaded, but its first token or its golden answer is wrong.",
            "Compare the model's files with their source, and the versions of macOS and MLX.",
        ),
        problem(
            "CannotStart",
            "the Mac cannot start its engine",
            "The Mac could not start the engine's process: no port, no disk, no address on the cables, a hard limit of "
            "open files below 4,096, no working GPU, or `fleetctl stop` was used there.",
            "The message has the error of the system. Correct it on that Mac; it is tried again with growing delays. After "
            "half a minute the replica moves to another Mac with room, unless fleetctl stopped its engines there.",
        ),
        problem(
            "AgentAway",
            "the Mac's agent does not answer",
            "The Mac's agent does not answer; its engine may still serve.",
            "Start `fleet-nodeagent` on that Mac. It adopts the engine.",
        ),
        problem(
            "WaitingForAgent",
            "the agent has not reported yet",
            "The agent has not reported on this replica yet.",
            "Wait some seconds. If it stays, see whether the agent runs: `fleetctl get nodes`.",
        ),
        problem(
            "NodeLost",
            "a Mac of its group is away",
            "A Mac of the shard group is away.",
            "The group starts again on a spare or as a fallback. Wake or replace the Mac.",
        ),
        problem(
            "RankEnded",
            "a rank ended",
            "The process of a rank ended or reports a failure, or is gone after the agent's restart.",
            "The group starts again. Read `fleetctl logs NAME --all-ranks`.",
        ),
        problem(
            "RankSilent",
            "a rank does not answer",
            "A rank does not answer its agent.",
            "The group starts again. Look for swapping on that Mac.",
        ),
        problem(
            "RankStuck",
            "a rank makes no progress",
            "A rank works, but makes no progress.",
            "The group starts again. Test the cables: `fleetctl fabric bench GROUP`.",
        ),
        problem(
            "GoldenFailed",
            "the group gives wrong answers",
            "The group's answer to the fixed question is not the expected one, or did not come three times.",
            "Compare the versions of macOS and MLX (`fleetctl version --nodes`), and test the cables.",
        ),
        problem(
            "TriedEverything",
            "every shape of its group failed",
            "Every shape of the group failed three times in a row.",
            "It is tried again within five minutes. To try at once: `fleetctl rollout restart DEPLOYMENT`.",
        ),
        problem(
            "MeasuredMore",
            "it takes more memory than proven",
            "The engine takes more memory than was proven; the proof was raised.",
            "Set `spec.resources.memory` as the message says, or lower `contextLength` or `concurrency`.",
        ),
        problem(
            "NotPinned",
            "a prefix is not pinned",
            "A prefix of `spec.prefixes` is not pinned; the message has its name and why. The replica serves all the same.",
            "Copy the file to the models folder of this Mac, or raise `tokens`, as the message says; then "
            "`fleetctl rollout restart DEPLOYMENT`.",
        ),
        normal("Pinned", "The engine has read all of `spec.prefixes`, and never evicts them."),
        normal("ReadingPrefixes", "The engine reads `spec.prefixes` beside requests."),
        normal("Serving", "The replica answers requests."),
        normal("Following", "A rank above 0 computes; rank 0 answers."),
        normal("Starting", "The engine is about to start."),
        normal("WaitingToLoad", "Other engines of the Mac load first; the message has its place."),
        normal("Joining", "A rank waits for the other ranks."),
        normal("MakingReference", "One process answers the golden question for comparison."),
        normal("Loading", "The engine loads the model."),
        normal(
            "WarmingUp",
            "The engine generates its first token, its answer is checked, or it reads prompts of other replicas (20 s at most).",
        ),
        normal("EngineDraining", "The engine finishes its requests and takes no new ones."),
        normal("Stopping", "The replica is being deleted."),
        normal("EngineEnding", "The engine has not ended yet."),
        normal("Served", "The epoch has served for a minute."),
        normal("New", "The epoch has served for less than a minute."),
        normal("GoesOn", "The epoch continues."),
        normal("MayGoOn", "The group may start again."),
    ),
)
