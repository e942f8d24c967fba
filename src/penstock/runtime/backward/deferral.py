"""Split backward: I defers the weight gradients of a stage, and W computes them.

While a `Deferral` is installed, every layer with a rule runs as one node of the autograd graph. The backward
of the node computes the input gradient. It keeps what the weight gradients need, the input and the gradient
of the output, in a queue:

    with deferral.installed():
        output = module(x)                          F
        gradients = deferral.begin_deferring()
        torch.autograd.backward(output, gradient)   I
        deferral.end_deferring()
        gradients.run()                             W

A backward that does not defer is B: it computes the weight gradients at once. Autograd handles everything
else in I: norms, attention, and uses of a weight outside of its layer.

A weight that is also used outside of its layer cannot be deferred. Only the graph of a forward shows this, so
the first microbatch runs in `LayerMode.JOINED`, and its I is a full backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.runtime.backward.layer_rules import LayerRule, Tensors, rule_of, supports_dtensors
from penstock.runtime.dtensors import is_dtensor
from penstock.runtime.torch_internals.autograd import has_hooks, is_view, node_class, transform_level
from penstock.runtime.torch_internals.modules import is_compiled, own_parameters

_MARK = "penstock"
_PLAIN = (nn.Parameter, Tensor)


class DeferredGradient(NamedTuple):
    """The weight gradients of one call of a layer, not yet computed."""

    rule: LayerRule[Any]
    layer: nn.Module
    x: Tensor
    weights: Tensors
    gradient: Tensor
    leaves: Tensors
    """The parameters that accumulate the gradients; None for a weight that needs none."""

    def compute(self) -> Tensors:
        """Return the gradients, one per weight, None for a weight that needs none."""
        wanted = tuple([leaf is not None for leaf in self.leaves])
        return self.rule.weight_gradients(self.layer, self.x, self.weights, self.gradient, wanted)

    def add(self) -> None:
        """Compute the gradients and add them to those that the leaves have, as autograd does."""
        for leaf, gradient in zip(self.leaves, self.compute()):
            if leaf is not None and gradient is not None:
                assert leaf.grad is not None
                fits = gradient.shape == leaf.shape and gradient.dtype == leaf.dtype
                leaf.grad.add_(gradient if fits else gradient.sum_to_size(leaf.shape).to(leaf.dtype))

    def add_fused(self) -> None:
        """Do the same without temporary gradients where the rule can, which rounds differently."""
        add = getattr(self.rule, "add_weight_gradients", None)
        totals = [None if leaf is None else leaf.grad for leaf in self.leaves]
        dtype = self.gradient.dtype
        if add is None or not all(total is None or total.dtype == dtype for total in totals):
            self.add()
        else:
            add(self.layer, self.x, self.gradient, tuple(totals))


class DeferredGradients:
    """The weight gradients that one backward deferred, in the order in which it reached them.

    `held` are the ids of weights whose accumulators may have hooks.
    """

    def __init__(self, *, fusion: bool = False, held: frozenset[int] = frozenset()) -> None:
        self._held = held
        self._queue: list[DeferredGradient] | None = []
        self._add = DeferredGradient.add_fused if fusion else DeferredGradient.add

    def inputs(self) -> list[Tensor]:
        """Return the inputs of layers that are kept for W."""
        return [deferred.x for deferred in self._queue or ()]

    def add(self, deferred: DeferredGradient) -> None:
        """Append one."""
        assert self._queue is not None, "I does not continue after its W"
        self._queue.append(deferred)

    def run(self) -> None:
        """W: compute and accumulate the gradients; release the tensors of each one when it is done."""
        if self._queue is None:
            raise PipelineError("these weight gradients were already computed")
        queue, self._queue = self._queue, None
        if self._can_add(queue):
            queue.reverse()
            with torch.no_grad():
                while queue:
                    self._add(queue.pop())
        else:
            _accumulate_by_autograd(queue)

    def _can_add(self, queue: list[DeferredGradient]) -> bool:
        """Whether W may add to each `.grad` itself, because autograd would do nothing else.

        Autograd also calls hooks, keeps a first gradient without a copy, and sums the gradients of several
        calls before it accumulates them.
        """
        leaves = [leaf for deferred in queue for leaf in deferred.leaves if leaf is not None]
        ids = set(map(id, leaves))
        if len(ids) < len(leaves) or not self._held.isdisjoint(ids) or torch.is_anomaly_enabled():
            return False
        # a sharded weight has a DTensor as gradient
        return all(type(leaf.grad) is Tensor and not has_hooks(leaf) for leaf in leaves)


def _accumulator_is_held(leaf: Tensor) -> bool:
    """Return whether anything holds the `AccumulateGrad` node of a weight, as everything that adds hooks does.

    torch makes the node on demand, and it ends with its last holder: then a mark on it is gone at once.
    """

    def metadata() -> dict[str, Any]:
        return cast("dict[str, Any]", get_gradient_edge(leaf).node.metadata)  # torch declares a method

    metadata()[_MARK] = True
    return _MARK in metadata()


def _accumulate_by_autograd(queue: list[DeferredGradient]) -> None:
    """Compute and accumulate the gradients as nodes of a graph, which calls the hooks of the leaves."""
    roots = []
    with torch.enable_grad():
        while queue:  # autograd runs the newest node first, so the first entry becomes a node last
            deferred = queue.pop()
            roots.append(_GradientNode.apply(deferred, *deferred.leaves))  # type: ignore[no-untyped-call]
            del deferred
    if roots:
        torch.autograd.backward(roots)


class _GradientNode(torch.autograd.Function):
    """An autograd node above the leaves of a deferred gradient; its backward computes the gradient.

    Autograd itself then sums the gradients of several calls for one leaf, in their order, and accumulates
    the sum once and without a copy.
    """

    @staticmethod
    def forward(ctx: Any, deferred: DeferredGradient, *_leaves: Tensor | None) -> Tensor:
        ctx.deferred = deferred
        return torch.empty((), dtype=deferred.gradient.dtype, device=deferred.gradient.device)

    @staticmethod
    def backward(ctx: Any, _one: Tensor) -> Tensors:
        deferred, ctx.deferred = ctx.deferred, None
        return (None, *deferred.compute())


class LayerMode(Enum):
    """How the layers of a stage run in a forward, and when its backward recomputes parts of it."""

    PLAIN = "as they are, for a full backward"
    JOINED = "as nodes above the weights themselves, for a full backward that shows where weights are used"
    DEFERRED = "as nodes above aliases of the weights, for a split backward"


class DeferralState:
    """What the deferred layers of a stage share: how they run, and the aliases that replace their weights.

    Autograd visits the accumulator of a weight even where the gradient is None. With the weight itself in the
    graph, I would therefore fire the hooks that belong to W. An alias is a detached leaf over the same memory.
    In a full backward (B) it forwards its gradient to the weight.

    A joined alias is the weight behind a node. It shows that a use of the weight is that of its layer, and
    autograd sums the gradients of all uses.
    """

    def __init__(self) -> None:
        self.mode = LayerMode.DEFERRED
        """How layers run while installed."""
        self.pending: DeferredGradients | None = None
        """Where the running backward defers weight gradients to; None in a full backward."""
        self._aliases: dict[int, Tensor] = {}
        self._shared: dict[int, Tensor] = {}

    def aliases_of(self, weights: list[Tensor | None]) -> list[Tensor | None] | None:
        """Return an alias for each weight, None for a weight that needs no gradient.

        Return None for all of them if the first weight, whose gradient is most of the work, is frozen, or if
        autograd alone can compute the gradient of a trained weight.
        """
        if weights[0] is None or not weights[0].requires_grad or torch.compiler.is_compiling():
            return None
        joined = self.mode is LayerMode.JOINED
        aliases: list[Tensor | None] = []
        for weight in weights:
            if weight is None or not weight.requires_grad:
                aliases.append(None)
            elif not _can_alias(weight) or (id(weight) in self._shared and not joined):
                return None
            elif joined:
                aliases.append(_JoinedAlias.apply(weight))  # type: ignore[no-untyped-call]
            else:
                if id(weight) not in self._aliases:
                    self._aliases[id(weight)] = alias = weight.detach().requires_grad_()
                    alias.register_post_accumulate_grad_hook(partial(_forward_gradient, weight))  # type: ignore[no-untyped-call]
                aliases.append(self._aliases[id(weight)])
        return aliases

    def exclude_shared(
        self, weights: Iterable[Tensor], roots: Iterable[Tensor | GradientEdge]
    ) -> tuple[Tensor, ...]:
        """Leave layers to autograd, from the next forward on, whose `weights` are also used outside of them.

        `roots` are the outputs of a forward that ran while installed. Its graph holds aliases for the weights
        of deferred layers, so a weight that appears there itself is used elsewhere, and its hooks would fire
        twice, in I and in W. Return the weights newly found.
        """
        own = {id(weight) for weight in weights} - self._shared.keys()
        found = {id(leaf): leaf for leaf in _leaves_below(roots) if id(leaf) in own}
        self._shared.update(found)
        return tuple(found.values())

    def used_twice(self, weights: Iterable[Tensor], roots: Iterable[Tensor | GradientEdge]) -> list[Tensor]:
        """Return those of `weights` that the graph below `roots` uses both directly and by their alias."""
        leaves = {id(leaf) for leaf in _leaves_below(roots)}
        aliased = ((weight, self._aliases.get(id(weight))) for weight in weights)
        return [weight for weight, alias in aliased if id(weight) in leaves and id(alias) in leaves]

    def clear_aliases(self) -> None:
        """Drop all aliases; excluded weights stay excluded."""
        self._aliases.clear()


def _can_alias(weight: Tensor) -> bool:
    is_known_type = type(weight) in _PLAIN or is_dtensor(weight)
    return weight.is_leaf and is_known_type and not weight.is_complex()


class _JoinedAlias(torch.autograd.Function):
    """Identity on a weight."""

    @staticmethod
    def forward(_ctx: Any, weight: Tensor) -> Tensor:
        return weight.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


def _forward_gradient(weight: Tensor, alias: Tensor) -> None:
    gradient, alias.grad = alias.grad, None
    if gradient is not None:
        torch.autograd.backward(weight, gradient)


def _leaves_below(roots: Iterable[Tensor | GradientEdge]) -> Iterator[Tensor]:
    """Yield the leaves that a backward from these roots reaches, except through a joined alias."""
    to_visit: list[Any] = [
        (get_gradient_edge(root) if isinstance(root, Tensor) else root).node for root in roots
    ]
    alias: type = node_class(_JoinedAlias)
    seen: set[Any] = {None}
    while to_visit:
        node = to_visit.pop()
        if node not in seen and not isinstance(node, alias):
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            to_visit += [below for below, _ in node.next_functions]


class DeferredLayer(NamedTuple):
    """A layer with the rule of its type; `forward` replaces the layer's own while a `Deferral` is installed."""

    state: DeferralState
    layer: nn.Module
    rule: LayerRule[Any]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the layer as one node, or its own forward where W cannot compute all of its weight gradients."""
        is_one_input = len(inputs) == 1 and not named
        deferrable = self.state.mode is not LayerMode.PLAIN and is_one_input and torch.is_grad_enabled()
        if deferrable and transform_level() is None:  # vmap looks into nodes
            weights = self._weights_for(inputs[0])
            if weights is not None and (aliases := self.state.aliases_of(weights)) is not None:
                return _LayerNode.apply(inputs[0], self, weights, *aliases)  # type: ignore[no-untyped-call]
        return type(self.layer).forward(self.layer, *inputs, **named)

    def _weights_for(self, x: object) -> list[Tensor | None] | None:
        """Return the layer's parameters; None if a parametrization computes one, which must not run twice.

        Return None also if the rule does not apply to the input, and unless input and weights are all DTensors
        or all plain tensors.
        """
        if type(x) is not Tensor and not (is_dtensor(x) and supports_dtensors(self.rule)):
            return None
        parameters = own_parameters(self.layer)
        if not all(name in parameters for name in self.rule.weights):
            return None
        weights: list[Tensor | None] = [parameters[name] for name in self.rule.weights]
        sharded = is_dtensor(x)
        return weights if all(each is None or is_dtensor(each) is sharded for each in weights) else None


class _LayerNode(torch.autograd.Function):
    """The node: its backward returns the input gradient, and defers or computes the weight gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, deferred: DeferredLayer, leaves: Tensors, *_aliases: Tensor | None
    ) -> Tensor:
        # detached, because autocast caches its copies of leaves, and those made here carry no gradient
        weights = [None if leaf is None else leaf.detach() for leaf in leaves]
        y = deferred.rule.forward(deferred.layer, x, *weights)
        if y.dtype != x.dtype and x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
            x = x.to(y.dtype)
        ctx.deferred = deferred
        ctx.leaves = tuple(leaves)
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return y.detach() if is_view(y) else y  # autograd forbids in-place changes of a view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensors:
        deferred, needed = ctx.deferred, ctx.needs_input_grad
        if gradient is None:
            return (None,) * len(needed)
        if torch.is_grad_enabled():
            raise PipelineError(
                "a split backward cannot be differentiated: remove create_graph=True, or use a schedule with a "
                "full backward, such as 1f1b"
            )
        rule, layer, leaves = deferred.rule, deferred.layer, ctx.leaves
        x, *weights = ctx.saved_tensors
        if False in needed[3:]:
            leaves = tuple([leaf if wanted else None for leaf, wanted in zip(leaves, needed[3:])])
        job = DeferredGradient(rule, layer, x, tuple(weights), gradient, leaves)
        input_gradient = rule.input_gradient(layer, x, job.weights, gradient) if needed[0] else None
        pending = deferred.state.pending
        if pending is None:
            return (input_gradient, None, None, *job.compute())
        pending.add(job)
        return (input_gradient, *(None,) * (len(needed) - 1))


