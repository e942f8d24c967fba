"""Train a pipeline with Lightning: a module, a data module, a callback and `Trainer.fit`.

torchrun --nproc-per-node 2 examples/lightning_train.py

The pipeline connects the ranks, so the strategy is that of a single device: DDP would average the stages. The
module optimizes manually, because the pipeline runs forward and backward. Every rank reads the same batches.
"""

from collections.abc import Callable
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock
from penstock.runtime import Pipeline, save_checkpoint, split

MICROBATCHES, WIDTH, LAYERS, ROWS = 4, 16, 4, 64


class Stages(lightning.LightningModule):
    """This rank's stages of an MLP, and the pipeline that trains them."""

    def __init__(self, schedule: str = "1f1b") -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        ranks = dist.get_world_size()
        built = penstock.build(schedule, ranks=ranks, microbatches=MICROBATCHES)
        parts = split(nn.Sequential(*layers), at=[str(stage * LAYERS // ranks) for stage in range(1, ranks)])
        own = built.placement.stages_of_rank[dist.get_rank()]
        self.stages = nn.ModuleDict({str(stage): parts[stage] for stage in own})
        self.connect = lambda: Pipeline([*self.stages.values()], built, loss=nn.functional.mse_loss)
        self.pipeline: Pipeline | None = None

    def setup(self, stage: str) -> None:
        """Connect the ranks, once the modules are on their device."""
        if stage == "fit":
            self.pipeline = self.connect()

    def teardown(self, stage: str) -> None:
        """Close the connections."""
        if stage == "fit" and self.pipeline is not None:
            self.pipeline.close()

    def configure_optimizers(self) -> dict[str, object]:
        """Return the optimizer of this rank's parameters, and its learning-rate schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16),
        }

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        """Run one batch through all ranks; the loss is the same on each of them."""
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        result = self.pipeline.step(x, target=y)
        self.pipeline.clip_grad_norm_(1.0)  # of all ranks, as gradient_clip_val would not be
        optimizer.step()
        self.lr_schedulers().step()
        self.log("loss", result.loss, on_step=False, on_epoch=True)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        """Evaluate one batch."""
        x, y = batch
        self.log("validation loss", self.pipeline.eval(x, target=y).loss)


class Data(lightning.LightningDataModule):
    """Rows that are the same on every rank, in the same order."""

    def _loader(self, seed: int) -> DataLoader[tuple[torch.Tensor, ...]]:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
        order = torch.Generator().manual_seed(2)
        rows = TensorDataset(x, x.roll(1, dims=1).tanh())
        return DataLoader(rows, batch_size=16, shuffle=seed == 0, generator=order)

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """Return the batches of training."""
        return self._loader(0)

    def val_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """Return the batches of validation."""
        return self._loader(1)


class SaveAndPrint(lightning.Callback):
    """Saves a checkpoint of all ranks after each epoch, and prints on rank 0."""

    def __init__(self, path: Path, printed: Callable[[str], None]) -> None:
        self.path, self.printed = path, printed

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: Stages) -> None:
        """Save and print; Lightning's own checkpoint would have the stages of one rank only."""
        save_checkpoint(
            self.path, module.pipeline, trainer.optimizers[0], extra={"epoch": trainer.current_epoch}
        )
        found = {name: f"{float(value):.4f}" for name, value in trainer.callback_metrics.items()}
        self.printed(
            f"epoch {trainer.current_epoch}: loss {found['loss']}, validation {found['validation loss']}"
        )


def main() -> None:
    """Train four epochs."""
    dist.init_process_group("gloo")
    show = (lambda text: print(text, flush=True)) if dist.get_rank() == 0 else (lambda _: None)
    trainer = lightning.Trainer(
        max_epochs=4,
        strategy=SingleDeviceStrategy(torch.device("cpu")),  # on GPUs: torch.device("cuda", LOCAL_RANK)
        callbacks=[SaveAndPrint(Path("lightning-checkpoint"), show)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Stages(), datamodule=Data())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
