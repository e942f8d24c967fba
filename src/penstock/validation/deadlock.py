"""Whether the ranks can wait for each other in a cycle, under four ways of sending.

    buffered        a send never waits; a step waits for the sends of what it needs
    edge-streams    messages move in the background, a message needs its send and its receive to be
                    reached, and those of one channel (ordered pair of ranks) move one after the other
    shared-stream   the same, but all messages of a rank, in and out, move one after the other in the order
                    of its list, as on one communicator
    rendezvous      a send holds up its rank until the receive is reached, and a receive until the send is

Each waits wherever the one before it waits, and more. So a schedule that is safe under `rendezvous` is safe
under all four, which is decided first and fast; a schedule that is not is tried from the top.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.columns import Columns, Ints
from penstock.replay import Inputs, replay
from penstock.validation.communication import Messages
from penstock.validation.violation import Violation, Wait, slot_at

__all__ = ["MODELS", "no_deadlock"]

MODELS = ("buffered", "edge-streams", "shared-stream", "rendezvous")


_LIST = "it comes earlier in the list"


class Waits(NamedTuple):
    """Node `after[i]` waits for node `before[i]`: seen by a person, slot `waiter[i]` for slot `awaited[i]`.

    Nodes are the slots, and behind them the messages.
    """

    before: Ints
    after: Ints
    awaited: Ints
    waiter: Ints
    why: str


def no_deadlock(messages: Messages, models: Sequence[str] = MODELS) -> Iterator[Violation]:
    """No cycle of waits under any of these models, whatever the costs are."""
    columns = messages.columns
    num_nodes = len(columns.rank) + len(messages.send)
    if not columns.has_communication:
        if not _data_flows(columns) and (cycle := _find_cycle(num_nodes, _data_graph(columns))):
            yield _violation(columns, MODELS, cycle)
        return
    if messages.in_order and _all_meet(messages):
        return
    # on a channel that mixes up its messages, only the first model says anything real
    for i, model in enumerate(models if messages.in_order else models[:1]):
        if cycle := _find_cycle(num_nodes, _message_graph(messages, model)):
            yield _violation(columns, MODELS[i:], cycle)
            return


def _data_flows(columns: Columns) -> bool:
    """Without communication: whether every rank reaches the end of its list."""
    producer, consumer = columns.crossings
    n = len(columns.rank)
    inputs = Inputs.of(n, producer, consumer, np.zeros_like(producer))
    return not replay(columns, inputs, [1] * n, [0] * columns.placement.num_ranks).stuck


def _all_meet(messages: Messages) -> bool:
    """Under `rendezvous`: whether every message finds both of its ranks waiting for it.

    Only messages can hold up a rank, so each rank is a walk over its messages: who comes to one first waits
    there, who comes second goes on and wakes the first.
    """
    columns = messages.columns
    there = np.flatnonzero(messages.paired)
    slots = columns.slot[np.concatenate((messages.send[there], messages.receive[there]))]
    order = np.argsort(slots)
    number = (order % max(len(there), 1)).tolist()
    bounds = np.searchsorted(slots[order], columns.slot_bounds).tolist()
    walks = [iter(number[begin:end]) for begin, end in pairwise(bounds)]
    first_there = [-1] * len(there)
    met = 0
    ready = list(range(len(walks)))
    while ready:
        rank = ready.pop()
        for message in walks[rank]:
            other = first_there[message]
            if other < 0:
                first_there[message] = rank
                break
            met += 1
            ready.append(other)
    return met == len(there)


# --- the slow and telling way, for schedules that are known to be wrong somewhere --------------------


def _lists(columns: Columns) -> Waits:
    """Every step waits for the one before it on its rank."""
    slots = np.arange(max(len(columns.rank) - 1, 0))
    slots = slots[columns.rank[:-1] == columns.rank[1:]]
    return Waits(slots, slots + 1, slots, slots + 1, _LIST)


def _data_graph(columns: Columns) -> list[Waits]:
    producer, consumer = columns.crossings
    return [_lists(columns), Waits(producer, consumer, producer, consumer, "it needs what this computes")]


def _message_graph(messages: Messages, model: str) -> list[Waits]:
    columns = messages.columns
    there = np.flatnonzero(messages.paired)
    node = len(columns.rank) + there
    send, receive = columns.slot[messages.send[there]], columns.slot[messages.receive[there]]
    used = messages.consumer[there] >= 0
    consumer = columns.slot[messages.consumer[there][used]]
    graph = [_lists(columns)]
    if model == "buffered":
        return [*graph, Waits(send[used], consumer, send[used], consumer, "it needs what this sends")]
    graph += [
        Waits(send, node, send, receive, "a receive completes only with its send"),
        Waits(receive, node, receive, send, "a send completes only with its receive"),
        Waits(node[used], consumer, receive[used], consumer, "it needs what this receives"),
    ]
    if model == "rendezvous":
        for slot in (send, receive):
            inner = slot[slot + 1 < len(columns.rank)]
            inner_node = node[slot + 1 < len(columns.rank)]
            same = columns.rank[inner] == columns.rank[inner + 1]
            graph.append(Waits(inner_node[same], inner[same] + 1, inner[same], inner[same] + 1, _LIST))
        return graph
    source, target = messages.source[there], messages.target[there]
    if model == "edge-streams":
        channel = source * columns.placement.num_ranks + target
        return [*graph, _stream(channel, send, node, "it is ahead of it between these two ranks")]
    rank, slot, twice = (np.concatenate(ends) for ends in ((source, target), (send, receive), (node, node)))
    return [*graph, _stream(rank, slot, twice, "it is ahead of it in the rank's one stream")]


def _stream(stream: Ints, slot: Ints, node: Ints, why: str) -> Waits:
    """Messages of one stream wait for the one before them."""
    order = np.lexsort((slot, stream))
    slot, node, stream = slot[order], node[order], stream[order]
    same = stream[1:] == stream[:-1]
    return Waits(node[:-1][same], node[1:][same], slot[:-1][same], slot[1:][same], why)


def _find_cycle(num_nodes: int, graph: list[Waits]) -> list[tuple[int, int, str]]:
    """The waits of one cycle as (waiter, awaited, why), without steps along a list; empty if there is none."""
    before, after, awaited, waiter = (
        np.concatenate([getattr(waits, side) for waits in graph]).tolist()
        for side in ("before", "after", "awaited", "waiter")
    )
    why = [waits.why for waits in graph for _ in range(len(waits.before))]
    leaving: list[list[int]] = [[] for _ in range(num_nodes)]
    arriving: list[list[int]] = [[] for _ in range(num_nodes)]
    for e, (b, a) in enumerate(zip(before, after)):
        leaving[b].append(e)
        arriving[a].append(e)
    missing = [len(edges) for edges in arriving]
    free = [n for n, count in enumerate(missing) if not count]
    for n in free:  # grows while it is walked
        for e in leaving[n]:
            missing[after[e]] -= 1
            if not missing[after[e]]:
                free.append(after[e])
    if len(free) == num_nodes:
        return []
    # walk against the waits; a rank's own list comes first in `arriving`, which leads to where it is stuck
    node = next(n for n, count in enumerate(missing) if count)
    path: list[int] = []
    seen: dict[int, int] = {}
    while node not in seen:
        seen[node] = len(path)
        edge = next(e for e in arriving[node] if missing[before[e]])
        path.append(edge)
        node = before[edge]
    return [(waiter[e], awaited[e], why[e]) for e in path[seen[node] :] if why[e] != _LIST]


def _violation(columns: Columns, models: tuple[str, ...], cycle: list[tuple[int, int, str]]) -> Violation:
    start = min(range(len(cycle)), key=lambda i: cycle[i][0])
    cycle = cycle[start:] + cycle[:start]
    links: list[tuple[int, int, str]] = []
    for link, (next_waiter, _, _) in zip(cycle, cycle[1:] + cycle[:1]):
        links.append(link)
        if columns.rank[link[1]] != columns.rank[next_waiter]:  # the two ends of one message
            links.append((link[1], next_waiter, "they are the two ends of one message"))
    waits = tuple(Wait(*slot_at(columns, a), *slot_at(columns, b), why) for a, b, why in links)
    ranks = sorted({wait.rank for wait in waits})
    named = " and ".join(filter(None, (", ".join(map(str, ranks[:-1])), str(ranks[-1]))))
    extent = "under every way of sending" if models == MODELS else f"when sends are {' or '.join(models)}"
    return Violation(
        "deadlock",
        f"rank{'s' * (len(ranks) > 1)} {named} wait for each other in a cycle, {extent}",
        _way_out(waits),
        waits[0].rank,
        waits[0].step,
        waits[0].action,
        waits,
        models,
    )


def _way_out(waits: tuple[Wait, ...]) -> str:
    """A move that opens the cycle: what is awaited before what keeps its rank from getting there."""
    for wait, then in zip(waits, waits[1:] + waits[:1]):
        if wait.rank == wait.for_rank and wait.for_step < wait.step:
            return f"on rank {wait.rank}, move {wait.action} before {wait.for_action}"
        if wait.for_rank == then.rank and then.step < wait.for_step:
            return f"on rank {then.rank}, move {wait.for_action} before {then.action}"
    return "change the order of one of the ranks"
