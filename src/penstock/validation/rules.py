"""The rules of a schedule but for deadlock: one function per rule."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.arguments import number_ranges
from penstock.ir.encoding import Bools, Ints, stable_order
from penstock.ir.kinds import MEMORY_KINDS, SEND_WAITS, Kind
from penstock.ir.messages import Messages
from penstock.ir.table import ActionTable
from penstock.validation.violation import Violation, part_at, violation_at

# Rules on actions: ids in range, each on the rank of its stage, everything exactly once, order on a rank.


_MORE_STAGES = "a placement that has this stage"
_MORE_MICROBATCHES = "the schedule more microbatches"


def ids_in_range(table: ActionTable) -> Iterator[Violation]:
    """Stages and microbatches exist."""
    for what, number, count, known, more in (
        ("stage", table.stage, table.placement.num_stages, "the placement has stages", _MORE_STAGES),
        ("microbatch", table.microbatch, table.microbatches, "they are", _MORE_MICROBATCHES),
    ):
        for part in np.flatnonzero(number >= count).tolist():
            message = f"there is no {what} {number[part]}: {known} 0 to {count - 1}"
            suggestion = f"correct the {what} number, or give {more}"
            yield violation_at(table, part, f"{what}-out-of-range", message, suggestion)


def on_rank_of_stage(table: ActionTable) -> Iterator[Violation]:
    """A stage's actions are on its own rank."""
    for part in np.flatnonzero(table.in_range & ~table.well_placed).tolist():
        rank, _, action = part_at(table, part)
        own = table.placement.stage_to_rank[action.stage]
        message = f"stage {action.stage} is on rank {own}, not on rank {rank}"
        suggestion = f"move it to rank {own}, or change the placement"
        yield violation_at(table, part, "wrong-rank", message, suggestion)


def no_duplicates(table: ActionTable) -> Iterator[Violation]:
    """No action is repeated, except for UNSHARD and RESHARD."""
    if all(kind.spec.repeatable or _each_is_first(table, kind) for kind in table.kinds):
        return
    once = table.well_placed & ~table.of_kind(*(kind for kind in Kind if kind.spec.repeatable))
    cells = table.placement.num_stages * table.microbatches
    key = (table.port * len(Kind) + table.kind) * cells + table.cell
    counts = np.bincount(key[once], minlength=1)
    seen: dict[int, int] = {}
    for part in np.flatnonzero(once & (counts[np.where(once, key, 0)] > 1)).tolist():
        first = seen.setdefault(int(key[part]), part)
        if first != part:
            _, step, action = part_at(table, first)
            message = f"duplicate action: {action} is already at step {step}"
            suggestion = "remove one of the two, or correct its number"
            yield violation_at(table, part, "duplicate-action", message, suggestion)


def _each_is_first(table: ActionTable, kind: Kind) -> bool:
    """Whether every well-placed part of a kind is the first of its stage, or edge, and microbatch."""
    first = table.at(kind) if kind.spec.other_end is None else table.message_at(kind)
    return np.count_nonzero(first >= 0) == table.num_well_placed_parts(kind)


def complete(table: ActionTable) -> Iterator[Violation]:
    """Every stage runs every microbatch: forward, and in a training schedule backward."""
    present = _present(table, Kind.F)
    suggestion = "add it; every stage runs the forward of every microbatch once"
    if not present.any(axis=1).all():
        suggestion += "; stages are numbered from 0 without gaps"
    if not present[:, :1].any():
        suggestion += "; microbatches are numbered from 0"
    yield from _per_stage(table, ~present, "missing-forward", "has no forward (F) of", suggestion)
    if table.has(Kind.I, Kind.W, Kind.B):
        yield from _complete_backward(table)


