"""Train a small model on two or more ranks, and compare every gradient with one process.

torchrun --nproc-per-node 2 examples/train.py

The same comparison for every schedule family: penstock verify-grads examples.train:parts --all -p 2 -m 8
"""

import torch
import torch.distributed as dist
from torch import nn

import penstock
from penstock.runtime import Pipeline, TrainingLog, split

MICROBATCHES, WIDTH, ROWS, LAYERS = 8, 32, 64, 8


def parts() -> tuple[nn.Module, object, torch.Tensor, torch.Tensor]:
    """Return model, loss, inputs and targets, the same on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
    return model, nn.functional.mse_loss, torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def main() -> None:
    """Train three steps with 1F1B; rank 0 prints."""
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    (model, loss, x, y), (reference, *_) = parts(), parts()

    schedule = penstock.build("1f1b", ranks=ranks, microbatches=MICROBATCHES)
    stages = split(model, at=[str(stage * LAYERS // ranks) for stage in range(1, ranks)])
    with Pipeline(stages, schedule, loss=loss) as pipeline, TrainingLog() as log:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for _ in range(3):
            result = pipeline.step(x, target=y)
            loss(reference(x), y).backward()
            whole = dict(reference.named_parameters())
            mine = pipeline.modules[rank].named_parameters()
            worst = max(float((p.grad - whole[name].grad).abs().max()) for name, p in mine)
            log.step(result.loss, pipeline.clip_grad_norm_(float("inf")), tokens=ROWS)
            if rank == 0:
                print(f"[rank 0] gradients equal to one process: {worst < 1e-6}", flush=True)
            for each in (optimizer, reference_optimizer):
                each.step()
                each.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
