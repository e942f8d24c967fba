"""Deadlock: whether the ranks can wait for each other in a cycle, under every send model.

Each send model (`penstock.validation.send_model`) blocks wherever the one before it blocks. The first two block
alike: with a stream per edge a step waits for a receive that comes before it in its own list, and for messages
that the sender sends before the one it needs, so in the end for the send, as if it were buffered. The last two
block alike: a rank that is blocked by a message delays only its later messages, and on a shared stream those
are queued after that message anyway. So a schedule that is safe under `rendezvous` is safe under all, and that
is decided first, and fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from penstock.ir.dataflow import Inputs, run_dataflow
from penstock.ir.encoding import Ints
from penstock.ir.messages import Messages
from penstock.ir.schedule import Schedule
from penstock.ir.table import ActionTable
from penstock.loops import Loop
from penstock.validation.send_model import SendModel
from penstock.validation.violation import Violation, Wait, slot_at

# ruff: noqa: ANN401 -- the loop runs over lists or arrays


_LIST = "this comes earlier in the list"


class Waits(NamedTuple):
    """Node `after[i]` waits for node `before[i]`: in a report, slot `waiter[i]` waits for slot `awaited[i]`.

    Nodes are the slots, followed by the messages.
    """

    before: Ints
    after: Ints
    awaited: Ints
    waiter: Ints
    why: str


def no_deadlock(messages: Messages, strictest: SendModel = SendModel.RENDEZVOUS) -> Iterator[Violation]:
    """No cycle of waits under any send model up to the strictest, whatever the costs are."""
    table = messages.table
    num_nodes = len(table.rank) + len(messages.send)
    if not table.has_communication:
        if not _data_flows(table) and (cycle := _find_cycle(num_nodes, _data_graph(table))):
            yield _violation(table, SendModel.BUFFERED, cycle)
        return
    if messages.in_order and _passes_rendezvous(messages):
        return
    if cycle := _find_cycle(num_nodes, _sends_graph(messages)):
        yield _violation(table, SendModel.BUFFERED, cycle)
        return
    waits_for_sends = bool((messages.send_wait >= 0).any())
    for model in (SendModel.EDGE_STREAMS, SendModel.PAIR_STREAMS, SendModel.SHARED_STREAM):
        if model is SendModel.EDGE_STREAMS and not waits_for_sends:
            continue  # blocks where `buffered` does
        # a channel that reorders its messages has a violation of its own; streams say nothing about it
        if (
            messages.in_order
            and model <= strictest
            and (cycle := _find_cycle(num_nodes, _stream_graph(messages, model)))
        ):
            yield _violation(table, model, cycle)
            return


def _data_flows(table: ActionTable) -> bool:
    """Without communication: whether every rank reaches the end of its list."""
    producer, consumer = table.crossings
    inputs = Inputs.of(len(table.rank), producer, consumer, np.zeros_like(producer))
    return not run_dataflow(table, inputs, 1, [0] * table.placement.num_ranks).stuck


def _passes_rendezvous(messages: Messages) -> bool:
    """Under `rendezvous`: whether every message is reached by both of its ranks.

    Only messages can block a rank, so each rank goes through its messages: the first to reach one waits there,
    the second continues and wakes the first.
    """
    parts, message = messages.in_lists
    position = np.searchsorted(parts, messages.table.part_bounds)
    stops, waiting = position[1:], np.full(len(messages.send), -1, dtype=np.int64)
    ready, completed = np.arange(len(stops)), np.zeros(1, dtype=np.int64)
    _RENDEZVOUS.run(len(parts), (message, stops), (position[:-1].copy(), ready, waiting, completed))
    return 2 * int(completed[0]) == len(parts)


def _rendezvous(message_at: Any, stops: Any, position: Any, ready: Any, waiting: Any, completed: Any) -> None:
    """Count the messages that both ranks reach; `waiting` is the rank at a message, or -1."""
    top, count = len(ready), 0
    while top > 0:
        top -= 1
        rank = ready[top]
        i, stop = position[rank], stops[rank]
        while i < stop:
            message = message_at[i]
            i += 1
            other = waiting[message]
            if other < 0:
                waiting[message] = rank
                break
            count += 1
            ready[top] = other
            top += 1
        position[rank] = i
    completed[0] = count


_RENDEZVOUS = Loop(_rendezvous)


# --- the slow path, which finds the cycle; for schedules that are known to be invalid -----------------


def _list_waits(table: ActionTable) -> Waits:
    """Every step waits for the one before it on its rank."""
    slots = np.arange(max(len(table.rank) - 1, 0))
    slots = slots[table.rank[:-1] == table.rank[1:]]
    return Waits(slots, slots + 1, slots, slots + 1, _LIST)


def _data_graph(table: ActionTable) -> list[Waits]:
    producer, consumer = table.crossings
    return [_list_waits(table), Waits(producer, consumer, producer, consumer, "it needs the result of this")]


def _sends_graph(messages: Messages) -> list[Waits]:
    """`buffered`: a step waits for the sends of what it needs."""
    table = messages.table
    used = np.flatnonzero(messages.used)
    send, consumer = table.slot[messages.send[used]], table.slot[messages.consumer[used]]
    return [_list_waits(table), Waits(send, consumer, send, consumer, "it needs what this sends")]


def _stream_graph(messages: Messages, model: SendModel) -> list[Waits]:
    """A step waits for its messages, a message for both ends and for those ahead of it in its streams."""
    table = messages.table
    paired = np.flatnonzero(messages.paired)
    node = len(table.rank) + paired
    send, receive = table.slot[messages.send[paired]], table.slot[messages.receive[paired]]
    consumer = table.slots_of(messages.consumer[paired])
    used = consumer > receive  # a use before the receive is another violation
    slot, moved = np.concatenate((send, receive)), np.concatenate((node, node))
    stream = np.concatenate(
        model.streams(messages.source[paired], messages.target[paired], table.placement.num_ranks)
    )
    order = np.lexsort((slot, stream))
    slot, moved, stream = slot[order], moved[order], stream[order]
    same = stream[1:] == stream[:-1]
    of_pair = model is SendModel.PAIR_STREAMS
    waits = messages.send_wait[paired]
    waited = waits >= 0
    waits = table.slots_of(waits[waited])
    ahead = f"it is ahead of it in the {'stream of the two ranks' if of_pair else 'one stream of the rank'}"
    return [
        _list_waits(table),
        Waits(send, node, send, receive, "a receive completes only with its send"),
        Waits(receive, node, receive, send, "a send completes only with its receive"),
        Waits(node[used], consumer[used], receive[used], consumer[used], "it needs what this receives"),
        Waits(node[waited], waits, receive[waited], waits, "its send completes only with this"),
        Waits(moved[:-1][same], moved[1:][same], slot[:-1][same], slot[1:][same], ahead),
    ]


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
    for n in free:  # grows during the loop
        for e in leaving[n]:
            missing[after[e]] -= 1
            if not missing[after[e]]:
                free.append(after[e])
    if len(free) == num_nodes:
        return []
    # follow the waits back; a rank's own list comes first in `arriving`, which leads to where it is stuck
    stuck = [[e for e in edges if missing[before[e]]] if missing[n] else [] for n, edges in enumerate(arriving)]
    node = next(n for n, edges in enumerate(stuck) if edges)
    path: list[int] = []
    seen: dict[int, int] = {}
    while node not in seen:
        seen[node] = len(path)
        path.append(stuck[node][0])
        node = before[path[-1]]
    cycle = [e for e in path[seen[node] :] if why[e] != _LIST]
    for e in cycle[:_MAX_STARTS]:
        shorter = [e for e in _cycle_through(after[e], before, after, stuck, why) if why[e] != _LIST]
        cycle = min(cycle, shorter, key=len)
    return [(waiter[e], awaited[e], why[e]) for e in cycle]


_MAX_STARTS = 8
"""Waits of the first cycle from which shorter ones are searched."""


def _cycle_through(
    start: int, before: list[int], after: list[int], stuck: list[list[int]], why: list[str]
) -> list[int]:
    """The cycle of waits through a node that leaves a rank's list least often."""
    came_by: dict[int, int] = {}
    queue = deque([(start, -1)])
    while queue:
        node, edge = queue.popleft()
        if edge >= 0:
            if node in came_by:
                continue
            came_by[node] = edge
            if node == start:
                break
        for e in stuck[node]:
            if why[e] == _LIST:
                queue.appendleft((before[e], e))
            else:
                queue.append((before[e], e))
    path: list[int] = [came_by[start]]
    while after[path[-1]] != start:
        path.append(came_by[after[path[-1]]])
    return path[::-1]


