"""Split backward: a stage's weight gradients are put aside during I and computed in W.

While a `Deferral` is installed, every layer that a rule is known for runs as one node of the autograd graph.
Its backward computes the gradient of the input; of what the weight gradients are made of, the input and the
gradient of the output, it makes a job:

    with deferral.installed():
        output = module(x)                              F
        with deferral.put_aside() as jobs:
            torch.autograd.backward(output, gradient)   I
        jobs.run()                                      W

A backward outside of `put_aside` is B: it computes the weight gradients at once. All else, norms, attention,
uses of a weight outside of its layer, is left to autograd and computed in I.

The weights themselves are no part of the graph that I runs through: autograd would visit their accumulators
even where their gradients are None, and so fire in I the hooks that belong to W. A stand-in takes the place
of each, and hands on what B gives it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import PipelineError
from penstock.runtime.backward.layer_rules import (
    LayerRule,
    Tensors,
    holds_for_dtensors,
    register_layer,
    rule_of,
)
from penstock.runtime.dtensors import is_dtensor

__all__ = ["Deferral", "Jobs", "LayerRule", "register_layer"]

_Context: TypeAlias = Any


class _Job(NamedTuple):
    """The weight gradients of one call of a layer, not yet computed."""

    rule: LayerRule[Any]
    layer: nn.Module
    x: Tensor
    weights: Tensors
    gradient: Tensor
    leaves: Tensors
    """Where the gradients of the weights go; None for a weight that wants none."""

    def gradients(self) -> Tensors:
        wanted = tuple([leaf is not None for leaf in self.leaves])
        return self.rule.weight_gradients(self.layer, self.x, self.weights, self.gradient, wanted)


class Jobs:
    """The weight gradients that one backward put aside, in the order they came up."""

    def __init__(self) -> None:
        self._jobs: list[_Job] | None = []

    def __len__(self) -> int:
        return len(self._jobs or ())

    def add(self, job: _Job) -> None:
        """One more."""
        assert self._jobs is not None, "an I does not go on after its W"
        self._jobs.append(job)

    def run(self) -> None:
        """W: compute them and have autograd accumulate them; each job is let go of as soon as it is done."""
        if self._jobs is None:
            raise PipelineError("these weight gradients have been computed already")
        jobs, self._jobs = self._jobs, None
        roots = []
        with torch.enable_grad():
            while jobs:  # autograd runs the newest node first, so the first job becomes a node last
                job = jobs.pop()
                roots.append(_JobNode.apply(job, *job.leaves))  # type: ignore[no-untyped-call]
                del job
        if roots:
            torch.autograd.backward(roots)


class _JobNode(torch.autograd.Function):
    """A node above the leaves of a job, whose backward runs it.

    So autograd itself sums what several jobs have for one leaf, in their order, and accumulates it once and
    without a copy.
    """

    @staticmethod
    def forward(ctx: _Context, job: _Job, *_leaves: Tensor | None) -> Tensor:
        ctx.job = job
        return torch.empty((), dtype=job.gradient.dtype, device=job.gradient.device)

    @staticmethod
    def backward(ctx: _Context, _one: Tensor) -> Tensors:
        job, ctx.job = ctx.job, None
        return (None, *job.gradients())


class _Deferred:
    """A layer that runs, while this is installed in it, as a node of its own."""

    def __init__(self, deferral: Deferral, layer: nn.Module, rule: LayerRule[Any]) -> None:
        self.deferral = deferral
        self.layer = layer
        self.rule = rule

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """In place of the layer's own, which it falls back on where W cannot do all of its weights."""
        layer = self.layer
        deferrable = len(inputs) == 1 and not named and torch.is_grad_enabled() and self.takes(inputs[0])
        if deferrable and self.deferral.engaged and not _in_a_transform():
            weights = self.weights_for(inputs[0])
            stand_ins = None if weights is None else self.deferral.stand_ins_for(weights)
            if weights is not None and stand_ins is not None:
                return _LayerNode.apply(inputs[0], self, weights, *stand_ins)  # type: ignore[no-untyped-call]
        return type(layer).forward(layer, *inputs, **named)

    def takes(self, x: object) -> bool:
        """Whether the rule holds for this input."""
        return type(x) is Tensor or (is_dtensor(x) and holds_for_dtensors(self.rule))

    def weights_for(self, x: Tensor) -> list[Tensor | None] | None:
        """Its parameters; None if one is computed, by a parametrization, which must not be asked twice.

        And None if not all are DTensors as the input is, or none as it is not.
        """
        parameters = self.layer._parameters  # noqa: SLF001 -- what is in there is no property
        if not all(name in parameters for name in self.rule.weights):
            return None
        weights: list[Tensor | None] = [parameters[name] for name in self.rule.weights]
        sharded = is_dtensor(x)
        return weights if all(each is None or is_dtensor(each) is sharded for each in weights) else None


