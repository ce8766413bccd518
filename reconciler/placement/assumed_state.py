"""What changes while replicas are being placed: room on nodes, and who is where. Pure; the table stays as it is."""

from dataclasses import replace

from reconciler.placement.table import Ints, NodeTable
from reconciler.views import Allocation, NodeView


class AssumedState:
    """The fleet as it will be once what was decided so far is done."""

    def __init__(self, table: NodeTable) -> None:
        self.table = table
        self.free: Ints = table.allocatable - table.used
        self.ending: Ints = table.ending.copy()
        self.promised: Ints = table.promised.copy()
        self.victims: set[str] = set()
        """Replicas that were chosen to make room."""
        self.displaced: set[int] = set()
        """The rows where they are."""
        self.touched: list[int] = []
        """Rows that changed, in the order in which they did."""
        self._counts: dict[str, dict[int, int]] = {}

    def counts(self, deployment: str) -> dict[int, int]:
        """Return how many replicas of the deployment are on which row."""
        found = self._counts.get(deployment)
        return self.table.counts.get(deployment, {}) if found is None else found

    def is_ending(self, row: int, deployment: str) -> bool:
        """Return whether a replica of the deployment is about to end there."""
        return any(
            one.deployment == deployment and (one.is_ending or one.replica in self.victims)
            for one in self.table.nodes[row].allocations
        )

    def assign(self, row: int, deployment: str, size: int) -> None:
        """Put one rank of a replica onto a node."""
        self._count(row, deployment, +1)
        self.free[row] -= size
        self.touched.append(row)

    def release(self, row: int, deployment: str, size: int) -> None:
        """Take back what `assign` did."""
        self._count(row, deployment, -1)
        self.free[row] += size
        self.touched.append(row)

    def keep(self, row: int, size: int) -> None:
        """Count memory on a node that is nobody's rank any more, but not free yet."""
        self.free[row] -= size
        self.touched.append(row)

    def discount(self, row: int, deployment: str) -> None:
        """Let a replica that is about to end count as no sibling any more; its memory stays taken."""
        if self.counts(deployment).get(row, 0):
            self._count(row, deployment, -1)
            self.touched.append(row)

    def promise(self, row: int, size: int) -> None:
        """Keep room on a node for a replica that waits for others to end."""
        self.promised[row] += size
        self.touched.append(row)

    def end(self, row: int, victim: Allocation) -> None:
        """Have a replica make room: its memory is on its way back, on every node that has a rank of it."""
        self.victims.add(victim.replica)
        rows = [self.table.rows[name] for name in victim.nodes if name in self.table.rows]
        for at in rows or [row]:
            there = (
                one for one in self.table.nodes[at].allocations if one.replica == victim.replica
            )
            self.displaced.add(at)
            self.ending[at] += sum(one.bytes for one in there)
            self.touched.append(at)

    def view(self, row: int) -> NodeView:
        """Return the node as it will be."""
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
                replace(tenant, is_ending=True) if tenant.replica in self.victims else tenant
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
