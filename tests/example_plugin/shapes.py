"""Shapes: say in one line what the images show."""

from feddg_bench import ImageFolderDataset


class Shapes(ImageFolderDataset):
    """Circles and squares in four styles (cite the source of your images here)."""

    name = "shapes"
    title = "Shapes"
    domains = ("photo", "drawing", "clipart", "sketch")  # LTDO validates on one, tests on the next
    classes = ("circle", "square")
    licence = "name the licence of the images"
    source = "https://example.org/images"  # where users get them
    version = 1  # increment when the same files give other images, labels or domains
