"""Names of domains and backbones as papers write them, and numbers of things.

Plugins declare names of their own.
"""

from __future__ import annotations


def counted(number: int, word: str) -> str:
    """Return a number of things.

    >>> counted(1, "run"), counted(2000, "run"), counted(0, "image")
    ('1 run', '2,000 runs', '0 images')
    """
    return f"{number:,} {word}{'s' * (number != 1)}"


def domain_title(domain: str) -> str:
    """Return a domain's name with a capital and without underscores.

    >>> domain_title("art_painting")
    'Art painting'
    """
    return domain[:1].upper() + domain[1:].replace("_", " ")


_BACKBONES = {
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


def backbone_title(name: str) -> str:
    """Return a backbone's name in papers, or ``name`` itself if it has no other.

    >>> backbone_title("small_cnn"), backbone_title("mine")
    ('small CNN', 'mine')
    """
    return _BACKBONES.get(name, name)


def network_title(name: str, encoder: str | None, size: int, hidden: int = 0) -> str:
    """Return a run's network and the side of its images, in pixels.

    >>> network_title("small_cnn", None, 32)
    'small CNN at 32 px'
    >>> network_title("features", "mobilenet_v2", 224, hidden=256)
    'frozen MobileNetV2, 224 px, MLP 256'
    """
    if encoder is None:
        return f"{backbone_title(name)} at {size} px"
    return f"frozen {backbone_title(encoder)}, {size} px" + (f", MLP {hidden}" if hidden else "")


WITHOUT_EFFECT = {
    "": "",
    "maps": "features have no maps",
    "features": "no layer below the classifier is trained",
    "batch_norm": "the network has no batch normalisation",
}
"""What a method acts on -> why it equals FedAvg where nothing of the kind is trained."""