def _complete_backward(table: ActionTable) -> Iterator[Violation]:
    """Every backward is one B, or I and W."""
    i, w, b = (_present(table, kind) for kind in (Kind.I, Kind.W, Kind.B))
    missing, mixed = "add B, or I and W; or remove all backwards", "use B, or I and W, for one microbatch"
    no_w, no_i = "add the W after its I, or make the I a B", "add the I before its W, or make the W a B"
    for faulty, code, what, suggestion in (
        (~(b | i | w), "missing-backward", "has no backward of", missing),
        (i & ~w & ~b, "missing-weight-gradient", "has I but no W of", no_w),
        (w & ~i & ~b, "missing-input-gradient", "has W but no I of", no_i),
        (b & (i | w), "mixed-backward", "has both B and I or W of", f"{mixed} of a stage, not both"),
    ):
        yield from _per_stage(table, faulty, code, what, suggestion)


def _present(table: ActionTable, kind: Kind) -> Bools:
    """Per stage and microbatch: whether there is one, on whatever rank."""
    if table.all_well_placed:
        present: Bools = table.at(kind) >= 0
        return present
    found = np.zeros(table.placement.num_stages * table.microbatches, dtype=np.bool_)
    found[table.cell[table.of_kind(kind) & table.in_range]] = True
    return found.reshape(-1, table.microbatches)


def _per_stage(table: ActionTable, faulty: Bools, code: str, what: str, suggestion: str) -> Iterator[Violation]:
    for stage in np.flatnonzero(faulty.any(axis=1)).tolist():
        numbers = np.flatnonzero(faulty[stage]).tolist()
        noun = "microbatch" if len(numbers) == 1 else "microbatches"
        rank = table.placement.stage_to_rank[stage]
        yield Violation(code, f"stage {stage} {what} {noun} {number_ranges(numbers)}", suggestion, rank)


_ORDER = {
    "forward": ("backward-before-forward", "comes before the forward it needs"),
    "input gradient": ("weight-before-input", "comes before the input gradient (I) it needs"),
    "activation": ("used-before-computed", "comes before the activation it needs"),
    "gradient": ("used-before-computed", "comes before the gradient it needs"),
    "forward to recompute": ("recompute-before-forward", "comes before the forward it repeats"),
    "forward to offload": ("offload-before-forward", "comes before the forward whose activation it copies"),
    "offloaded activation": ("reload-before-offload", "comes before the OFFLOAD whose copy it needs"),
    "recomputed activation": ("used-before-recomputed", "comes before the RECOMPUTE of what it needs"),
    "reloaded activation": ("used-before-reloaded", "comes before the RELOAD of what it needs"),
    "reloaded checkpoint": ("used-before-reloaded", "comes before the RELOAD of what it needs"),
}


def order_on_rank(table: ActionTable) -> Iterator[Violation]:
    """What a rank computes itself, it computes before it uses it."""
    for what, producer, consumer in (*table.within_stage, *table.between_stages):
        late = _not_before(table, producer, consumer)
        for made_by, used_by in zip(producer[late].tolist(), consumer[late].tolist()):
            rank, step, action = part_at(table, made_by)
            code, text = _ORDER[what]
            if table.slot[made_by] == table.slot[used_by]:
                code, text = "overlap-dependent", "runs as one step with the action it needs"
            message = f"it {text}, {action} at step {step} of rank {rank}"
            yield violation_at(table, used_by, code, message, f"move it after {action}")


def _not_before(table: ActionTable, producer: Ints, consumer: Ints) -> Bools:
    """Where both exist, on one rank, and the producer does not come first."""
    made, used = table.slots_of(producer), table.slots_of(consumer)
    late: Bools = (used >= 0) & (made >= used)
    late[late] = table.rank[made[late]] == table.rank[used[late]]
    return late


# Rules on messages: each is sent once and received once, before its use, in the order of its channel.
#
# A channel is an ordered pair of ranks: what rank a sends to rank b arrives there in the order it is sent,
# activations and gradients alike. The rules apply when the schedule has any SEND or RECV at all; without
# them, values are taken to cross ranks as soon as they exist.


