"""Actions in a few characters, so that tables of situations stay short."""

from reconciler.deployments.actions import (
    Action,
    AdoptReplica,
    CreateReplica,
    DeleteReplica,
    EndPreload,
    MoveReplica,
    OrphanReplica,
    PreemptReplica,
    ReformReplica,
    ReleaseRanks,
    RemoveDeployment,
    RemoveReplica,
    RemoveRevision,
    SaveRevision,
    StartPreload,
    StartRanks,
)

_SIGNS = {
    OrphanReplica: "o",
    AdoptReplica: "a",
    ReleaseRanks: "f",
    StartRanks: "s",
    RemoveReplica: "x",
    RemoveDeployment: "X",
}


def short(action: Action) -> str:
    """Return an action in a few characters."""
    match action:
        case CreateReplica(name=name, ranks=ranks):
            return f"+{name}@{','.join(rank.node for rank in ranks)}"
        case MoveReplica(name=name, ranks=ranks):
            return f">{name}@{','.join(rank.node for rank in ranks)}"
        case ReformReplica(name=name, ranks=ranks, form=form):
            back = f"/{form.fallback}" if form.fallback else ""
            return f"~{name}@{','.join(rank.node for rank in ranks)}{back}"
        case DeleteReplica(name=name, because=because):
            return f"-{name} {because}"
        case PreemptReplica(name=name, by=by):
            return f"!{name} for {by}"
        case StartPreload(node=node):
            return f"p@{node}"
        case EndPreload(node=node):
            return f"xp@{node}"
        case SaveRevision(number=number):
            return f"r{number}"
        case RemoveRevision(name=name):
            return f"xr {name}"
        case _:
            return f"{_SIGNS[type(action)]}{action.name}"
