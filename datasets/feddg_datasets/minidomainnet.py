"""miniDomainNet: the subset of DomainNet in its published lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from feddg_datasets.shared.lists import ListedFolders


class MiniDomainNet(ListedFolders):
    """miniDomainNet (Zhou et al., TIP 2021) of DomainNet (Peng et al., ICCV 2019): 140,006 images.

    Four domains (clipart, painting, real, sketch) and 126 classes. FedCCRL's paper names infograph
    instead of sketch; its code and its tables have these four. The images are DomainNet's, in
    its cleaned version; eight lists, ``splits_mini/<domain>_<train or test>.txt``, name those of
    the subset. Classes are in alphabetical order.
    """

    name = "minidomainnet"
    title = "miniDomainNet"
    domains = ("clipart", "painting", "real", "sketch")
    letters: ClassVar[Mapping[str, str]] = {
        "clipart": "c",
        "painting": "p",
        "real": "r",
        "sketch": "s",
    }
    # fmt: off
    classes = (
        "The_Eiffel_Tower", "The_Great_Wall_of_China", "aircraft_carrier", "alarm_clock", "ant",
        "anvil", "asparagus", "axe", "banana", "basket", "bathtub", "bear", "bee", "bird",
        "blackberry", "blueberry", "bottlecap", "broccoli", "bus", "butterfly", "cactus", "cake",
        "calculator", "camel", "camera", "candle", "cannon", "canoe", "carrot", "castle", "cat",
        "ceiling_fan", "cell_phone", "cello", "chair", "chandelier", "coffee_cup", "compass",
        "computer", "cow", "crab", "crocodile", "cruise_ship", "dog", "dolphin", "dragon", "drums",
        "duck", "dumbbell", "elephant", "eyeglasses", "feather", "fence", "fish", "flamingo",
        "flower", "foot", "fork", "frog", "giraffe", "goatee", "grapes", "guitar", "hammer",
        "helicopter", "helmet", "horse", "kangaroo", "lantern", "laptop", "leaf", "lion",
        "lipstick", "lobster", "microphone", "monkey", "mosquito", "mouse", "mug", "mushroom",
        "onion", "panda", "peanut", "pear", "peas", "pencil", "penguin", "pig", "pillow",
        "pineapple", "potato", "power_outlet", "purse", "rabbit", "raccoon", "rhinoceros", "rifle",
        "saxophone", "screwdriver", "sea_turtle", "see_saw", "sheep", "shoe", "skateboard", "snake",
        "speedboat", "spider", "squirrel", "strawberry", "streetlight", "string_bean", "submarine",
        "swan", "table", "teapot", "teddy-bear", "television", "tiger", "toe", "train", "truck",
        "umbrella", "vase", "watermelon", "whale", "zebra",
    )
    # fmt: on
    licence = "fair use notice of DomainNet's authors; non-commercial research"
    source = (
        "https://ai.bu.edu/M3SDA (cleaned clipart, painting, real and sketch) and the lists "
        "splits_mini of https://github.com/KaiyangZhou/Dassl.pytorch (DATASETS.md)"
    )
    no_download = (
        "the images stand under a fair use notice of their authors, and no checksum of their "
        "archives is known; get them from " + source
    )
    default_recipe = "fedccrl"
    list_folders = ("splits_mini", "miniDomainNet_split", "minidomainnet_splits", "splits")
    total: ClassVar[int | None] = 140_006
    layouts = ("", "domainnet", "minidomainnet")
