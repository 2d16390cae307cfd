"""Lightning with compressed gradients: a callback attaches the hook when training starts.

(DDPStrategy also takes `ddp_comm_state=hook, ddp_comm_hook=hook.function`, but Lightning registers them on GPUs only.)

python examples/ddp_lightning.py --compression "topk(density=0.01)" --devices 2
"""

from __future__ import annotations

import argparse

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import echelon


class CompressGradients(lightning.Callback):
    """Attaches a communication hook to the model that the DDP strategy has wrapped."""

    def __init__(self, compression: str) -> None:
        self.hook = echelon.ddp_hook(compression)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        assert isinstance(trainer.strategy, DDPStrategy) and isinstance(trainer.strategy.model, DistributedDataParallel)
        self.hook.attach(trainer.strategy.model, trainer.optimizers[0])


class Digits(lightning.LightningModule):
    """A small classifier of 8x8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", default="powersgd(rank=2)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()

    lightning.seed_everything(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=32, shuffle=True)

    compress = CompressGradients(args.compression)
    module = Digits()
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=args.devices,
        strategy="ddp",
        callbacks=[compress],  # <- here
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    with torch.no_grad():
        accuracy = (module.model.cpu()(images[1500:]).argmax(dim=1) == labels[1500:]).float().mean().item()
    if trainer.is_global_zero:
        wire = compress.hook.wire
        print(f"accuracy {accuracy:.3f}, {wire.total / wire.steps:.0f} bytes sent per step and rank")
    compress.hook.close()


if __name__ == "__main__":
    main()
