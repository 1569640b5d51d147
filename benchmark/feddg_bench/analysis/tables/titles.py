"""Names of methods, data sets and domains as papers write them."""

from __future__ import annotations

from feddg_bench.plugins import dataset_title as dataset_title
from feddg_bench.plugins import method_title as method_title


def domain_title(domain: str) -> str:
    """Return a domain's name with a capital and without underscores.

    >>> domain_title("art_painting")
    'Art painting'
    """
    return domain[:1].upper() + domain[1:].replace("_", " ")


BACKBONES = {
    "small_cnn": "small CNN",
    "lenet": "LeNet",
    "domainbed_mnist": "DomainBed's MNIST CNN",
    "femnist_cnn": "FEMNIST CNN",
    "squeezenet1_1": "SqueezeNet 1.1",
    "mobilenet_v2": "MobileNetV2",
    "mobilenet_v3_large": "MobileNetV3-Large",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "densenet121": "DenseNet-121",
    "efficientnet_lite0": "EfficientNet-Lite0",
}
"""Name of a backbone -> its name in papers; others keep their own."""
