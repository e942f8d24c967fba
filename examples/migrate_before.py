"""Train on two ranks with two stages each, with torch.distributed.pipelining.

torchrun --nproc-per-node 2 examples/migrate_before.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

STAGES, MICROBATCHES = 4, 4


def main() -> None:
    """Train three steps; the rank of the last stage prints."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # every rank creates the same model and uses its own stages
    parts = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(STAGES)]
    own = range(rank, STAGES, ranks)
    stages = [PipelineStage(parts[index], index, STAGES, torch.device("cpu")) for index in own]
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD([weight for index in own for weight in parts[index].parameters()], lr=0.5)

    x, y = torch.randn(8, 16), torch.randn(8, 16)
    for step in range(1, 4):
        losses = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
