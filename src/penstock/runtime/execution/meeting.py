"""What ranks do when they have connected: compare what they must have in common, and connect to partners."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.runtime.data_parallel.tied_weights import TiedWeights
from penstock.runtime.execution.connection import Connection
from penstock.runtime.execution.expected_partners import ExpectedPartners
from penstock.runtime.execution.partner_calls import PartnerCalls
from penstock.runtime.failure.agreement import check_agreement
from penstock.runtime.failure.connecting import connecting
from penstock.runtime.transport.communicator import Communicator, gather_arrays

__all__ = ["meet"]


def meet(
    connection: Connection,
    ties: TiedWeights,
    completed: int,
    options: Mapping[str, object],
    expected: ExpectedPartners,
) -> None:
    """Raise unless this rank agrees with all others on the model, the completed calls and the loss options."""
    config, communicator, problem = connection.config, connection.communicator, ""
    if communicator is not None:
        with connecting(config):
            check_agreement(config, ties, completed, options, communicator)
            communicator.connect_subgroups(ties.rank_groups)
    expected.begin(config, connection.partner_groups)
    if connection.partner_groups:
        try:
            connection.partners = PartnerCalls(config, connection.partner_groups, options, expected)
        except PipelineError as error:
            problem = str(error)
    if communicator is not None and dist.get_world_size() > len(config.members):
        with connecting(config):  # the other ranks of this pipeline have other partners
            problem = next(filter(None, _all_texts(communicator, problem)), "")
    if problem:
        if connection.partners is not None:
            connection.partners.abort()
        raise PipelineError(problem)
    if connection.monitor is not None and connection.partners is not None:
        connection.monitor.partners = connection.partners.ranks
    expected.connected()


def _all_texts(communicator: Communicator, own: str) -> list[str]:
    """Every rank's text. Not through the store, in which an attempt to reach a lost partner may still wait."""
    data = np.frombuffer(own.encode(), dtype=np.uint8).astype(np.int64)
    lengths = [int(each) for each in communicator.all_gather(torch.tensor([len(data)]))]
    return [bytes(each.tolist()).decode() for each in gather_arrays(communicator, data, lengths)]
