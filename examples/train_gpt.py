"""Train a small character-level GPT; resume from its checkpoint with another schedule or number of ranks.

torchrun --nproc-per-node 2 examples/train_gpt.py --schedule zbv --until 30
torchrun --nproc-per-node 1 examples/train_gpt.py --schedule interleaved-1f1b --until 60
"""

import argparse
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock.runtime import Pipeline, load_checkpoint, save_checkpoint, split

TEXT = """
Water waits behind the dam. A gate is opened and it falls through a pipe to the turbine. The pipe is
the penstock. Air in the pipe is power that is lost, so the pipe is kept full: the next water is
there before the last is gone. So with a row of machines that train one model. Each has a part of
it, and hands on what it has made to the next. A machine that waits is air in the pipe. The order of
work decides how much of it there is, and who waits for whom.
"""
LAYERS, WIDTH, HEADS, LENGTH, ROWS, MICROBATCHES = 4, 64, 4, 32, 16, 4


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Return one vector per token."""
        return self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))


class Block(nn.Module):
    """A transformer block: causal attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states of the same shape."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of the next token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch_of(step: int, text: Tensor) -> Tensor:
    """Draw the batch of a step: the same on all ranks and after a resume."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH - 1, (ROWS,), generator=generator).tolist()
    return torch.stack([text[start : start + LENGTH + 1] for start in starts])


def main() -> None:
    """Train until a step and save a checkpoint; rank 0 prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="zbv")
    parser.add_argument("--until", type=int, default=30)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/gpt"))
    options = parser.parse_args()
    dist.init_process_group("gloo")

    characters = sorted(set(TEXT))
    text = torch.tensor([characters.index(character) for character in TEXT])
    torch.manual_seed(0)
    parts = OrderedDict(
        embedding=Embedding(len(characters)),
        blocks=nn.Sequential(*(Block() for _ in range(LAYERS))),
        norm=nn.LayerNorm(WIDTH),
        head=nn.Linear(WIDTH, len(characters)),
    )
    schedule = penstock.build(options.schedule, ranks=dist.get_world_size(), microbatches=MICROBATCHES)
    stages = split(nn.Sequential(parts), layout=penstock.even_layout(LAYERS, schedule.num_stages))

    with Pipeline(stages, schedule, loss=loss) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.003)
        if options.checkpoint.exists():
            pipeline.completed_steps = load_checkpoint(options.checkpoint, pipeline, optimizer)["step"]
        start = pipeline.completed_steps
        if dist.get_rank() == 0:
            print(f"{schedule.name} (p={schedule.num_ranks}), from step {start}")
        for step in range(start, options.until):
            rows = batch_of(step, text)
            result = pipeline.step(rows[:, :-1], target=rows[:, 1:])
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0 and (step + 1) % 10 == 0:
                print(f"step {step + 1}: loss {result.loss:.2f}", flush=True)
        save_checkpoint(options.checkpoint, pipeline, optimizer, extra={"step": options.until})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
