"""Three convolutions with GroupNorm, for 8x8 to 32x32 images.

GroupNorm (Wu and He 2018, arXiv:1803.08494) instead of BatchNorm: each sample is normalised by itself, so the
function does not depend on how a batch is cut over workers, and a run on 1, 2 or 4 workers is the same run.
"""

from __future__ import annotations

from torch import Tensor, nn

from echelon.core.hints import Hints
from echelon.models.base import ModelInput

WIDTHS = (32, 64, 128)
GROUPS = 8
SMALLEST_MAP = 4
COUNT = "288 * channels + 513 * classes + 92608"  # of parameters, for who has not imported this


def build(data: ModelInput) -> nn.Module:
    """Build the network: 98 k parameters for 1 channel and 10 classes."""
    return SmallCNN(data)


class SmallCNN(nn.Module):
    """(N, channels, S, S) -> (N, classes); a map is halved after a stage while it stays at least 4 pixels wide.

    The classifier sees the mean of each quarter of the last map: unlike one global mean, this keeps where a stroke is.
    """

    def __init__(self, data: ModelInput) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels, side = data.channels, data.image_size
        for width in WIDTHS:
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.GroupNorm(GROUPS, width), nn.ReLU()]
            channels = width
            if side // 2 >= SMALLEST_MAP:
                layers.append(nn.MaxPool2d(2))
                side //= 2
        quarter = max(1, side // 2)
        self.features = nn.Sequential(*layers, nn.AvgPool2d(quarter))
        self.parts = side // quarter
        self.classifier = nn.Linear(channels * self.parts**2, data.classes)
        self.structure = Hints(
            chain=("features.*", ":classify"), glue={":classify": ("classifier",)}, tensor_plan=_plan(self.features)
        )

    def classify(self, x: Tensor) -> Tensor:
        """Map the last maps' quarters to logits (N, classes)."""
        # Divided so that the features' norm, and with it the learning rate that is stable, is that of one global mean.
        return self.classifier(x.flatten(1) / self.parts)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, classes)."""
        return self.classify(self.features(images))


def _plan(features: nn.Sequential) -> dict[str, str]:
    """Split the channels between the first two convolutions, and those between the third and the classifier."""
    names = [f"features.{i}" for i, layer in enumerate(features) if isinstance(layer, nn.Conv2d | nn.GroupNorm)]
    styles = ("channels_out", "channels", "channels_in", "replicate", "channels_out", "channels")
    return {**dict(zip(names, styles, strict=True)), "classifier": "row"}