class Deferral:
    """Defers the weight gradients of one stage. With `fusion`, W adds products to `.grad` directly."""

    def __init__(self, module: nn.Module, *, fusion: bool = False) -> None:
        self._module, self._fusion = module, fusion
        self.state = DeferralState()
        self._deferred: list[DeferredLayer] = []
        self.compiled: tuple[str, ...] = ()
        """The names of the compiled modules in the stage, which run unchanged."""
        self._find_layers(module, "", set())
        self.layers = tuple(each.layer for each in self._deferred)
        """The layers whose weight gradients are deferred, unless their weights or inputs do not allow it."""
        self._entered = 0
        self._held: frozenset[int] = frozenset()
        """The ids of weights whose accumulators may have hooks, which W then calls."""
        self._hooked: list[Tensor] = []
        """The weights that have hooks themselves."""

    def _find_layers(self, module: nn.Module, name: str, seen: set[nn.Module]) -> None:
        if module in seen:
            return
        seen.add(module)
        if is_compiled(module):
            self.compiled += (name,)
            return
        rule = rule_of(module)
        if rule is not None and any(weight.requires_grad for weight in module.parameters(recurse=False)):
            self._deferred.append(DeferredLayer(self.state, module, rule))
        for child_name, child in module.named_children():
            self._find_layers(child, f"{name}.{child_name}" if name else child_name, seen)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Run the layers as nodes: around F, and around backwards, which may recompute parts of F.

        A layer whose forward was already replaced on the instance stays as it is.
        """
        if self._entered == 0:
            for each in self._deferred:
                each.layer.__dict__.setdefault("forward", each.forward)
            self._held = frozenset(id(leaf) for leaf in self.weights() if _accumulator_is_held(leaf))
            self._hooked = [leaf for leaf in self.weights() if has_hooks(leaf)]
        self._entered += 1
        try:
            yield
        finally:
            self._entered -= 1
            if self._entered == 0:
                for each in self._deferred:
                    if each.layer.__dict__.get("forward") == each.forward:
                        del each.layer.__dict__["forward"]
                self.state.clear_aliases()

    def begin_deferring(self) -> DeferredGradients:
        """I: return the queue into which backwards defer weight gradients; requires that this is installed.

        There is no context for it: one takes a while to enter.
        """
        if self.state.pending is not None:
            raise PipelineError("another backward of this stage is deferring its weight gradients")
        self.state.pending = DeferredGradients(fusion=self._fusion, held=self._held)
        return self.state.pending

    def end_deferring(self) -> None:
        """From here on backwards are full."""
        self.state.pending = None

    def inspect_graph(self, roots: Iterable[Tensor | GradientEdge]) -> None:
        """After a forward: exclude weights that are also used outside of their layers, or reject such a use.

        `roots` are the outputs of the forward. What the first one did not show is computed in I and in W, which
        is right unless hooks of the weight get the two parts one after the other.
        """
        if self.state.mode is LayerMode.JOINED:
            self.state.exclude_shared(self.weights(), roots)
        elif self._hooked and (found := self.state.used_twice(self._hooked, roots)):
            names = [
                name for name, weight in self._module.named_parameters() if any(weight is w for w in found)
            ]
            raise PipelineError(
                f"{listed(names)} has hooks and is used outside of its layer, but not in the first microbatch: "
                "its hooks would get two parts of its gradient, from I and from W. Use the weight in every "
                "microbatch, or a schedule with a full backward, such as 1f1b"
            )

    def weights(self) -> Iterator[Tensor]:
        """Return the weights of deferred layers that have gradients."""
        weights = (weight for layer in self.layers for weight in layer.parameters(recurse=False))
        return (weight for weight in weights if weight.requires_grad)