def _in_a_transform() -> bool:
    """Whether vmap or another transform of torch.func is at work, which looks into nodes."""
    return torch._C._functorch.maybe_current_level() is not None  # noqa: SLF001


class _LayerNode(torch.autograd.Function):
    """The node: its backward gives the gradient of the input, and puts a job aside or does it at once."""

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, deferred: _Deferred, leaves: Tensors, *_stand_ins: Tensor | None
    ) -> Tensor:
        # detached, because autocast remembers its copies of leaves, and those made here carry no gradient
        weights = [None if leaf is None else leaf.detach() for leaf in leaves]
        y = deferred.rule.forward(deferred.layer, x, *weights)
        if y.dtype != x.dtype and x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
            x = x.to(y.dtype)
        ctx.deferred = deferred
        ctx.leaves = leaves
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return y.detach() if y._is_view() else y  # noqa: SLF001 -- a view could not be changed in place later

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor | None) -> Tensors:
        deferred, needed = ctx.deferred, ctx.needs_input_grad
        if gradient is None:
            return (None,) * len(needed)
        if torch.is_grad_enabled():
            raise PipelineError(
                "a split backward cannot itself be differentiated: drop create_graph=True, or use a schedule "
                "with a whole backward, such as 1f1b"
            )
        x, *weights = ctx.saved_tensors
        leaves = tuple([leaf if wanted else None for leaf, wanted in zip(ctx.leaves, needed[3:])])
        job = _Job(deferred.rule, deferred.layer, x, tuple(weights), gradient, leaves)
        of_x = job.rule.input_gradient(job.layer, x, job.weights, gradient) if needed[0] else None
        aside = deferred.deferral.aside
        if aside is None:
            return (of_x, None, None, *job.gradients())
        aside.add(job)
        return (of_x, *(None,) * (len(needed) - 1))