def _violation(table: ActionTable, model: SendModel, cycle: list[tuple[int, int, str]]) -> Violation:
    """The deadlock of a cycle that exists under this send model and all stricter ones."""
    start = min(range(len(cycle)), key=lambda i: cycle[i][0])
    cycle = cycle[start:] + cycle[:start]
    links: list[tuple[int, int, str]] = []
    for link, (next_waiter, _, _) in zip(cycle, cycle[1:] + cycle[:1]):
        links.append(link)
        if table.rank[link[1]] != table.rank[next_waiter]:  # the two ends of one message
            links.append((link[1], next_waiter, "they are the two ends of one message"))
    waits = tuple(Wait(*slot_at(table, a), *slot_at(table, b), why) for a, b, why in links)
    ranks = sorted({wait.rank for wait in waits})
    named = " and ".join(filter(None, (", ".join(map(str, ranks[:-1])), str(ranks[-1]))))
    models = model.and_stricter
    names = " or ".join(map(str, models))
    extent = "under every send model" if model is SendModel.BUFFERED else f"under send model {names}"
    return Violation(
        "deadlock",
        f"rank{'s' * (len(ranks) > 1)} {named} wait for each other in a cycle, {extent}",
        "change the order of one of these ranks",
        waits[0].rank,
        waits[0].step,
        waits[0].action,
        waits,
        models,
    )


