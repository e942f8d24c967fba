"""Which stage feeds which: directed edges between stages, a chain unless given.

    chain of 4          a skip connection            two inputs
    0 -> 1 -> 2 -> 3    0 -> 1 -> 2 -> 3             0 -> 2 -> 3
                        '---------^                  1 -> 2

An activation travels along an edge in the forward pass, its gradient against it in the backward pass.
Everything that asks "what does this stage need, whom does it feed" asks the graph.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import numpy as np
import numpy.typing as npt

from penstock.arguments import plural, printable, whole_number
from penstock.errors import PlacementError, ScheduleError
from penstock.ir.action import chain_neighbour
from penstock.ir.kinds import Kind, StageRelation

Edge = tuple[int, int]
"""The stage that feeds, and the stage that is fed."""

MAX_PORTS = 31
"""The most edges of one stage in one direction, beside its neighbour in the chain."""

_EDGE = re.compile(r"([0-9]{1,9})>([0-9]{1,9})")


@dataclass(frozen=True)
class StageGraph:
    """`StageGraph(3, ((0, 1), (1, 2), (0, 2)))` is a chain of three stages with a skip connection."""

    num_stages: int
    edges: tuple[Edge, ...]
    """In ascending order; costs per edge are in this order."""

    def __post_init__(self) -> None:
        edges = tuple(sorted((_whole(source), _whole(target)) for source, target in self.edges))
        object.__setattr__(self, "edges", edges)
        problems = [
            f"edge {source} -> {target}: stages are 0 to {self.num_stages - 1}"
            for source, target in edges
            if not (0 <= source < self.num_stages and 0 <= target < self.num_stages)
        ]
        problems += [f"duplicate edge {s} -> {t}" for (s, t), count in Counter(edges).items() if count > 1]
        if problems:
            raise PlacementError("; ".join(problems[:8]))
        try:
            TopologicalSorter(self._inputs).prepare()
        except CycleError as error:
            cycle = " -> ".join(map(str, error.args[1]))
            raise PlacementError(f"stages feed each other in a cycle: {cycle}") from None
        if crowded := [
            s for ports in self._extra_ports for s, others in ports.items() if len(others) > MAX_PORTS
        ]:
            raise PlacementError(f"stage {crowded[0]} has more than {MAX_PORTS} edges in one direction")

    @classmethod
    def parse(cls, text: str) -> StageGraph:
        """From the text of its edges, as in CSV files: `StageGraph.parse("0>1,1>2,0>2")`."""
        edges = [parse_edge(each.strip()) for each in text.split(",")]
        most = max(stage for edge in edges for stage in edge)
        if most > 2 * len(edges):
            raise PlacementError(
                f"{plural(len(edges), 'edge')} cannot connect stages 0 to {most}; stage numbers have no gaps"
            )
        return cls(most + 1, tuple(edges))

    @classmethod
    def chain(cls, num_stages: int) -> StageGraph:
        """0 -> 1 -> 2 -> ..."""
        graph = cls.__new__(cls)  # a chain needs no checks, and can be long
        edges = tuple(zip(range(num_stages - 1), range(1, num_stages)))
        graph.__dict__.update(num_stages=num_stages, edges=edges, is_chain=True)
        return graph

    @cached_property
    def is_chain(self) -> bool:
        """Whether every stage feeds the next one and no other."""
        return len(self.edges) == self.num_stages - 1 and all(t == s + 1 for s, t in self.edges)

    @cached_property
    def _inputs(self) -> dict[int, list[int]]:
        return self._neighbours(target=True)

    @cached_property
    def _outputs(self) -> dict[int, list[int]]:
        return self._neighbours(target=False)

    def _neighbours(self, *, target: bool) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {stage: [] for stage in range(self.num_stages)}
        for edge in self.edges:
            found[edge[target]].append(edge[not target])
        return found

    def inputs(self, stage: int) -> tuple[int, ...]:
        """The stages that feed this one."""
        return tuple(self._inputs[stage])

    def outputs(self, stage: int) -> tuple[int, ...]:
        """The stages that this one feeds."""
        return tuple(self._outputs[stage])

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The stages that no stage feeds: they take the batch."""
        return tuple(stage for stage, inputs in self._inputs.items() if not inputs)

    @cached_property
    def sinks(self) -> tuple[int, ...]:
        """The stages that feed no stage: their outputs are those of the model."""
        return tuple(stage for stage, outputs in self._outputs.items() if not outputs)

    @cached_property
    def number(self) -> dict[Edge, int]:
        """The position of each edge in `edges`."""
        return {edge: i for i, edge in enumerate(self.edges)}

    @cached_property
    def ends(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Per edge: the stage that feeds, and the stage that is fed."""
        pairs = np.array(self.edges, dtype=np.int64).reshape(-1, 2)
        return pairs[:, 0].copy(), pairs[:, 1].copy()

    @cached_property
    def forward_order(self) -> tuple[int, ...]:
        """The stages so that each comes after all that feed it, the lowest possible number first."""
        if self.is_chain:
            return tuple(range(self.num_stages))
        left = {stage: len(inputs) for stage, inputs in self._inputs.items()}
        ready, found = list(self.sources), []
        while ready:
            found.append(stage := heapq.heappop(ready))
            for fed in self._outputs[stage]:
                left[fed] -= 1
                if not left[fed]:
                    heapq.heappush(ready, fed)
        return tuple(found)

    def carriers(self, rank_of_stage: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Per edge: the edge whose message brings its activation, given the rank of each stage.

        A value that several stages of a rank use crosses once, on the edge to the first of them in the order of
        the graph.
        """
        found = np.arange(len(self.edges), dtype=np.int64)
        if self.is_chain:
            return found
        position = {stage: i for i, stage in enumerate(self.forward_order)}
        first: dict[tuple[int, int], int] = {}
        for number in sorted(found.tolist(), key=lambda number: position[self.edges[number][1]]):
            source, target = self.edges[number]
            if rank_of_stage[source] != rank_of_stage[target]:
                found[number] = first.setdefault((source, int(rank_of_stage[target])), number)
        return found

    # --- messages ----------------------------------------------------------------------------------

    @cached_property
    def _extra_ports(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Along `_inputs` and `_outputs`: the neighbours that are not the chain's; port p is entry p - 1."""
        inputs = {s: [u for u in others if u != s - 1] for s, others in self._inputs.items()}
        outputs = {s: [t for t in others if t != s + 1] for s, others in self._outputs.items()}
        return inputs, outputs

    def _ports(self, kind: Kind) -> dict[int, list[int]]:
        return self._extra_ports[kind.spec.other_end is StageRelation.OUTPUTS]

    def port(self, kind: Kind, stage: int, peer: int) -> int:
        """The port of a message between two stages."""
        if peer == chain_neighbour(kind, stage):
            return 0
        others = self._ports(kind).get(stage, [])
        if peer not in others:
            raise ScheduleError(
                f"{kind} of stage {stage} names stage {peer} as its other end, but no edge joins them"
            )
        return 1 + others.index(peer)

    def peer(self, kind: Kind, stage: int, port: int) -> int:
        """The stage at the other end of a message, whether or not there is such an edge for port 0."""
        return self._ports(kind)[stage][port - 1] if port else chain_neighbour(kind, stage)

    @cached_property
    def num_ports(self) -> int:
        """One more than the highest port."""
        if self.is_chain:
            return 1
        return 1 + max((len(others) for ports in self._extra_ports for others in ports.values()), default=0)

    def edges_by_port(self, kind: Kind) -> npt.NDArray[np.int64]:
        """Per stage and port: the number of the edge that a message of this kind travels on, -1 for none."""
        towards_output = kind.spec.other_end is StageRelation.OUTPUTS
        if self.is_chain:
            edge = np.arange(self.num_stages, dtype=np.int64)
            return np.append(edge[:-1], -1)[:, None] if towards_output else edge[:, None] - 1
        found = np.full((self.num_stages, self.num_ports), -1, dtype=np.int64)
        for i, (source, target) in enumerate(self.edges):
            stage, other = (source, target) if towards_output else (target, source)
            found[stage, self.port(kind, stage, other)] = i
        return found


def parse_edge(text: str) -> Edge:
    """Read the text of one edge: `0>2`."""
    match = _EDGE.fullmatch(text)
    if match is None:
        given = printable(repr(text))
        raise PlacementError(f"{given} is not an edge; write 0>2 for stage 0 that feeds 2")
    return int(match[1]), int(match[2])


def _whole(number: object) -> int:
    whole = whole_number(number)
    if whole is None:
        raise PlacementError(f"an edge joins two stage numbers (given {number!r})")
    return whole
