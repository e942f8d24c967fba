"""The demo: a small character-level GPT that is trained on a short text in pipelines on this machine."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.ir.schedule import Schedule
from penstock.planning.layout import even_layout
from penstock.runtime.models.partition import split
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.training_log import TrainingLog
from penstock.simulation.timeline import Timeline

# A small character-level GPT, and the text that it learns.


WIDTH, HEADS, LAYERS, LENGTH = 256, 4, 8, 64
ROWS = 4
"""Sequences per microbatch, unless given."""
DEMO_ROWS = 8
"""Sequences per microbatch of the demo: enough that a step is long compared with the overhead of actions."""


class Embedding(nn.Module):
    """Token embedding plus learned position embedding."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """The sum of both."""
        output: Tensor = self.characters(ids) + self.positions(torch.arange(ids.shape[1]))
        return output


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention_in, self.attention_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and MLP, each with a residual connection."""
        rows, length, _ = x.shape
        query, key, value = (
            part.view(rows, length, HEADS, -1).transpose(1, 2)
            for part in self.attention_in(self.attention_norm(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(rows, length, WIDTH))
        output: Tensor = x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))
        return output


def gpt() -> nn.Sequential:
    """The model, with the same weights in every process."""
    torch.manual_seed(0)
    count = len(_text()[1])
    blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
    return nn.Sequential(Embedding(count), blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, count))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of the next character."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@cache
def _text() -> tuple[Tensor, list[str]]:
    """The text as token ids, and the vocabulary."""
    text = files("penstock.runtime.demo").joinpath("text.txt").read_text(encoding="utf-8")
    characters = sorted(set(text))
    return torch.tensor([characters.index(character) for character in text]), characters


class Batches:
    """Batches of random parts of the text; a fixed seed makes them the same in every process."""

    def __init__(self, microbatches: int, rows: int = ROWS) -> None:
        self._count = rows * microbatches
        self._generator = torch.Generator().manual_seed(1)

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets."""
        text, _ = _text()
        starts = torch.randint(len(text) - LENGTH, (self._count,), generator=self._generator)
        sequences = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
        return sequences[:, :-1], sequences[:, 1:]


def model_and_batch() -> tuple[nn.Module, object, Tensor, Tensor]:
    """The model, the loss and a batch for the current number of ranks, for verification."""
    return gpt(), cross_entropy, *Batches(dist.get_world_size(), DEMO_ROWS)()


# The training that the ranks of the demo run: one model, with a schedule that may change from step to step.


@dataclass(frozen=True)
class Step:
    """The measurements of one step."""

    loss: float
    tokens: int
    seconds: float
    live: int
    """The peak number of live activations on this rank."""
    timeline: Timeline
    """The same on every rank."""


class _Training:
    """The state of a rank between calls."""

    def __init__(self, ranks: int, log: Path, microbatches: int, rows: int) -> None:
        self.stages = split(gpt(), layout=even_layout(LAYERS, ranks))
        own_stage = self.stages[dist.get_rank()]
        self.optimizer = torch.optim.AdamW(own_stage.parameters(), lr=1e-3)
        self.batches = Batches(microbatches, rows)
        self.exit_stack = ExitStack()
        self.log = self.exit_stack.enter_context(TrainingLog(jsonl=log, every=0))
        self.pipelines: dict[str, Pipeline] = {}

    def pipeline(self, schedule: Schedule) -> Pipeline:
        if schedule.name not in self.pipelines:
            pipeline = self.exit_stack.enter_context(Pipeline(self.stages, schedule, loss=cross_entropy))
            self.exit_stack.enter_context(pipeline.profile())
            self.pipelines[schedule.name] = pipeline
        return self.pipelines[schedule.name]

    def step(self, schedule: Schedule) -> Step:
        pipeline = self.pipeline(schedule)
        ids, target = self.batches()
        dist.barrier()
        begin = time.perf_counter()
        result = pipeline.step(ids, target=target)
        norm = pipeline.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        assert result.loss is not None
        assert result.timeline is not None
        self.log.step(result.loss, norm, tokens=target.numel())
        return Step(result.loss, target.numel(), seconds, pipeline.peak_live_activations, result.timeline)


_current: list[_Training] = []


def begin(ranks: int, log: Path, microbatches: int, rows: int = DEMO_ROWS) -> None:
    """Create the model and its optimizer; `rows`: sequences per microbatch."""
    _current[:] = [_Training(ranks, log, microbatches, rows)]


def train(schedule: Schedule) -> Step:
    """Run one step with a schedule; all schedules train the same model."""
    return _current[0].step(schedule)


def end() -> None:
    """Close all pipelines; all ranks call this."""
    _current.pop().exit_stack.close()