def sent_and_received(messages: Messages) -> Iterator[Violation]:
    """Every value that crosses ranks has one send and one receive, and no other message exists."""
    table = messages.table
    if not table.has_communication:
        return
    for i in np.flatnonzero((messages.send < 0) | (messages.receive < 0)).tolist():
        send, receive, consumer = (int(x[i]) for x in (messages.send, messages.receive, messages.consumer))
        source, target = messages.source[i], messages.target[i]
        if send >= 0:
            message, suggestion = f"rank {target} never receives it", "add the receive, or remove this"
            yield violation_at(table, send, "unmatched-send", message, suggestion)
        elif receive >= 0:
            message, suggestion = f"rank {source} never sends it", "add the send, or remove this"
            yield violation_at(table, receive, "unmatched-receive", message, suggestion)
        elif consumer >= 0:
            message = f"its input is computed on rank {source}, but never sent to rank {target}"
            yield violation_at(table, consumer, "missing-message", message, "add the SEND and the RECV")
    yield from _needless(messages)


def _needless(messages: Messages) -> Iterator[Violation]:
    table = messages.table
    expected = np.zeros(len(table.code), dtype=np.bool_)
    for parts in (messages.send, messages.receive):
        expected[parts[parts >= 0]] = True
    others = np.flatnonzero(table.is_communication & table.well_placed & ~expected)
    if others.size:
        others = others[~np.isin(table.code[others], table.code[expected])]  # those are duplicates
    for part in others.tolist():
        message = _why_needless(messages, part)
        yield violation_at(table, part, "needless-message", message, "remove it")


def _why_needless(messages: Messages, part: int) -> str:
    table = messages.table
    edge = int(table.edges_of(part_at(table, part)[2].kind, np.array([part]))[0])
    if edge >= 0 and table.crosses_ranks[edge]:
        source, target = table.graph.edges[table.carrier[edge]]
        return f"no message is needed: stage {target}, on the same rank, gets the value of stage {source}"
    return "no message is needed: the stage at the other end is on this rank, or does not exist"


def delivered_in_time(messages: Messages) -> Iterator[Violation]:
    """A value is sent after it is computed, and received before it is used."""
    table = messages.table
    send, receive, producer, consumer = messages.send, messages.receive, messages.producer, messages.consumer
    slot = table.slots_of
    early = (send >= 0) & ((producer < 0) | (slot(send) <= slot(producer)))
    for i in np.flatnonzero(early).tolist():
        if producer[i] < 0:
            message = "the value it sends is never computed"
            suggestion = "add the computation, or remove the message"
        else:
            _, step, action = part_at(table, int(producer[i]))
            message = f"it comes before {action} at step {step}, which computes the value it sends"
            suggestion = f"move it after {action}"
        yield violation_at(table, int(send[i]), "send-before-compute", message, suggestion)
    late = (receive >= 0) & (consumer >= 0) & (slot(receive) >= slot(consumer))
    for i in np.flatnonzero(late).tolist():
        _, step, action = part_at(table, int(receive[i]))
        message = f"it comes before {action} at step {step}, which receives its input"
        yield violation_at(table, int(consumer[i]), "used-before-received", message, f"move it after {action}")


def channel_order(messages: Messages) -> Iterator[Violation]:
    """On each channel, messages are received in the order they are sent."""
    table = messages.table
    for early, overtaken in zip(*(x.tolist() for x in messages.overtaken)):
        _, _, sent = part_at(table, int(messages.send[overtaken]))
        rank, step, action = part_at(table, int(messages.receive[overtaken]))
        source = messages.source[early]
        message = f"rank {source} sends {sent} first, but rank {rank} receives it later ({action}, step {step})"
        suggestion = "receive from one rank in the order it sends"
        yield violation_at(table, int(messages.receive[early]), "channel-order", message, suggestion)


# Waits: if a schedule has any for its sends, or its reductions, each of these has one, later on its rank.


