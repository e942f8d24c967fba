"""A decoder split by hand, after the example of torch's tutorial on pipelining."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.pipelining_scripts import Run, gradients_of

WIDTH, LAYERS, WORDS, LENGTH, ROWS, CHUNKS = 8, 4, 13, 5, 8, 4


class Decoder(nn.Module):
    """Embeddings, layers, a norm and an output; whatever a rank does not have is None."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict(
            {str(i): nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0) for i in range(LAYERS)}
        )
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.output: nn.Module | None = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        value = tokens if self.embeddings is None else self.embeddings(tokens)
        for layer in self.layers.values():
            value = layer(value, value)
        value = value if self.norm is None else self.norm(value)
        result: Tensor = value if self.output is None else self.output(value)
        return result


def cut(whole: Decoder, stage: int, stages: int) -> Decoder:
    """Only what one stage has."""
    for layer in range(LAYERS):
        if layer * stages // LAYERS != stage:
            del whole.layers[str(layer)]
    if stage > 0:
        whole.embeddings = None
    if stage < stages - 1:
        whole.norm = whole.output = None
    return whole


def tokenwise(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.reshape(-1, WORDS), target.reshape(-1))


def token_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def follow(package: str) -> Run:
    """What the tutorial's script does on a rank."""
    pipelining: Any = importlib.import_module(package)
    rank, stages = dist.get_rank(), dist.get_world_size()
    module = cut(Decoder(), rank, stages)
    stage = pipelining.PipelineStage(module, rank, stages, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, n_microbatches=CHUNKS, loss_fn=tokenwise)
    x, y = token_batch()
    run, losses = Run(), list[Tensor]()
    output = None
    if rank == 0:
        schedule.step(x)
    elif rank == stages - 1:
        output = schedule.step(target=y, losses=losses)
    else:
        schedule.step()
    run.losses = [[float(loss.detach()) for loss in losses]]
    run.outputs = [None if output is None else output.detach()]
    run.gradients = [gradients_of([(0, module)])]
    return run


def alone() -> Run:
    """The same in one process."""
    whole, run = Decoder(), Run()
    outputs, losses = [], []
    for x, y in zip(*(part.chunk(CHUNKS) for part in token_batch())):
        outputs.append(whole(x))
        losses.append(tokenwise(outputs[-1], y))
        torch.autograd.backward(losses[-1] / CHUNKS)
    run.losses = [[float(loss.detach()) for loss in losses]]
    run.outputs = [torch.cat(outputs).detach()]
    run.gradients = [gradients_of([(0, whole)])]
    return run
