"""Checks of a backbone's settings; without PyTorch, so that a dry run starts at once."""

from __future__ import annotations

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.schema import BackboneSettings

ANY_SIDE: tuple[int, int | None] = (8, None)
SIDES: dict[str, tuple[int, int | None]] = {
    "lenet": (28, 31),
    "femnist_cnn": (28, 31),
    "squeezenet1_1": (17, None),
    "densenet121": (29, None),
}
"""Smallest and largest side of images in pixels, where it is not `ANY_SIDE`.

Below the smallest, no map is left to pool; a network that flattens its maps has a largest.
"""


def check_consistent(settings: BackboneSettings, *, rgb: bool) -> None:
    """Check settings of a backbone that contradict each other or the images.

    Raises:
        SettingsError: If they do.
    """
    if not rgb and settings.normalisation not in ("auto", "none"):
        raise SettingsError(
            f"backbone.normalisation={settings.normalisation} is for RGB images: "
            f"set backbone.normalisation=none"
        )
    if settings.padding == "tf" and settings.name != "mobilenet_v2":
        raise SettingsError(
            f"backbone.padding=tf is for mobilenet_v2, not for {settings.name}: "
            f"set backbone.padding=torch"
        )
    if settings.weights is not None and not settings.pretrained:
        raise SettingsError(
            "backbone.weights names a file but backbone.pretrained is false: "
            "set backbone.pretrained=true, or leave backbone.weights out"
        )


def check_sides(settings: BackboneSettings, image_size: int) -> None:
    """Check that square images of ``image_size`` pixels suit a backbone; timm's take any here.

    Raises:
        SettingsError: Too small or too large, or not a multiple of 32 with TensorFlow's padding,
            which pads odd sides differently from even ones.
    """
    smallest, largest = SIDES.get(settings.name, ANY_SIDE)
    if image_size < smallest:
        raise SettingsError(
            f"data.image_size={image_size} is too small for {settings.name}: "
            f"give at least {smallest}"
        )
    if largest is not None and image_size > largest:
        raise SettingsError(
            f"data.image_size={image_size} is too large for {settings.name}: give {smallest}"
        )
    if settings.padding == "tf" and image_size % 32:
        raise SettingsError(
            f"data.image_size={image_size} does not go with backbone.padding=tf: "
            f"give a multiple of 32, such as {image_size // 32 * 32 + 32}"
        )
