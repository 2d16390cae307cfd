"""Lightning with a strategy of Echelon: a callback wraps model and optimizer when training starts.

python examples/wrap_lightning.py --sync "diloco(20)" --devices 2
"""

from __future__ import annotations

import argparse

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import echelon


class ReplicasAgree(lightning.Callback):
    """Wraps what the DDP strategy trains; the module holds what the replicas agree on when training ends."""

    def __init__(self, sync: str, compression: str) -> None:
        self.sync, self.compression = sync, compression

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        model, optimizer = trainer.strategy.model, trainer.optimizers[0]
        self.replica = echelon.wrap(model, optimizer, self.sync, self.compression)  # <- here

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        with self.replica.agreed():
            agreed = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}
        pl_module.load_state_dict(agreed)
        self.replica.close()


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
    parser.add_argument("--sync", default="local(8)")
    parser.add_argument("--compression", default="none")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()

    lightning.seed_everything(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=32, shuffle=True)

    agree = ReplicasAgree(args.sync, args.compression)
    module = Digits()
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=args.devices,
        strategy="ddp",
        callbacks=[agree],  # <- and here
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
        sent = agree.replica.bytes_sent / agree.replica.steps
        print(f"accuracy {accuracy:.3f}, {sent:.0f} bytes sent per step and rank")


if __name__ == "__main__":
    main()
