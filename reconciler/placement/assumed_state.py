"""The assumed state (kube-scheduler's assume cache): the node table plus decisions that are not written yet. Pure."""

from dataclasses import replace

from reconciler.placement.inputs import Allocation, NodeView
from reconciler.placement.table import Ints, NodeTable


class AssumedState:
    """Free memory and replica counts per row, as they will be after all decisions so far; the table never changes."""

    def __init__(self, table: NodeTable) -> None:
        self.table = table
        self.free: Ints = table.allocatable - table.used
        self.ending: Ints = table.ending.copy()
        self.promised: Ints = table.promised.copy()
        self.victims: set[str] = set()
        """Replicas that are preempted."""
        self.displaced: set[int] = set()
        """The rows of preempted replicas."""
        self.touched: list[int] = []
        """Changed rows in the order of the changes; rankings read it from where they stopped."""
        self._counts: dict[str, dict[int, int]] = {}

    def counts(self, deployment: str) -> dict[int, int]:
        """Return the number of the deployment's replicas by row."""
        found = self._counts.get(deployment)
        return self.table.counts.get(deployment, {}) if found is None else found

    def is_ending(self, row: int, deployment: str) -> bool:
        """Return whether a replica of the deployment on the row is ending."""
        return any(
            one.deployment == deployment and (one.is_ending or one.replica in self.victims)
            for one in self.table.nodes[row].allocations
        )

    def assign(self, row: int, deployment: str, size: int) -> None:
        """Add one rank of a replica to a node."""
        self._count(row, deployment, +1)
        self.free[row] -= size
        self.touched.append(row)

    def release(self, row: int, deployment: str, size: int) -> None:
        """Undo `assign`."""
        self._count(row, deployment, -1)
        self.free[row] += size
        self.touched.append(row)

    def keep(self, row: int, size: int) -> None:
        """Count memory of a rank that leaves a node but still runs."""
        self.free[row] -= size
        self.touched.append(row)

    def discount(self, row: int, deployment: str) -> None:
        """Stop counting an ending replica as a sibling; its memory stays in use."""
        if self.counts(deployment).get(row, 0):
            self._count(row, deployment, -1)
            self.touched.append(row)

    def promise(self, row: int, size: int) -> None:
        """Reserve memory on a node for a replica that waits for others to end."""
        self.promised[row] += size
        self.touched.append(row)

    def end(self, row: int, victim: Allocation) -> None:
        """Preempt a replica: count its memory as ending on every node with a rank of it."""
        self.victims.add(victim.replica)
        rows = [self.table.rows[name] for name in victim.nodes if name in self.table.rows]
        for at in rows or [row]:
            here = self.table.nodes[at].allocations
            sizes = (one.bytes for one in here if one.replica == victim.replica)
            self.displaced.add(at)
            self.ending[at] += sum(sizes)
            self.touched.append(at)

    def view(self, row: int) -> NodeView:
        """Return the node with the assumed state."""
        node = self.table.nodes[row]
        replicas = dict(node.replicas)
        for deployment, rows in self._counts.items():
            replicas.pop(deployment, None)
            if rows.get(row, 0):
                replicas[deployment] = rows[row]
        return replace(
            node,
            used_bytes=node.allocatable_bytes - int(self.free[row]),
            promised_bytes=int(self.promised[row]),
            replicas=replicas,
            allocations=tuple(
                tenant._replace(is_ending=True) if tenant.replica in self.victims else tenant
                for tenant in node.allocations
            ),
        )

    def _count(self, row: int, deployment: str, change: int) -> None:
        own = self._counts.get(deployment)
        if own is None:
            own = self._counts[deployment] = dict(self.table.counts.get(deployment, {}))
        left = own.get(row, 0) + change
        if left:
            own[row] = left
        else:
            own.pop(row, None)