# A move that breaks a deadlock cycle, found by trying.


_MAX_MOVES = 16
_MAX_MOVES_OF_LARGE = 2
_LARGE_STEPS = 20_000


class _Move(NamedTuple):
    rank: int
    step: int
    to: int
    """The step takes the place of this one."""
    text: str


def suggested_move(
    schedule: Schedule, deadlock: Violation, violations_of: Callable[[Schedule], list[Violation]]
) -> str:
    """What to suggest: a single move that makes the schedule valid, or at least breaks nothing else."""
    most = _MAX_MOVES_OF_LARGE if schedule.num_steps > _LARGE_STEPS else _MAX_MOVES
    had = {violation.code for violation in violations_of(schedule)}
    helpful = None
    for _, move in zip(range(most), _moves(deadlock)):
        codes = {violation.code for violation in violations_of(_moved(schedule, move))}
        if codes == had - {"deadlock"}:
            return move.text
        if codes <= had:
            helpful = helpful or f"{move.text}, then check again"
    return helpful or deadlock.suggestion


def _moves(deadlock: Violation) -> Iterator[_Move]:
    """For each wait: move what is awaited before what blocks its rank, or the blocking step after it."""
    waits = deadlock.cycle
    for wait, then in zip(waits, waits[1:] + waits[:1]):
        if wait.rank == wait.for_rank and wait.for_step < wait.step:
            early, late, name, other = wait.for_step, wait.step, wait.action, wait.for_action
        elif wait.for_rank == then.rank and then.step < wait.for_step:
            early, late, name, other = then.step, wait.for_step, wait.for_action, then.action
        else:
            continue
        where = f"on rank {wait.for_rank}, move"
        yield _Move(wait.for_rank, late, early, f"{where} {name} before {other}")
        yield _Move(wait.for_rank, early, late, f"{where} {other} after {name}")


def _moved(schedule: Schedule, move: _Move) -> Schedule:
    table = schedule.table
    rows = table.rows
    slots = table.slot[slice(*table.part_bounds[move.rank : move.rank + 2])]
    steps = np.split(rows[move.rank], np.flatnonzero(np.diff(slots)) + 1)
    steps.insert(move.to, steps.pop(move.step))
    rows[move.rank] = np.concatenate(steps)
    return schedule.with_rows(rows)
