"""Images, each of one class: cross-entropy with label smoothing and class weights, judged by top-1.

Helps: Images with one class each.
Needs: a data set of images and labels.
"""

from __future__ import annotations

from typing import ClassVar, Self

from echelon.core.errors import UserError
from echelon.core.task import TaskDefaults
from echelon.tasks.base import DataFacts, Encoding, Examples, TaskSettings
from echelon.tasks.classification import Classification
from echelon.tasks.worst_samples import Pictures, Pixels, WorstSamples


class ImageClassification(Classification):
    """Classification that shows the images with the highest loss; other inputs are taken, too."""

    name = "image_classification"
    encoding = Encoding.AUTO
    table_model: ClassVar[str] = ""  # by the images' size
    defaults: ClassVar[TaskDefaults] = TaskDefaults()

    def __init__(self) -> None:
        super().__init__()
        self._pictures: Pictures | None = None
        self._worst_samples = 0

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data.

        Raises:
            UserError: as for any classification; or the data is files of texts or sounds.
        """
        if self.name == ImageClassification.name and data.task.startswith(("text", "speech")):
            own = data.task.replace("_", "-")
            raise UserError(
                f"data {data.name} holds no images: leave out --task image-classification, which makes it --task {own}"
            )
        task = super().fitted(data, settings)
        task._worst_samples = settings.worst_samples
        task._pictures = Pixels.of(data.inputs, data.mean, data.std)
        return task

    def examples(self) -> Examples | None:
        """Return a choice of the samples with the highest loss; None where inputs are no images."""
        if not self._worst_samples or self._pictures is None:
            return None
        return WorstSamples(self._worst_samples, self.classes, self._pictures, self._loss.each)


TASK = ImageClassification
