"""Promise: training mode and random state are as before."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from penstock.runtime.stage.memory import eval_mode, preserved_rng_state


def test_every_submodule_gets_its_own_mode_back() -> None:
    dropout = nn.Dropout().eval()
    module = nn.Sequential(nn.Linear(1, 1), nn.Sequential(dropout, nn.Linear(1, 1)))
    with eval_mode([module]):
        assert not any(part.training for part in module.modules())
    assert [part for part in module.modules() if not part.training] == [dropout]


def drawn() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.random())]  # noqa: NPY002


def test_random_numbers_drawn_inside_are_drawn_again_outside() -> None:
    with preserved_rng_state(torch.device("cpu")):
        inside = drawn()
    assert inside == drawn()
