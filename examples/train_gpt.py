"""Train a small GPT on letters; stop, and go on from the checkpoint with another schedule or other ranks.

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
    """Letters and their places, as vectors."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """One vector for each letter."""
        return self.letter(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))


class Block(nn.Module):
    """Attention to what came before, then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """How well the next letter is foretold."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch_of(step: int, text: Tensor) -> Tensor:
    """The rows of a step, the same on all ranks and however often the run was stopped."""
    drawn = torch.Generator().manual_seed(step)
    begins = torch.randint(len(text) - LENGTH - 1, (ROWS,), generator=drawn).tolist()
    return torch.stack([text[begin : begin + LENGTH + 1] for begin in begins])


def main() -> None:
    """Train until a step, with a checkpoint at the end; rank 0 prints."""
    options = argparse.ArgumentParser()
    options.add_argument("--schedule", default="zbv")
    options.add_argument("--until", type=int, default=30)
    options.add_argument("--checkpoint", type=Path, default=Path("runs/gpt"))
    given = options.parse_args()
    dist.init_process_group("gloo")

    letters = sorted(set(TEXT))
    text = torch.tensor([letters.index(letter) for letter in TEXT])
    torch.manual_seed(0)
    parts = OrderedDict(
        embedding=Embedding(len(letters)),
        blocks=nn.Sequential(*(Block() for _ in range(LAYERS))),
        norm=nn.LayerNorm(WIDTH),
        head=nn.Linear(WIDTH, len(letters)),
    )
    schedule = penstock.build(given.schedule, ranks=dist.get_world_size(), microbatches=MICROBATCHES)
    stages = split(nn.Sequential(parts), layout=penstock.even_layout(LAYERS, schedule.num_stages))

    with Pipeline(stages, schedule, loss=loss) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.003)
        done = 0
        if given.checkpoint.exists():
            done = load_checkpoint(given.checkpoint, pipeline, optimizer)["step"]
        if dist.get_rank() == 0:
            print(f"{schedule.name} on {schedule.num_ranks} ranks, from step {done}")
        for step in range(done, given.until):
            rows = batch_of(step, text)
            result = pipeline.step(rows[:, :-1], target=rows[:, 1:])
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0 and (step + 1) % 10 == 0:
                print(f"step {step + 1}: loss {result.loss:.2f}", flush=True)
        save_checkpoint(given.checkpoint, pipeline, optimizer, extra={"step": given.until})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