def sends_waited_for(messages: Messages) -> Iterator[Violation]:
    """Every send has one wait, after it; no wait is for another send."""
    table = messages.table
    if not table.has(*SEND_WAITS):
        return
    yield from _waited_for(table, messages.send, messages.send_wait, "send")
    expected = messages.send_wait[messages.send_wait >= 0]
    others = np.setdiff1d(np.flatnonzero(table.of_kind(*SEND_WAITS) & table.well_placed), expected)
    for part in others[~np.isin(table.code[others], table.code[expected])].tolist():  # those are duplicates
        yield violation_at(
            table, part, "wait-without-send", "there is no such send", "add the SEND, or remove it"
        )


def reductions_waited_for(table: ActionTable) -> Iterator[Violation]:
    """Every REDUCE_GRAD has one wait, after it."""
    if table.has(Kind.WAIT_REDUCE_GRAD):
        reduction, wait = (table.at(kind)[:, 0] for kind in (Kind.REDUCE_GRAD, Kind.WAIT_REDUCE_GRAD))
        yield from _waited_for(table, reduction, wait, "reduction")


def _waited_for(table: ActionTable, begun: Ints, wait: Ints, what: str) -> Iterator[Violation]:
    for part in begun[(begun >= 0) & (wait < 0)].tolist():
        message = f"nothing waits for this {what}, while there are waits for others"
        yield violation_at(table, part, f"missing-{what}-wait", message, "add its wait, or remove all")
    for part in wait[(begun < 0) & (wait >= 0)].tolist():
        suggestion = "add it, or remove this"
        yield violation_at(table, part, f"wait-without-{what}", f"there is no such {what}", suggestion)
    early = (begun >= 0) & (wait >= 0) & (table.slots_of(wait) < table.slots_of(begun))
    for part, later in zip(wait[early].tolist(), begun[early].tolist()):
        _, step, action = part_at(table, later)
        message = f"it comes before {action} at step {step}, which it waits for"
        yield violation_at(table, part, f"wait-before-{what}", message, f"move it after {action}")


# Rules on UNSHARD, RESHARD and REDUCE_GRAD; each applies when the schedule has such actions.


def unsharded_when_used(table: ActionTable) -> Iterator[Violation]:
    """A stage computes only between UNSHARD and RESHARD, and every UNSHARD and RESHARD is needed."""
    if not table.has(Kind.UNSHARD, Kind.RESHARD):
        return
    relevant = np.flatnonzero(
        table.well_placed & (table.is_compute | table.of_kind(Kind.UNSHARD, Kind.RESHARD))
    )
    if not relevant.size:
        return
    stage = table.stage[relevant]
    by_stage = stable_order(stage, table.placement.num_stages)
    order, stage = relevant[by_stage], stage[by_stage]
    unshard, reshard = (table.kind[order] == k.number for k in (Kind.UNSHARD, Kind.RESHARD))
    switch = unshard | reshard
    here = np.arange(len(order))
    opens = np.concatenate(([True], stage[1:] != stage[:-1]))
    closes = np.append(opens[1:], True)
    # the last switch before each entry, if it is of the same stage
    latest = np.concatenate(([-1], np.maximum.accumulate(np.where(switch, here, -1))[:-1]))
    first = np.maximum.accumulate(np.where(opens, here, 0))
    unsharded = (latest >= first) & unshard[latest]
    freed_next = np.append(reshard[1:], True) | closes
    for faulty, code, message, suggestion in (
        (~switch & ~unsharded, "compute-while-sharded", "the stage is not unsharded here", "UNSHARD it before"),
        (unshard & unsharded, "double-unshard", "the stage is already unsharded", "remove one UNSHARD"),
        (unshard & freed_next, "unused-unshard", "nothing uses the stage before it is resharded", "remove it"),
        (reshard & ~unsharded, "reshard-without-unshard", "the stage is not unsharded here", "remove it"),
        (closes & ~switch & unsharded, "left-unsharded", "the stage is never resharded", "add RESHARD"),
    ):
        for part in order[faulty].tolist():
            yield violation_at(table, part, code, message, suggestion)


