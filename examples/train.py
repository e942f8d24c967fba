"""Train a small model on two or more ranks, and check every gradient against one process.

torchrun --nproc-per-node 2 examples/train.py

That pipelines of other kinds train it alike is checked without a script:

penstock verify-grads examples.train:parts 1f1b zbv -p 2 -m 8
"""

import copy

import torch
import torch.distributed as dist
from torch import nn

import penstock
from penstock.runtime import Pipeline, TrainingLog, split

MICROBATCHES, WIDTH, ROWS, LAYERS = 8, 32, 64, 8


def parts() -> tuple[nn.Module, object, torch.Tensor, torch.Tensor]:
    """The model, the loss and one batch."""
    torch.manual_seed(0)  # every rank makes the same model, and keeps its own part of it
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
    return model, nn.functional.mse_loss, torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def main() -> None:
    """Three steps of 1F1B; rank 0 prints."""
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, loss, x, y = parts()
    alone = copy.deepcopy(model)

    schedule = penstock.build("1f1b", ranks=ranks, microbatches=MICROBATCHES)
    stages = split(model, at=[str(stage * LAYERS // ranks) for stage in range(1, ranks)])
    pipeline = Pipeline(stages, schedule, loss=loss)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.1)

    with TrainingLog() as log:
        for _ in range(3):
            result = pipeline.step(x, target=y)
            norm = pipeline.clip_grad_norm_(1.0)
            loss(alone(x), y).backward()
            nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
            whole = dict(alone.named_parameters())
            mine = pipeline.modules[rank].named_parameters()
            worst = max(float((p.grad - whole[name].grad).abs().max()) for name, p in mine)
            log.step(result.loss, norm, tokens=ROWS)
            log.say(f"gradients equal to one process: {worst < 1e-6}")
            for each in (optimizer, optimizer_alone):
                each.step()
                each.zero_grad()
    pipeline.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
