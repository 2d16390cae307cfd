"""Models of Keras for tests; imported where Keras is there."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"

from typing import Any

import keras
from keras import layers


class Block(layers.Layer):
    """A residual block with a class of its own."""

    def __init__(self, width: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.width = width
        self.convolution = layers.Conv2D(width, 3, padding="same")
        self.norm = layers.BatchNormalization()

    def build(self, shape: Any) -> None:
        """Make the weights."""
        self.convolution.build(shape)
        self.norm.build(shape)
        self.built = True

    def call(self, x: Any, training: bool | None = None) -> Any:
        """Add what a convolution makes of images."""
        return keras.ops.relu(self.norm(self.convolution(x), training=training)) + x

    def get_config(self) -> dict[str, Any]:
        """Return what it was made with."""
        return {**super().get_config(), "width": self.width}


def residual(classes: int = 10, channels: int = 1, image_size: int = 8) -> Any:
    """A model with nested ones, a frozen layer, BatchNorm, seeded dropout of nothing, and a softmax."""
    keras.utils.set_random_seed(3)
    inner = keras.Sequential(
        [keras.Input((image_size, image_size, 4)), layers.Flatten(), layers.Dense(16, "relu", name="features")],
        name="inner",
    )
    inner.layers[-1].trainable = False
    images = keras.Input((image_size, image_size, channels))
    x = layers.Conv2D(4, 3, padding="same")(images)
    x = Block(4)(Block(4)(x))
    x = layers.Dropout(0.0, seed=5)(inner(x))
    return keras.Model(images, layers.Dense(classes, activation="softmax")(x))


def plain(classes: int, channels: int, image_size: int) -> Any:
    """A model without BatchNorm, whose function no layout changes."""
    keras.utils.set_random_seed(4)
    return keras.Sequential(
        [
            keras.Input((image_size, image_size, channels)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(classes),
        ]
    )
