"""Graph of the stages of a pipeline: an order in which they can run, and the longest way."""

from typing import Any

from veloxquant.core.exceptions import CyclicPipelineError


class QuantizationGraph:
    """Directed graph of objects, told apart by identity."""

    def __init__(self) -> None:
        self._nodes: dict[int, Any] = {}
        self._after: dict[int, list[int]] = {}

    def add_node(self, handler: Any) -> None:
        """Add a stage; one that is there already stays as it is."""
        self._nodes.setdefault(id(handler), handler)
        self._after.setdefault(id(handler), [])

    def add_edge(self, src: Any, dst: Any) -> None:
        """Let `dst` run after `src`; both are added when they are missing."""
        self.add_node(src)
        self.add_node(dst)
        if id(dst) not in self._after[id(src)]:
            self._after[id(src)].append(id(dst))

    def _sorted(self) -> list[int]:
        """Ids in an order that respects all edges; some are missing when there is a cycle."""
        waiting = dict.fromkeys(self._nodes, 0)
        for targets in self._after.values():
            for target in targets:
                waiting[target] += 1
        ready = [node for node, count in waiting.items() if count == 0]
        for node in ready:  # grows while it is walked
            for target in self._after[node]:
                waiting[target] -= 1
                if waiting[target] == 0:
                    ready.append(target)
        return ready

    def has_cycle(self) -> bool:
        """Whether some stage would have to run before itself."""
        return len(self._sorted()) < len(self._nodes)

    def topological_sort(self) -> list[Any]:
        """Stages in an order that respects all edges.

        Raises:
            CyclicPipelineError: when there is none.
        """
        order = self._sorted()
        if len(order) < len(self._nodes):
            stuck = [type(n).__name__ for i, n in self._nodes.items() if i not in set(order)]
            raise CyclicPipelineError(
                f"stages wait for each other in a circle, among them {', '.join(stuck)}; "
                f"remove an edge"
            )
        return [self._nodes[node] for node in order]

    def critical_path(self) -> list[Any]:
        """The longest chain of stages; empty without stages, the first one found among equals.

        Raises:
            CyclicPipelineError: when there is a cycle.
        """
        order = [id(node) for node in self.topological_sort()]
        length = dict.fromkeys(order, 1)
        before: dict[int, int] = {}
        for node in order:
            for target in self._after[node]:
                if length[node] + 1 > length[target]:
                    length[target], before[target] = length[node] + 1, node
        if not order:
            return []
        path = [max(order, key=length.__getitem__)]
        while path[-1] in before:
            path.append(before[path[-1]])
        return [self._nodes[node] for node in reversed(path)]