def reduced_once(table: ActionTable) -> Iterator[Violation]:
    """Every stage's gradients are reduced once, after its last backward."""
    if not table.has(Kind.REDUCE_GRAD):
        return
    last = np.full(table.placement.num_stages, -1, dtype=np.int64)
    backwards = np.flatnonzero(table.of_kind(Kind.B, Kind.W) & table.well_placed)
    last[table.stage[backwards]] = backwards
    reduced = table.at(Kind.REDUCE_GRAD)[:, 0]
    for stage, (end, reduce) in enumerate(zip(last.tolist(), reduced.tolist())):
        if reduce < 0 <= end:
            message = f"stage {stage} has backwards but no REDUCE_GRAD, while other stages have one"
            rank = table.placement.stage_to_rank[stage]
            yield Violation("missing-reduce-grad", message, "add it after the stage's last backward", rank)
        elif end < 0 <= reduce:
            message = "the stage has no backward, so it has no gradients to reduce"
            yield violation_at(table, reduce, "needless-reduce-grad", message, "remove it")
        elif reduce >= 0 and table.slot[reduce] < table.slot[end]:
            _, step, action = part_at(table, end)
            message = f"the stage's last backward, {action} at step {step}, comes after it"
            yield violation_at(table, reduce, "reduce-before-last-backward", message, f"move it after {action}")


# Rules on RECOMPUTE, OFFLOAD and RELOAD; each applies to the stages and microbatches that have such actions.
#
# That they come after F, in their order and before their use are rules of `order_on_rank`.


def needed_by_a_backward(table: ActionTable) -> Iterator[Violation]:
    """Without a backward, nothing uses what is recomputed or reloaded."""
    if table.has(Kind.I, Kind.W, Kind.B) or not table.has(*MEMORY_KINDS):
        return
    for kind in MEMORY_KINDS:
        code = "needless-recompute" if kind is Kind.RECOMPUTE else "needless-offload"
        for part in np.flatnonzero(table.of_kind(kind) & table.well_placed).tolist():
            message = "no backward uses the activation: the schedule has forwards only"
            yield violation_at(table, part, code, message, "remove it, or add the backwards")


def reloaded_once(table: ActionTable) -> Iterator[Violation]:
    """What is offloaded is reloaded, and nothing else."""
    if not table.has(Kind.OFFLOAD, Kind.RELOAD):
        return
    offload, reload = table.at(Kind.OFFLOAD), table.at(Kind.RELOAD)
    for part in offload[(offload >= 0) & (reload < 0)].tolist():
        message = "it is never reloaded, but the backward needs it"
        suggestion = "add the RELOAD before the backward, or remove this"
        yield violation_at(table, part, "missing-reload", message, suggestion)
    for part in reload[(reload >= 0) & (offload < 0)].tolist():
        message = "it was never offloaded: nothing is on the host"
        suggestion = "add the OFFLOAD after the forward, or remove this"
        yield violation_at(table, part, "reload-without-offload", message, suggestion)


def held_when_offloaded(table: ActionTable) -> Iterator[Violation]:
    """OFFLOAD copies what F holds: not what a backward has freed, nor what RECOMPUTE has made again."""
    if not table.has(Kind.OFFLOAD):
        return
    offload = table.at(Kind.OFFLOAD)
    for part, used in _pairs_after(table, offload, table.input_gradient):
        _, step, action = part_at(table, used)
        message = f"it comes after {action} at step {step}, which frees what it would copy"
        yield violation_at(table, part, "offload-after-backward", message, f"move it before {action}")
    for part, made in _pairs_after(table, offload, table.at(Kind.RECOMPUTE)):
        _, step, action = part_at(table, made)
        message = f"it comes after {action} at step {step}: the same bytes are recomputed and offloaded"
        suggestion = f"move it, and its RELOAD, before {action}, or remove one of the two"
        yield violation_at(table, part, "offload-after-recompute", message, suggestion)


def _pairs_after(table: ActionTable, late: Ints, early: Ints) -> Iterator[tuple[int, int]]:
    """Parts of the same stage and microbatch of which the first comes after the second."""
    after = (early >= 0) & (table.slots_of(late) > table.slots_of(early))
    return zip(late[after].tolist(), early[after].tolist())
