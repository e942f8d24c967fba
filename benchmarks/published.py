"""Published step times and memory next to estimated and simulated ones.

    python -m benchmarks.published [vocabulary] [clusters] [shares]

Every row is `penstock estimate` for the stages, a family, and the simulation of its lowered schedule (gradients
are reduced where it says). Nothing is measured here. `shares` shows how the results depend on what an A100 is
assumed to attain, with the closed form of 1F1B instead of the simulation.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import penstock
from penstock.cost.estimate import ModelConfig, ParallelConfig, config_of_keys, device, estimate, read_config
from penstock.cost.estimate.devices import Attainable
from penstock.ir.placement import Placement
from penstock.planning.estimated_model import even_blocks, stage_costs

VOCABULARIES = (32, 64, 128, 256)
"""In units of 1024 tokens."""
SIZES = {8: (32, 3072, 24), 16: (48, 4096, 32), 32: (64, 5120, 40)}
"""Ranks: layers, width, heads."""
MFU = {
    (8, 2048): (46.16, 40.48, 33.11, 25.23),
    (8, 4096): (47.05, 41.87, 35.00, 26.75),
    (16, 2048): (45.66, 40.09, 32.44, 24.21),
    (16, 4096): (47.56, 41.21, 33.88, 25.33),
    (32, 2048): (42.81, 37.28, 28.97, 20.86),
    (32, 4096): (43.68, 38.11, 30.05, 21.63),
}
"""Percent for (ranks, sequence) and each vocabulary: 1F1B, 128 microbatches, A100 (table 5 of the paper)."""
PEAK_GIB = (14.86, 16.32, 19.25, 25.64)
"""For 8 ranks and a sequence of 2048."""


@dataclass(frozen=True)
class Result:
    """A simulated step."""

    seconds: float
    mfu: float
    peak: float
    """Bytes on the rank with the most."""
    tokens_per_second: float
    """Per device."""


@dataclass(frozen=True)
class Job:
    """A pipeline of a published run."""

    config: ModelConfig
    parallel: ParallelConfig
    device: str
    ranks: int
    microbatches: int
    stages_per_rank: int = 1
    family: str = "interleaved-1f1b"
    counts: tuple[int, ...] = ()
    """Layers of each stage; blocks evenly unless given."""

    def run(self) -> Result:
        found = estimate(self.config, self.parallel, device(self.device))
        placement = Placement.loop(self.ranks, self.stages_per_rank)
        costs = stage_costs(found, placement, self.counts or even_blocks(found, placement.num_stages))
        schedule = penstock.build(
            self.family,
            ranks=self.ranks,
            microbatches=self.microbatches,
            stages_per_rank=self.stages_per_rank,
        )
        if self.parallel.replicas > 1:
            schedule = penstock.lower(schedule)
        timeline = penstock.simulate(schedule, costs)
        seconds = timeline.makespan + costs.optimizer_step
        tokens = self.microbatches * self.parallel.microbatch_size * self.parallel.sequence
        devices = self.ranks * self.parallel.tensor_parallel * self.parallel.context_parallel
        mfu = found.mfu(seconds, self.microbatches, self.ranks)
        return Result(seconds, 100 * mfu, max(timeline.peak_memory), tokens / seconds / devices)


# --- vocabulary parallelism, table 5 ---------------------------------------------------------------


@cache
def gpt(ranks: int, sequence: int, vocabulary: int) -> ModelConfig:
    """A model of the table; the vocabulary in units of 1024 tokens."""
    layers, width, heads = SIZES[ranks]
    keys = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": sequence}
    size = {"vocab_size": vocabulary * 1024, "tie_word_embeddings": False}
    return config_of_keys({"model_type": "gpt2", **keys, **size})


@cache
def vocabulary_row(ranks: int, sequence: int) -> tuple[Result, ...]:
    """1F1B with each vocabulary."""
    parallel = ParallelConfig(sequence=sequence, zero=0, gradient_bytes=2)
    configs = [gpt(ranks, sequence, size) for size in VOCABULARIES]
    return tuple(Job(each, parallel, "a100", ranks, 128, family="1f1b").run() for each in configs)


def ratio_errors(ranks: int, sequence: int) -> list[float]:
    """Of the ratios to the first vocabulary: estimated over published, minus 1."""
    published, mine = MFU[ranks, sequence], [each.mfu for each in vocabulary_row(ranks, sequence)]
    return [(x / mine[0]) / (y / published[0]) - 1 for x, y in zip(mine[1:], published[1:])]


def print_vocabulary() -> None:
    print("vocabulary parallelism, table 5: MFU in %, and the error of its ratio to the first vocabulary")
    for (ranks, sequence), published in MFU.items():
        mine = vocabulary_row(ranks, sequence)
        errors = ["", *(f" ({100 * each:+.1f} %)" for each in ratio_errors(ranks, sequence))]
        row = "  ".join(f"{y:.2f} {x.mfu:.2f}{e}" for x, y, e in zip(mine, published, errors))
        print(f"p={ranks:<2} s={sequence}  {row}")
    memory = [each.peak / 2**30 for each in vocabulary_row(8, 2048)]
    print("peak GiB  " + "  ".join(f"{y:.2f} {x:.2f}" for x, y in zip(memory, PEAK_GIB)))


SHARES = {
    "matmul": (0.6, 0.65, 0.7),
    "attention": (0.3, 0.35, 0.4, 0.5),
    "memory": (0.7, 0.8, 0.9),
    "kernel_seconds": (1e-5, 2e-5, 3e-5),
}
FIRST_SHARES = (0.72, 0.55, 0.8, 5e-6)
"""What was assumed before any comparison."""


def share_errors(shares: tuple[float, ...]) -> tuple[float, float, float]:
    """Largest and root mean square error of the first column, and largest error of the ratios, in %."""
    a100, (matmul, attention, memory, kernel) = device("a100"), shares
    links = a100.attainable.links
    assumed = replace(a100, attainable=Attainable(matmul, attention, memory, links, kernel))
    first, ratios = [], []
    for (ranks, sequence), theirs in MFU.items():
        mine = []
        for size in VOCABULARIES:
            found = estimate(gpt(ranks, sequence, size), ParallelConfig(sequence=sequence, zero=0), assumed)
            block, output = (found.by_kind[kind].seconds.compute.total for kind in ("block", "output"))
            stage = SIZES[ranks][0] / ranks * block
            mine.append(100 * found.mfu(128 * (stage + output) + (ranks - 1) * stage, 128, ranks))
        first.append(100 * (mine[0] / theirs[0] - 1))
        ratios += [100 * ((x / mine[0]) / (y / theirs[0]) - 1) for x, y in zip(mine[1:], theirs[1:])]
    mean_square = sum(each**2 for each in first) / len(first)
    return max(map(abs, first)), mean_square**0.5, max(map(abs, ratios))


def print_shares() -> None:
    every: list[tuple[float, ...]] = list(product(*SHARES.values()))
    errors = {each: share_errors(each) for each in (FIRST_SHARES, *every)}
    within = sum(errors[each][2] <= 2.5 for each in every)
    print(f"{within} of {len(every)} combinations have all 18 ratios within 2.5 %")
    print(
        "matmul, attention, memory, kernel: % error of the first column (largest, rms); of the ratios (largest)"
    )
    by_largest, by_rms = (sorted(every, key=lambda each: errors[each][n])[:3] for n in (0, 1))
    rows: dict[str, list[tuple[float, ...]]] = {
        "first": [FIRST_SHARES],
        "best by largest": by_largest,
        "best by rms": by_rms,
    }
    for name, chosen in rows.items():
        for each in chosen:
            largest, rms, ratio = errors[each]
            print(f"  {name:<16} {each}: {largest:.1f} {rms:.1f}; {ratio:.1f}")


# --- clusters ---------------------------------------------------------------------------------------


def llama(replicas: int) -> Job:
    """Llama 3 405B: 16 million tokens per step, one layer per stage, 8 stages per rank."""
    parallel = ParallelConfig(sequence=8192, tensor_parallel=8, data_parallel=replicas, zero=2)
    config = read_config("llama-3-405b")
    return Job(config, parallel, "h100", 16, 2048 // replicas, 8, counts=(1,) * 128)


def megascale(replicas: int) -> Job:
    """MegaScale, 175 billion parameters, 6144 sequences per step."""
    keys = {"n_embd": 12288, "n_layer": 96, "n_head": 128, "n_positions": 2048, "vocab_size": 64_000}
    parallel = ParallelConfig(sequence=2048, tensor_parallel=8, data_parallel=replicas, zero=2)
    return Job(config_of_keys({"model_type": "gpt2", **keys}), parallel, "a100", 8, 6144 // replicas, 6)


def nemotron(replicas: int) -> Job:
    """Nemotron-4 340B with 16 microbatches."""
    keys = {"n_embd": 18432, "n_layer": 96, "n_head": 96, "n_inner": 73728, "n_positions": 4096}
    drop = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "tie_word_embeddings": False}
    config = config_of_keys({"model_type": "gpt2", "vocab_size": 256_000, **keys, **drop})
    config = replace(config, attention=replace(config.attention, kv_heads=8))
    parallel = ParallelConfig(sequence=4096, tensor_parallel=8, data_parallel=replicas)
    return Job(config, parallel, "h100", 8, 16, 12)


def titan(family: str, stages_per_rank: int) -> Job:
    """torchtitan, Llama 3 405B on 512 devices; 16 microbatches are assumed."""
    parallel = ParallelConfig(
        sequence=8192, tensor_parallel=8, data_parallel=8, zero=2, recompute_granularity="full"
    )
    config = read_config("llama-3-405b")
    return Job(config, parallel, "h100", 8, 16, stages_per_rank, family)


def print_clusters() -> None:
    print("Llama 3 405B, MFU in %: published, estimated")
    for replicas, published in ((64, 43.0), (128, 41.0)):
        print(f"  {128 * replicas:>6} H100  {published:5.1f}  {llama(replicas).run().mfu:5.1f}")
    print("MegaScale 175B, MFU in %: published, estimated")
    for replicas, published in ((48, 59.1), (96, 57.3), (128, 54.9), (192, 55.2)):
        print(f"  {64 * replicas:>6} A100  {published:5.1f}  {megascale(replicas).run().mfu:5.1f}")
    print("Nemotron-4 340B, seconds: published, estimated")
    for replicas, published in ((2, 4.61), (32, 4.84)):
        print(f"  {64 * replicas:>6} H100  {published:5.2f}  {nemotron(replicas).run().seconds:5.2f}")
    print("torchtitan Llama 3 405B, tokens/s per device: published, estimated")
    for family, v, published in (("1f1b", 1, 100), ("interleaved-1f1b", 2, 128)):
        print(f"  {family:<16} {published}  {titan(family, v).run().tokens_per_second:.0f}")


if __name__ == "__main__":
    for name in sys.argv[1:] or ["vocabulary", "clusters"]:
        {"vocabulary": print_vocabulary, "clusters": print_clusters, "shares": print_shares}[name]()
