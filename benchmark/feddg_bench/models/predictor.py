"""A model without its federation: predictions for images, and metrics under a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from feddg_bench.common.errors import DataError
from feddg_bench.common.lightning import LightningModule
from feddg_bench.models.tasks import CLASSIFICATION, LearningTask

if TYPE_CHECKING:
    from torchmetrics import Metric

PREDICTED = 64
"""Largest number of images that `Predictor.predict` computes at a time."""


class Prediction(NamedTuple):
    """Predictions for B images, on the CPU."""

    labels: Tensor  # int64 [B], class ids; float32 [B], the numbers of a regression
    probabilities: Tensor | None  # float32 [B, C] in [0, 1]; `None` for a regression


class Accepts(NamedTuple):
    """Which images a model accepts."""

    channels: int = 3
    rgb: bool = True  # whether they are red, green and blue in [0, 1]
    size: int | None = None  # side in pixels; `None` if it is not known

    def check(self, images: object) -> Tensor:
        """Return the images if the model accepts them.

        Raises:
            DataError: If they are not a float tensor [B, C, H, W] of the right size and range.
        """
        side = self.size or "S"
        expected = f"expected floats [B, {self.channels}, {side}, {side}]"
        expected += " in [0, 1]" if self.rgb else ", normalised as the data set's"
        if not isinstance(images, Tensor):
            raise DataError(f"images are a {type(images).__name__}: {expected}")
        shape = list(images.shape)
        if images.ndim != 4 or shape[1] != self.channels or not images.is_floating_point():
            raise DataError(
                f"images are {images.dtype} {shape}: {expected}; `transform` of a model makes them "
                f"from files, Pillow images and uint8 arrays"
            )
        if self.size is not None and shape[2:] != [self.size, self.size]:
            raise DataError(
                f"images have {shape[3]} x {shape[2]} pixels and the model was trained on "
                f"{self.size} x {self.size}: give them to its `transform` first"
            )
        if self.rgb and not bool(((images >= 0) & (images <= 1)).all()):
            low, high = float(images.min()), float(images.max())
            raise DataError(
                f"images have values from {low:g} to {high:g}: {expected}, neither bytes nor "
                f"normalised; bytes are divided by 255"
            )
        return images


def answer(task: LearningTask, outputs: Tensor) -> Prediction:
    """Return the predictions for a model's outputs, [B, C] or [B, 1]."""
    outputs = outputs.float().cpu()
    shares = torch.softmax(outputs, dim=1) if task is CLASSIFICATION else None
    return Prediction(task.predict(outputs), shares)


class Predictor(LightningModule):
    """The part of a method that needs no federation.

    Attributes:
        task: The learning task.
        num_classes: C, the width of the outputs.
    """

    task: LearningTask
    num_classes: int

    classes: tuple[str, ...] = ()
    """Names of the classes, if known, as for a model from `feddg_bench.load_model`."""
    accepts: Accepts = Accepts()
    """Which images `predict` accepts."""
    transform: Callable[[Any], Tensor] | None = None
    """Maps a file's path, a Pillow image or a uint8 array [H, W, 3] to an image [C, H, W], prepared
    like the data set's images; only for a model from `feddg_bench.load_model`."""

    @torch.no_grad()
    def predict(self, images: Tensor | Sequence[Any]) -> Prediction:
        """Return labels and probabilities of images, in evaluation mode.

        Args:
            images: Floats [B, C, H, W] in [0, 1]; or one or several inputs of `transform`.

        Raises:
            DataError: If a tensor has the wrong form or range, or an image cannot be read.
        """
        parts = self._tensors(images)
        mode = self.training
        self.eval()
        try:
            found = [answer(self.task, self(part.to(self.device))) for part in parts]
        finally:
            self.train(mode)
        labels = torch.cat([part.labels for part in found])
        shares = [part.probabilities for part in found if part.probabilities is not None]
        return Prediction(labels, torch.cat(shares) if shares else None)

    def _tensors(self, images: Any) -> Iterator[Tensor]:
        """Yield images in batches of at most `PREDICTED`."""
        if isinstance(images, Tensor):
            yield from self.accepts.check(images).split(PREDICTED)
            return
        if self.transform is None:
            raise DataError(
                "this model does not know how its images were made: give floats [B, C, H, W] in "
                "[0, 1], or take a model from feddg_bench.load_model"
            )
        alone = isinstance(images, str | PathLike) or not isinstance(images, Iterable)
        several = [images] if alone or getattr(images, "ndim", 4) < 4 else list(images)
        for start in range(0, len(several), PREDICTED):
            some = [self.transform(image) for image in several[start : start + PREDICTED]]
            yield self.accepts.check(torch.stack(some))

    def predict_step(self, batch: Any, batch_idx: int) -> Prediction:
        """Return the predictions for a batch of images, with or without labels, to a Trainer."""
        images = batch[0] if isinstance(batch, list | tuple) else batch
        return answer(self.task, self(self.accepts.check(images)))

    def setup(self, stage: str) -> None:
        """Create the metrics of validation and test, which exist only under a Trainer."""
        from torchmetrics import PearsonCorrCoef
        from torchmetrics.classification import MulticlassAccuracy

        classes = self.task is CLASSIFICATION
        metrics: dict[str, Metric] = {
            split: MulticlassAccuracy(self.num_classes, average="micro")
            if classes
            else PearsonCorrCoef()
            for split in ("val", "test")
        }
        self.metrics = nn.ModuleDict(metrics)
        self.metric_name = "accuracy" if classes else "pearson"

    def on_train_batch_end(self, outputs: Any, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        """Log ``train_loss``."""
        self.log("train_loss", outputs["loss"], batch_size=len(batch[1]))

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_accuracy``, or ``val_pearson``."""
        self._score("val", batch)

    def test_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        """Log ``test_loss`` and ``test_accuracy``, or ``test_pearson``."""
        self._score("test", batch)

    def _score(self, split: str, batch: tuple[Tensor, ...]) -> None:
        images, labels = batch
        outputs = self(images).float()
        metric = cast("Metric", self.metrics[split])
        metric(self.task.predict(outputs), labels)
        loss = self.task.loss(outputs, labels, "mean")
        self.log(f"{split}_loss", loss, batch_size=len(labels))
        self.log(f"{split}_{self.metric_name}", metric, batch_size=len(labels))
