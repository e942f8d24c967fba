"""Split backward: I defers the weight gradients of a stage, and W computes them.

While a `Deferral` is installed, every layer with a rule runs as one node of the autograd graph. The backward of
the node computes the input gradient. It keeps what the weight gradients need, the input and the gradient of the
output, in a queue:

    with deferral.installed():
        output = module(x)                              F
        with deferral.deferring() as gradients:
            torch.autograd.backward(output, gradient)   I
        gradients.run()                                 W

A backward outside of `deferring` is B: it computes the weight gradients at once. Autograd handles everything
else in I: norms, attention, and uses of a weight outside of its layer.

A weight that is also used outside of its layer cannot be deferred. Only the graph of a forward shows this, so
the first microbatch runs in `LayerMode.JOINED`, and its I is a full backward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.runtime.backward.deferred_gradients import DeferredGradients, accumulator_is_held, has_hooks
from penstock.runtime.backward.deferred_layer import DeferralState, DeferredLayer, LayerMode
from penstock.runtime.backward.layer_rules import rule_of

__all__ = ["Deferral", "LayerMode"]


class Deferral:
    """Defers the weight gradients of one stage. With `fusion`, W adds products to `.grad` directly."""

    def __init__(self, module: nn.Module, *, fusion: bool = False) -> None:
        self._module, self._fusion = module, fusion
        self._state = DeferralState()
        self._deferred: list[DeferredLayer] = []
        self.compiled: tuple[str, ...] = ()
        """The names of the compiled modules in the stage, which run unchanged."""
        self._find_layers(module, "", set())
        self.layers = tuple(each.layer for each in self._deferred)
        """The layers whose weight gradients are deferred, unless their weights or inputs do not allow it."""
        self._patched: list[DeferredLayer] = []
        self._entered = 0
        self._held: frozenset[int] = frozenset()
        """The ids of weights whose accumulators may have hooks, which W then calls."""
        self._hooked: list[Tensor] = []
        """The weights that have hooks themselves."""

    @property
    def mode(self) -> LayerMode:
        """How layers run while installed."""
        return self._state.mode

    @mode.setter
    def mode(self, value: LayerMode) -> None:
        self._state.mode = value

    def _find_layers(self, module: nn.Module, name: str, seen: set[nn.Module]) -> None:
        if module in seen:
            return
        seen.add(module)
        if _is_compiled(module):
            self.compiled += (name,)
            return
        rule = rule_of(module)
        if rule is not None and any(weight.requires_grad for weight in module.parameters(recurse=False)):
            self._deferred.append(DeferredLayer(self._state, module, rule))
        for child_name, child in module.named_children():
            self._find_layers(child, f"{name}.{child_name}" if name else child_name, seen)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Run the layers as nodes: around F, and around backwards, which may recompute parts of F.

        A layer whose forward was already replaced on the instance stays as it is.
        """
        if self._entered == 0:
            self._patched = [each for each in self._deferred if "forward" not in each.layer.__dict__]
            for each in self._patched:
                each.layer.__dict__["forward"] = each.forward
            self._held = frozenset(id(leaf) for leaf in self._leaves() if accumulator_is_held(leaf))
            self._hooked = [leaf for leaf in self._leaves() if has_hooks(leaf)]
        self._entered += 1
        try:
            yield
        finally:
            self._entered -= 1
            if self._entered == 0:
                for each in self._patched:
                    if each.layer.__dict__.get("forward") == each.forward:
                        del each.layer.__dict__["forward"]
                self._state.aliases.clear()

    @contextmanager
    def deferring(self) -> Iterator[DeferredGradients]:
        """I: a backward in here defers its weight gradients into the queue that this gives."""
        with self.installed():
            gradients = self.begin_deferring()
            try:
                yield gradients
            finally:
                self.end_deferring()

    def begin_deferring(self) -> DeferredGradients:
        """The same without a context, which takes a while to enter; requires that this is installed."""
        if self._state.pending is not None:
            raise PipelineError("another backward of this stage is deferring its weight gradients")
        self._state.pending = DeferredGradients(fusion=self._fusion, held=self._held)
        return self._state.pending

    def end_deferring(self) -> None:
        """From here on backwards are full."""
        self._state.pending = None

    def inspect_graph(self, roots: Iterable[Tensor | GradientEdge]) -> None:
        """After a forward: exclude weights that are also used outside of their layers, or reject such a use.

        `roots` are the outputs of the forward. What the first one did not show is computed in I and in W, which
        is right unless hooks of the weight get the two parts one after the other.
        """
        if self.mode is LayerMode.JOINED:
            self.exclude_shared_weights(roots)
        elif self._hooked and (found := self._state.aliases.used_twice(self._hooked, roots)):
            names = [
                name for name, weight in self._module.named_parameters() if any(weight is w for w in found)
            ]
            raise PipelineError(
                f"{listed(names)} has hooks and is used outside of its layer, but not in the first microbatch: "
                "its hooks would get two parts of its gradient, from I and from W. Use the weight in every "
                "microbatch, or a schedule with a full backward, such as 1f1b"
            )

    def exclude_shared_weights(self, roots: Iterable[Tensor | GradientEdge]) -> tuple[Tensor, ...]:
        """From the next forward on, leave layers to autograd whose weights are also used outside of them.

        `roots` are the outputs of a forward that ran while installed. Its graph holds aliases for the weights
        of deferred layers, so a weight that appears there itself is used elsewhere, and its hooks would fire
        twice, in I and in W. Gives the weights newly found.
        """
        return self._state.aliases.exclude_shared(self._leaves(), roots)

    def _leaves(self) -> Iterator[Tensor]:
        """The weights of deferred layers that have gradients."""
        weights = (weight for layer in self.layers for weight in layer.parameters(recurse=False))
        return (weight for weight in weights if weight.requires_grad)


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile or TorchScript runs the module; does not load the compiler."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None  # noqa: SLF001
