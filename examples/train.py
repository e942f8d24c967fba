"""Train a small model on two or more ranks, and check every gradient against one process.

torchrun --nproc-per-node 2 examples/train.py
"""

import copy

import torch
import torch.distributed as dist
from torch import nn

import penstock
from penstock.runtime import Pipeline, split

MICROBATCHES, WIDTH, ROWS = 8, 32, 64


def main() -> None:
    """Three steps of 1F1B; rank 0 prints."""
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)  # every rank makes the same model, and keeps its own part of it
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2 * ranks)]
    model = nn.Sequential(*layers)
    alone = copy.deepcopy(model)

    schedule = penstock.build("1f1b", ranks=ranks, microbatches=MICROBATCHES)
    stages = split(model, at=[str(2 * stage) for stage in range(1, ranks)])
    pipeline = Pipeline(stages, schedule, loss=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.1)

    for step in range(3):
        x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        result = pipeline.step(x, target=y)
        nn.functional.mse_loss(alone(x), y).backward()
        whole = dict(alone.named_parameters())
        mine = pipeline.modules[rank].named_parameters()
        worst = max(float((p.grad - whole[name].grad).abs().max()) for name, p in mine)
        if rank == 0:
            print(f"step {step}: loss {result.loss:.4f}, gradients equal to one process: {worst < 1e-6}")
        for each in (optimizer, optimizer_alone):
            each.step()
            each.zero_grad()
    pipeline.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
