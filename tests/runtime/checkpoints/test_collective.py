"""Promise: an error on one rank is raised on all, as what it is."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest
import torch.distributed as dist

from penstock import CheckpointError
from penstock.runtime import save_checkpoint
from penstock.runtime.checkpoints import files
from penstock.runtime.checkpoints.collective import Collective
from tests.support.checkpoints import small
from tests.support.pool import Pools


class Unpicklable:
    def __reduce__(self) -> NoReturn:
        raise RuntimeError("not a connection")


def gather_badly() -> str:
    ranks = Collective(None, "no gathering")
    with pytest.raises(CheckpointError) as caught:
        ranks.run(lambda: Unpicklable() if dist.get_rank() == 1 else None)
    return str(caught.value)


@pytest.mark.xdist_group("ranks-2")
def test_a_result_that_cannot_be_pickled_is_no_lost_connection_and_no_rank_waits(pools: Pools) -> None:
    wanted = "no gathering:\n  rank 1: RuntimeError: not a connection"
    assert pools(2).run(gather_badly) == [wanted] * 2


def test_an_error_of_another_kind_is_no_lost_connection(tmp_path: Path) -> None:
    error = NotImplementedError("of a device")  # a RuntimeError, too
    with mock.patch.object(files, "save", side_effect=error), pytest.raises(NotImplementedError):
        save_checkpoint(tmp_path / "c", small())
