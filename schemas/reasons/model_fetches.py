"""Reasons of models that could not be fetched from a hub."""

from typing import Final

from schemas.reasons.reason import ReasonSection, normal, problem

SECTION: Final = ReasonSection(
    title="Fetching a model",
    shown_by="fleetctl events",
    reasons=(
        problem(
            "WrongBytes",
            "",
            "A file that came from another Mac had the wrong content. That Mac is not asked for an hour.",
            "Run `fleetctl models check --hash` on the Mac that the message names: its disk or memory may be faulty.",
        ),
        normal("AllPresent", "All nodes that spec.preload chose have the files of the model."),
        normal(
            "Preloading",
            "Some of the nodes that spec.preload chose still fetch, or wait for their turn.",
        ),
        normal("PreloadStarted", "A node fetches the model before it gets a replica."),
        problem(
            "PreloadFailing",
            "a Mac cannot fetch the model",
            "A node that spec.preload chose cannot fetch the model. The message has the node's reason; other nodes go on.",
            "The message has the answer of the hub or of the disk. The node tries again by itself.",
        ),
        problem(
            "NoNodeToPreload",
            "no Mac may preload it",
            "No node may run a replica and is in the pools of spec.preload.",
            "Compare `spec.preload.pools` and `spec.placement` with `fleetctl explain placement NAME`.",
        ),
        normal("Resolving", "The reconciler asks the hub which commit the revision is now."),
        normal("ModelResolved", "The deployment's hub model is pinned to a commit."),
        normal(
            "FetchStarting",
            "The Mac asks the hub for the list of files, or waits for another fetch of them.",
        ),
        normal(
            "Downloading",
            "Files arrive. The message has the share, the hub, the rate and the time left.",
        ),
        normal("Verifying", "The files' content is compared with the hub's digests."),
        normal(
            "Present", "The files that the replica's rank needs are verified on the Mac's disk."
        ),
        normal(
            "WaitingForFiles",
            "A rank of a group has its files, and waits for those of another rank. The group's message names that one.",
        ),
        normal("ModelFetched", "A Mac has fetched and verified the model of a replica."),
        problem(
            "NotFound",
            "the hub has no such repository",
            "The hub has no such repository, revision or file, or hides a private one.",
            "Compare the name with the hub's page. A private repository needs a token.",
        ),
        problem(
            "Gated",
            "the hub asks for consent to terms",
            "The authors ask for consent to their terms before a download.",
            "Accept the terms on the repository's page, as the account whose token the fleet uses.",
        ),
        problem(
            "Unauthorized",
            "the hub refused the token",
            "The hub refused the token, or asks for one; or a token would cross the network unencrypted.",
            "Create a token with the right to read the repository, and give it to the fleet.",
        ),
        problem(
            "RateLimited",
            "the hub asks to wait",
            "The hub asks to wait. The fetch waits as long as it is told, and goes on by itself.",
            "A token raises the hub's limits; a mirror has limits of its own.",
        ),
        problem(
            "SourceUnreachable",
            "the hub does not answer",
            "The hub does not answer, breaks off, or answers with an error. The fetch is retried and goes on where it was.",
            "Check the Mac's connection, its proxy, and the endpoint in the message.",
        ),
        problem(
            "ListingRefused",
            "its repository's list of files is unusable",
            "The repository's list of files is unsafe or contradictory, or has no file of an MLX model.",
            "Choose a repository in MLX's format, or name its files. An unsafe list is never fetched in part.",
        ),
        problem(
            "HashMismatch",
            "a fetched file has wrong content",
            "A file came whole with another content than the hub's list names. Nothing of it was kept.",
            "Retry once; if it happens again, the mirror, a proxy or the Mac's memory is faulty.",
        ),
        problem(
            "StoreUnreachable",
            "a Mac cannot read its hub token",
            "The Mac could not read its token for the hub from etcd. The fetch is retried.",
            "Check etcd, as for any other outage of it.",
        ),
        problem(
            "DiskFailed",
            "the models folder cannot be used",
            "The models folder cannot be read or written; the message has the system's error.",
            "Check the folder of the agent's --models-dir, its owner and its disk.",
        ),
        problem(
            "NoSpace",
            "the disk has no room for it",
            "The disk has no room for what is missing, the reserve, and what other fetches still need.",
            "Remove what the message names as collectable, unpin a model, or free space.",
        ),
    ),
)
