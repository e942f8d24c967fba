"""What the runtime does for each kind of action: the message it waits for, and the call that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

from penstock.ir.action import Action
from penstock.ir.kinds import Kind, handler_of
from penstock.runtime.data_parallel.replica_group import ReplicaGroup
from penstock.runtime.execution.custom_function import CustomFunction
from penstock.runtime.execution.stage import Stage
from penstock.runtime.transport.channels import ReceiveChannel, SendChannel

__all__ = ["ActionRule", "ExecutionContext", "Work", "channel_key", "microbatch_of", "rule_of"]

Work: TypeAlias = Callable[[], None]


class ExecutionContext(NamedTuple):
    """What the actions of a rank work on; channels are by kind, stage and other end of their action."""

    stages: Mapping[int, Stage]
    send_channels: Mapping[tuple[Kind, int, int], SendChannel]
    receive_channels: Mapping[tuple[Kind, int, int], ReceiveChannel]
    functions: Mapping[Kind, CustomFunction]
    replication: ReplicaGroup
    check_call: Callable[[int], None]
    """Checks that another rank makes the same call."""
    posts_ahead: bool = False
    """Whether the next receive of a channel is posted before the wait for the one before it."""


class ActionRule(NamedTuple):
    """How actions of one kind run."""

    bind: Callable[[ExecutionContext, Action], Work | None]
    """Gives the call for an action, or None if there is nothing to do."""
    needs: Kind | None = None
    """The receive whose messages the action waits for, if the stage has such channels."""


def rule_of(kind: Kind) -> ActionRule:
    """The rule of a kind; `UnhandledKindError` for a kind that the runtime does not handle."""
    return handler_of(_RULES, kind, "runtime.execution")


def microbatch_of(action: Action) -> int:
    """The microbatch of an action that has one."""
    assert action.microbatch is not None, "checked when the action was made"
    return action.microbatch


def _forward(context: ExecutionContext, action: Action) -> Work:
    return partial(context.stages[action.stage].forward, microbatch_of(action))


def _backward(context: ExecutionContext, action: Action) -> Work:
    return partial(context.stages[action.stage].backward, microbatch_of(action))


def _backward_input(context: ExecutionContext, action: Action) -> Work:
    return partial(context.stages[action.stage].backward_input, microbatch_of(action))


def _backward_weight(context: ExecutionContext, action: Action) -> Work:
    return partial(context.stages[action.stage].backward_weight, microbatch_of(action))


def _recompute(context: ExecutionContext, action: Action) -> Work:
    return partial(context.stages[action.stage].recompute, microbatch_of(action))


def _offload(context: ExecutionContext, action: Action) -> Work:
    return partial(context.stages[action.stage].memory.offload, microbatch_of(action))


def _reload(context: ExecutionContext, action: Action) -> Work:
    return partial(context.stages[action.stage].memory.reload, microbatch_of(action))


def channel_key(message: Action) -> tuple[Kind, int, int]:
    """The key of the channel of a SEND or RECV."""
    return message.kind, message.stage, message.other_end


def _send_output(context: ExecutionContext, action: Action) -> Work:
    channel, stage = context.send_channels[channel_key(action)], context.stages[action.stage]
    microbatch, consumer = microbatch_of(action), action.other_end
    return lambda: channel.send(microbatch, *stage.pop_output(microbatch, consumer))


def _send_gradient(context: ExecutionContext, action: Action) -> Work:
    channel, stage = context.send_channels[channel_key(action)], context.stages[action.stage]
    microbatch, source = microbatch_of(action), action.other_end
    return lambda: channel.send(microbatch, *stage.pop_input_gradient(microbatch, source))


def _post_receive(context: ExecutionContext, action: Action) -> Work:
    return partial(context.receive_channels[channel_key(action)].post, microbatch_of(action))


def _unshard(context: ExecutionContext, action: Action) -> Work | None:
    shards = context.replication.shards.get(action.stage)
    return None if shards is None else shards.unshard


def _reshard(context: ExecutionContext, action: Action) -> Work | None:
    shards = context.replication.shards.get(action.stage)
    return None if shards is None else shards.reshard


def _reduce_gradients(context: ExecutionContext, action: Action) -> Work | None:
    replication = context.replication
    return partial(replication.reduce, action.stage) if replication.has(action.kind, action.stage) else None


_RULES: Mapping[Kind, ActionRule] = {
    Kind.F: ActionRule(_forward, needs=Kind.RECV_F),
    Kind.B: ActionRule(_backward, needs=Kind.RECV_B),
    Kind.I: ActionRule(_backward_input, needs=Kind.RECV_B),
    Kind.W: ActionRule(_backward_weight),
    Kind.SEND_F: ActionRule(_send_output),
    Kind.SEND_B: ActionRule(_send_gradient),
    Kind.RECV_F: ActionRule(_post_receive),
    Kind.RECV_B: ActionRule(_post_receive),
    Kind.UNSHARD: ActionRule(_unshard),
    Kind.RESHARD: ActionRule(_reshard),
    Kind.REDUCE_GRAD: ActionRule(_reduce_gradients),
    Kind.RECOMPUTE: ActionRule(_recompute),
    Kind.OFFLOAD: ActionRule(_offload),
    Kind.RELOAD: ActionRule(_reload),
}
