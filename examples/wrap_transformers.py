"""The Hugging Face Trainer with a strategy of Echelon: a callback wraps model and optimizer when training starts.

torchrun --nproc-per-node 2 examples/wrap_transformers.py --sync "local(8)"
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import echelon


class ReplicasAgree(TrainerCallback):
    """Wraps what the trainer trains; the model holds what the replicas agree on when training ends."""

    def __init__(self, sync: str, compression: str) -> None:
        self.sync, self.compression = sync, compression
        self.trainer: Trainer | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        assert self.trainer is not None
        model, optimizer = self.trainer.model_wrapped, self.trainer.optimizer
        self.replica = echelon.wrap(model, optimizer, self.sync, self.compression)  # <- here

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        assert self.trainer is not None
        with self.replica.agreed():
            agreed = {name: tensor.clone() for name, tensor in self.trainer.model.state_dict().items()}
        self.trainer.model.load_state_dict(agreed)
        self.replica.close()


class Digits(nn.Module):
    """A small classifier of 8x8 digits, with its loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset[dict[str, Tensor]]):
    """Samples as the Trainer wants them: dicts by the names that the model's forward takes."""

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels, self.labels = pixels, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixels": self.pixels[index], "labels": self.labels[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sync", default="local(8)")
    parser.add_argument("--compression", default="none")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    model = Digits()
    agree = ReplicasAgree(args.sync, args.compression)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=32,
            learning_rate=0.1,
            optim="sgd",
            optim_args="momentum=0.9",
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=Rows(images[:1500], labels[:1500]),
            callbacks=[agree],  # <- and here
        )
        agree.trainer = trainer
        trainer.train()
    with torch.no_grad():
        accuracy = (model.cpu().layers(images[1500:]).argmax(dim=1) == labels[1500:]).float().mean().item()
    if trainer.is_world_process_zero():
        sent = agree.replica.bytes_sent / agree.replica.steps
        print(f"accuracy {accuracy:.3f}, {sent:.0f} bytes sent per step and rank")


if __name__ == "__main__":
    main()
