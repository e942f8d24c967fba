"""Train a small Llama on a device mesh: pipeline, data and tensor parallelism, and FSDP.

torchrun --nproc-per-node 4 examples/composed.py pp=2 dp=2
torchrun --nproc-per-node 4 examples/composed.py pp=2 fsdp=2
torchrun --nproc-per-node 4 examples/composed.py pp=2 tp=2
torchrun --nproc-per-node 8 examples/composed.py pp=2 fsdp=2 tp=2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import penstock
from penstock.runtime import Pipeline, materialize, split

MICROBATCHES, ROWS, LENGTH = 4, 8, 32
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    attn_implementation="sdpa",
)


def parallelize(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply tensor parallelism and FSDP to a stage of this rank, along the other dimensions of the mesh."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in stage.own_layers:
        if "tp" in mesh.mesh_dim_names:
            parallelize_module(layer, mesh["tp"], plan)
        if "fsdp" in mesh.mesh_dim_names:
            fully_shard(layer, mesh=mesh["fsdp"])
    if "fsdp" in mesh.mesh_dim_names:
        fully_shard(stage, mesh=mesh["fsdp"])
    return stage


def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    """Train five steps on one batch; rank 0 prints."""
    sizes = {name: int(size) for name, size in (size.split("=") for size in sys.argv[1:] or ["pp=2", "dp=2"])}
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    schedule = penstock.build("zbv", ranks=sizes["pp"], microbatches=MICROBATCHES)
    layout = penstock.even_layout(CONFIG.num_hidden_layers, schedule.num_stages)
    with torch.device("meta"):  # every rank allocates only its own stages
        stages = split(LlamaForCausalLM(CONFIG), layout=layout)
    torch.manual_seed(0)  # replicas and tied weights start with the same values
    own = schedule.placement.stages_of_rank[mesh.get_local_rank("pp")]
    mine = [parallelize(materialize(stages[index]), mesh) for index in own]

    replicas = mesh["dp"] if "dp" in sizes else None
    with Pipeline(mine, schedule, loss=loss, group=mesh["pp"], replicas=replicas) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01, foreach=False)
        shares = [name for name in ("dp", "fsdp") if name in sizes]
        torch.manual_seed(1 + sum(map(mesh.get_local_rank, shares)))  # every replica has different data
        text = torch.randint(CONFIG.vocab_size, (ROWS, LENGTH + 1))
        for _ in range(5):
            result = pipeline.step(text[:, :-1], target=text[:, 1:])
            norm = float(pipeline.clip_grad_norm_(1.0))
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(
                    f"step {pipeline.completed_steps}: loss {result.loss:.4f}, gradient norm {norm:.4f}",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