class Deferral:
    """Puts aside the weight gradients of one stage."""

    def __init__(self, module: nn.Module) -> None:
        self._deferred: list[_Deferred] = []
        self.engaged = True
        """Whether layers run as nodes while installed; not for a microbatch whose backward is whole."""
        self.compiled: tuple[str, ...] = ()
        """The names of the compiled modules in the stage, which are left alone."""
        self._find(module, "", set())
        self.layers = tuple(each.layer for each in self._deferred)
        """The layers whose weight gradients are put aside, unless their weights or inputs forbid it."""
        self.aside: Jobs | None = None
        """Where the running backward puts its jobs; None if it is to do them at once."""
        self._patched: list[_Deferred] = []
        self._entered = 0
        self._stand_ins: dict[int, Tensor] = {}
        self._shared: dict[int, Tensor] = {}

    def _find(self, module: nn.Module, name: str, seen: set[nn.Module]) -> None:
        if module in seen:
            return
        seen.add(module)
        if _is_compiled(module):
            self.compiled += (name,)
            return
        rule = rule_of(module)
        if rule is not None and any(weight.requires_grad for weight in module.parameters(recurse=False)):
            self._deferred.append(_Deferred(self, module, rule))
        for child_name, child in module.named_children():
            self._find(child, f"{name}.{child_name}" if name else child_name, seen)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Run the layers as nodes: around F, and around backwards, which may recompute parts of it.

        A layer whose forward somebody else has replaced is left alone.
        """
        if self._entered == 0:
            self._patched = [each for each in self._deferred if "forward" not in each.layer.__dict__]
            for each in self._patched:
                each.layer.__dict__["forward"] = each.forward
        self._entered += 1
        try:
            yield
        finally:
            self._entered -= 1
            if self._entered == 0:
                for each in self._patched:
                    if each.layer.__dict__.get("forward") == each.forward:
                        del each.layer.__dict__["forward"]
                self._stand_ins.clear()

    @contextmanager
    def put_aside(self) -> Iterator[Jobs]:
        """I: a backward in here puts its weight gradients into the jobs this gives."""
        if self.aside is not None:
            raise PipelineError("another backward of this stage is putting its weight gradients aside")
        self.aside = jobs = Jobs()
        try:
            with self.installed():
                yield jobs
        finally:
            self.aside = None

    def stand_ins_for(self, weights: list[Tensor | None]) -> list[Tensor | None] | None:
        """What takes the place of each weight in the graph, None for one that wants no gradient.

        And None for them all if the first, whose gradient is most of the work, is not trained, or if one
        that is trained must get its gradient from autograd alone.
        """
        if weights[0] is None or not weights[0].requires_grad or torch.compiler.is_compiling():
            return None
        stand_ins: list[Tensor | None] = []
        for weight in weights:
            if weight is None or not weight.requires_grad:
                stand_ins.append(None)
            elif (
                not weight.is_leaf
                or not (type(weight) in _PLAIN or is_dtensor(weight))
                or weight.is_complex()
                or id(weight) in self._shared
            ):
                return None
            else:
                known = self._stand_ins.get(id(weight))
                stand_ins.append(self._new_stand_in(weight) if known is None else known)
        return stand_ins

    def _new_stand_in(self, weight: Tensor) -> Tensor:
        self._stand_ins[id(weight)] = stand_in = weight.detach().requires_grad_()
        stand_in.register_post_accumulate_grad_hook(partial(_hand_on, weight))  # type: ignore[no-untyped-call]
        return stand_in

    def find_shared(self, roots: Iterable[Tensor | GradientEdge]) -> tuple[Tensor, ...]:
        """Leave to autograd, from the next forward on, the layers whose weights are used outside of them too.

        `roots` are the outputs of a forward that ran while installed. Its graph holds stand-ins for the
        weights of deferred layers, so a weight found there itself is used elsewhere, and its hooks would fire
        twice, in I and in W. Gives the weights newly found.
        """
        ours = {id(weight) for layer in self.layers for weight in layer.parameters(recurse=False)}
        found = {
            id(leaf): leaf for leaf in _leaves_below(roots) if id(leaf) in ours and id(leaf) not in self._shared
        }
        self._shared.update(found)
        return tuple(found.values())


_PLAIN = (nn.Parameter, Tensor)


def _hand_on(weight: Tensor, stand_in: Tensor) -> None:
    gradient, stand_in.grad = stand_in.grad, None
    if gradient is not None:
        torch.autograd.backward(weight, gradient)


def _leaves_below(roots: Iterable[Tensor | GradientEdge]) -> Iterator[Tensor]:
    """The leaves whose gradients a backward from these would accumulate."""
    to_visit: list[Any] = [
        (get_gradient_edge(root) if isinstance(root, Tensor) else root).node for root in roots
    ]
    seen: set[Any] = {None}
    while to_visit:
        node = to_visit.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            to_visit += [below for below, _ in node.next_functions]


def _is_compiled(module: nn.Module) -> bool:
    """Whether a call of the module goes to the compiler, which is asked only if it is loaded."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None  # noqa: SLF001
