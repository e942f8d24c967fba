"""The text of a module with models for `penstock verify-grads`, right and wrong ones."""

from __future__ import annotations

__all__ = ["MODELS"]

MODELS = """
import os
import torch
from torch import nn

def layers(extra=None, dtype=torch.float32, rows=8):
    found = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), extra or nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2)]
    batch = torch.randn(rows, 6, dtype=dtype), torch.randn(rows, 2, dtype=dtype)
    return nn.Sequential(*found).to(dtype), nn.functional.mse_loss, *batch

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight
    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        wrong = 1.5 if ctx.needs_input_grad[0] and len(x) < 8 else 1.0  # right for the whole batch alone
        return gradient * weight, wrong * (gradient * x).sum(0)

class Planted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
    def forward(self, x):
        return Scaled.apply(x, self.weight)

class ByProcess(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
    def forward(self, x):
        return x * (self.weight if os.environ["RANK"] == "0" else self.weight.detach())

class WithWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
    def forward(self, output, target):
        return ((output * self.weight - target) ** 2).mean()

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 2)
    def forward(self, x):
        return self.first(x)

def right(): return layers()
def right_in_double(): return layers(dtype=torch.float64)
def planted(): return layers(Planted())
def by_process(): return layers(ByProcess())
def normed(): return layers(nn.BatchNorm1d(6))
def dropped():
    model, *rest = layers(nn.Dropout(0.5))
    model[1] = nn.Dropout(0.5)
    return model, *rest
def with_loss(): return (layers()[0], WithWeight(), *layers()[2:])
def uneven(): return layers(rows=9)
def branches(): return (Branches(), *layers()[1:])
def unseeded():
    torch.manual_seed(os.getpid())
    return layers()
def three(): return layers()[:3]
def nothing(): return 1, 2, [3], 4
def raising(): return layers(rows=undefined)
def misshapen(): return (*layers()[:2], torch.randn(8, 5), torch.randn(8, 2))
def many(): return (layers()[0], lambda output, target: output - target, *layers()[2:])
def frozen(): return (layers()[0].requires_grad_(False), *layers()[1:])
number = 4

class Masked(nn.Module):
    def __init__(self, last=False):
        super().__init__()
        self.layer, self.last = nn.Linear(6, 2 if last else 6), last
    def forward(self, batch, *, mask):
        hidden = self.layer(batch["hidden"] if isinstance(batch, dict) else batch) * mask
        return {"logits": hidden, "mask": mask} if self.last else {"hidden": torch.tanh(hidden)}

def masked_loss(output, target):
    squares = (output["logits"] - target) ** 2 * output["mask"]
    return squares.sum() / output["mask"].sum()

def hand_written(stages):
    mask = torch.tensor([1.0, 1, 1, 0, 1, 1, 1, 0, 1])[:, None]
    return {
        "stages": {stage: Masked(stage == stages - 1) for stage in range(stages)},
        "loss": lambda output, target: masked_loss(output, target["value"]),
        "inputs": torch.randn(9, 6),
        "kwargs": {"mask": mask},
        "target": {"value": torch.randn(9, 2), "mask": mask},
        "tokens": lambda target: int(target["mask"].sum()),
    }
def uncounted(stages): return {**hand_written(stages), "tokens": None}
def two_stages(): return ([nn.Linear(6, 6), nn.Linear(6, 2)], *layers()[1:])
def tied(stages):
    parts = [nn.Linear(6, 6) for _ in range(stages)]
    parts[-1].weight = parts[0].weight
    return {"stages": parts, "loss": nn.functional.mse_loss, "inputs": torch.randn(8, 6),
            "target": torch.randn(8, 6)}

class Joined(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(inputs))
    def forward(self, *inputs):
        return sum(layer(x) for layer, x in zip(self.layers, inputs)).tanh()

def two_heads():  # 0 -> 1 -> 2, 0 -> 2, 1 -> 3
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))
        def forward(self, output, target):
            return ((output * self.weight - target) ** 2).mean()
    return {"stages": [Joined(1), Joined(1), Joined(2), Joined(1)], "inputs": torch.randn(8, 6),
            "loss": {2: nn.functional.mse_loss, 3: Weighted()}, "target": torch.randn(8, 6)}
def two_sources():  # 0 -> 2, 1 -> 2
    return {"stages": [Joined(1), Joined(2), Joined(2)], "loss": nn.functional.mse_loss,
            "inputs": (torch.randn(8, 6), (torch.randn(8, 6), torch.randn(8, 6))), "target": torch.randn(8, 6)}

class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle, self.up, self.head = (nn.Linear(6, 6) for _ in range(4))
    def forward(self, x):
        skip = self.down(x).relu()
        return self.head(self.up(self.middle(skip).relu()) + skip)
def traced():
    from penstock.runtime import split
    from torch.fx import symbolic_trace
    stages = split(symbolic_trace(UNet()), at=["middle", "up", "head"])
    return {"stages": stages, "loss": nn.functional.mse_loss, "inputs": torch.randn(8, 6),
            "target": torch.randn(8, 6)}
def traced_model():
    from torch.fx import symbolic_trace
    return symbolic_trace(UNet()), nn.functional.mse_loss, torch.randn(8, 6), torch.randn(8, 6)
def misnamed(): return {"modle": layers()[0], "los": 1}

def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(vocab_size=9, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    text = torch.randint(9, (4, 6))
    def loss(logits, target):
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)), loss, text[:, :-1], text[:, 1:]

def named_llama():
    model, loss, ids, target = llama()
    kwargs = {"input_ids": ids, "position_ids": torch.arange(5).expand(4, -1) + 3}
    return {"model": model, "loss": loss, "kwargs": kwargs, "target": target}
"""
