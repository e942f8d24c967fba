"""Train a pipeline with Accelerate: `Accelerator`, `prepare`, `print`, and resuming.

torchrun --nproc-per-node 2 examples/accelerate_train.py

Accelerate starts the process group, wraps the optimizer and the learning-rate schedule, and prints on one rank.
The pipeline replaces `accelerator.prepare(model)` and `accelerator.backward(loss)`. Every rank reads the same
batches: the first stage uses the inputs, the last one the targets, so the data loader is not prepared.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock
from penstock.runtime import Pipeline, load_checkpoint, save_checkpoint, split

MICROBATCHES, WIDTH, LAYERS, ROWS = 4, 16, 4, 64
CHECKPOINT = Path("accelerate-checkpoint")


def model() -> nn.Sequential:
    """Return an MLP with the same weights on every rank."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])


def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of an epoch in an order that is the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, WIDTH, generator=generator)
    rows = TensorDataset(inputs, inputs.roll(1, dims=1).tanh())
    order = torch.Generator().manual_seed(epoch)
    yield from DataLoader(rows, batch_size=16, shuffle=True, generator=order)


class Training:
    """A pipeline, its optimizer and its learning-rate schedule, as `accelerator.prepare` returns them."""

    def __init__(self, accelerator: Accelerator) -> None:
        set_seed(0)
        self.accelerator = accelerator
        ranks = accelerator.num_processes
        stages = split(model(), at=[str(stage * LAYERS // ranks) for stage in range(1, ranks)])
        schedule = penstock.build("1f1b", ranks=ranks, microbatches=MICROBATCHES)
        self.pipeline = Pipeline(
            {stage: module.to(accelerator.device) for stage, module in stages.items()},
            schedule,
            loss=nn.functional.mse_loss,
        )
        optimizer = torch.optim.AdamW(self.pipeline.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
        self.optimizer, self.scheduler = accelerator.prepare(optimizer, scheduler)

    def epoch(self, number: int) -> float:
        """Train one epoch; return the mean loss, which every rank has."""
        losses = []
        for x, y in batches(number):
            result = self.pipeline.step(x.to(self.accelerator.device), target=y.to(self.accelerator.device))
            self.pipeline.clip_grad_norm_(1.0)  # not accelerator.clip_grad_norm_: the norm is of all ranks
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(result.loss)
        return sum(losses) / len(losses)

    def save(self, path: Path) -> None:
        """Save the state of all ranks; accelerator.save_state would write each rank's parts under one name."""
        save_checkpoint(
            path, self.pipeline, self.optimizer.optimizer, extra={"lr": self.scheduler.state_dict()}
        )

    def load(self, path: Path) -> None:
        """Continue from a checkpoint, also one of another number of ranks."""
        state = load_checkpoint(path, self.pipeline, self.optimizer.optimizer)
        self.scheduler.load_state_dict(state["lr"])


def main() -> None:
    """Train four epochs at once, and again with a restart after two: the same losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    epochs = parser.parse_args().epochs
    # the pipeline has one optimizer step per batch on all ranks together: the schedule advances once for it
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), step_scheduler_with_optimizer=False)
    training = Training(accelerator)
    for epoch in range(epochs):
        accelerator.print(f"epoch {epoch}: loss {training.epoch(epoch):.4f}", flush=True)
        if epoch == epochs // 2 - 1:
            training.save(CHECKPOINT)
    resumed = Training(accelerator)
    resumed.load(CHECKPOINT)
    for epoch in range(epochs // 2, epochs):
        accelerator.print(f"resumed, epoch {epoch}: loss {resumed.epoch(epoch):.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
