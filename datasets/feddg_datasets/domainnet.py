"""DomainNet: clip art, infographics, paintings, quick drawings, photographs and sketches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from feddg_bench.data.dataset import Listing
from feddg_datasets.shared.lists import ListedFolders

DUPLICATES = {"clipart": 704, "infograph": 1596, "painting": 3493, "real": 2380, "sketch": 1258}
"""Images in the archives that DomainBed removes as duplicates (domain_net_duplicates.txt)."""


class DomainNet(ListedFolders):
    """DomainNet (Peng et al., ICCV 2019) in its cleaned version: 586,575 images, 345 classes.

    The archives hold 9,431 more images, duplicates of others. The cleaned lists,
    ``splits/<domain>_<train or test>.txt``, leave them out. Without lists, as DomainBed stores the
    data set (``domainbed/scripts/download.py``), all images of the folders are used, and the
    number of each domain shows whether the duplicates are gone. The numbers are those of DDG's
    ``domainnet.py``, less the 15 duplicates among paintings that it keeps; their sum is that of
    DomainBed's paper. Classes are those of Quick, Draw!
    """

    name = "domainnet"
    title = "DomainNet"
    domains = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    letters: ClassVar[Mapping[str, str]] = {
        "clipart": "c",
        "infograph": "i",
        "painting": "p",
        "quickdraw": "q",
        "real": "r",
        "sketch": "s",
    }
    # fmt: off
    classes = (
        "The_Eiffel_Tower", "The_Great_Wall_of_China", "The_Mona_Lisa", "aircraft_carrier",
        "airplane", "alarm_clock", "ambulance", "angel", "animal_migration", "ant", "anvil",
        "apple", "arm", "asparagus", "axe", "backpack", "banana", "bandage", "barn", "baseball",
        "baseball_bat", "basket", "basketball", "bat", "bathtub", "beach", "bear", "beard", "bed",
        "bee", "belt", "bench", "bicycle", "binoculars", "bird", "birthday_cake", "blackberry",
        "blueberry", "book", "boomerang", "bottlecap", "bowtie", "bracelet", "brain", "bread",
        "bridge", "broccoli", "broom", "bucket", "bulldozer", "bus", "bush", "butterfly", "cactus",
        "cake", "calculator", "calendar", "camel", "camera", "camouflage", "campfire", "candle",
        "cannon", "canoe", "car", "carrot", "castle", "cat", "ceiling_fan", "cell_phone", "cello",
        "chair", "chandelier", "church", "circle", "clarinet", "clock", "cloud", "coffee_cup",
        "compass", "computer", "cookie", "cooler", "couch", "cow", "crab", "crayon", "crocodile",
        "crown", "cruise_ship", "cup", "diamond", "dishwasher", "diving_board", "dog", "dolphin",
        "donut", "door", "dragon", "dresser", "drill", "drums", "duck", "dumbbell", "ear", "elbow",
        "elephant", "envelope", "eraser", "eye", "eyeglasses", "face", "fan", "feather", "fence",
        "finger", "fire_hydrant", "fireplace", "firetruck", "fish", "flamingo", "flashlight",
        "flip_flops", "floor_lamp", "flower", "flying_saucer", "foot", "fork", "frog", "frying_pan",
        "garden", "garden_hose", "giraffe", "goatee", "golf_club", "grapes", "grass", "guitar",
        "hamburger", "hammer", "hand", "harp", "hat", "headphones", "hedgehog", "helicopter",
        "helmet", "hexagon", "hockey_puck", "hockey_stick", "horse", "hospital", "hot_air_balloon",
        "hot_dog", "hot_tub", "hourglass", "house", "house_plant", "hurricane", "ice_cream",
        "jacket", "jail", "kangaroo", "key", "keyboard", "knee", "knife", "ladder", "lantern",
        "laptop", "leaf", "leg", "light_bulb", "lighter", "lighthouse", "lightning", "line", "lion",
        "lipstick", "lobster", "lollipop", "mailbox", "map", "marker", "matches", "megaphone",
        "mermaid", "microphone", "microwave", "monkey", "moon", "mosquito", "motorbike", "mountain",
        "mouse", "moustache", "mouth", "mug", "mushroom", "nail", "necklace", "nose", "ocean",
        "octagon", "octopus", "onion", "oven", "owl", "paint_can", "paintbrush", "palm_tree",
        "panda", "pants", "paper_clip", "parachute", "parrot", "passport", "peanut", "pear", "peas",
        "pencil", "penguin", "piano", "pickup_truck", "picture_frame", "pig", "pillow", "pineapple",
        "pizza", "pliers", "police_car", "pond", "pool", "popsicle", "postcard", "potato",
        "power_outlet", "purse", "rabbit", "raccoon", "radio", "rain", "rainbow", "rake",
        "remote_control", "rhinoceros", "rifle", "river", "roller_coaster", "rollerskates",
        "sailboat", "sandwich", "saw", "saxophone", "school_bus", "scissors", "scorpion",
        "screwdriver", "sea_turtle", "see_saw", "shark", "sheep", "shoe", "shorts", "shovel",
        "sink", "skateboard", "skull", "skyscraper", "sleeping_bag", "smiley_face", "snail",
        "snake", "snorkel", "snowflake", "snowman", "soccer_ball", "sock", "speedboat", "spider",
        "spoon", "spreadsheet", "square", "squiggle", "squirrel", "stairs", "star", "steak",
        "stereo", "stethoscope", "stitches", "stop_sign", "stove", "strawberry", "streetlight",
        "string_bean", "submarine", "suitcase", "sun", "swan", "sweater", "swing_set", "sword",
        "syringe", "t-shirt", "table", "teapot", "teddy-bear", "telephone", "television",
        "tennis_racquet", "tent", "tiger", "toaster", "toe", "toilet", "tooth", "toothbrush",
        "toothpaste", "tornado", "tractor", "traffic_light", "train", "tree", "triangle",
        "trombone", "truck", "trumpet", "umbrella", "underwear", "van", "vase", "violin",
        "washing_machine", "watermelon", "waterslide", "whale", "wheel", "windmill", "wine_bottle",
        "wine_glass", "wristwatch", "yoga", "zebra", "zigzag",
    )
    # fmt: on
    licence = "fair use notice of its authors; non-commercial research"
    source = (
        "https://ai.bu.edu/M3SDA (the cleaned version: six archives, and twelve lists for the "
        "folder splits)"
    )
    no_download = (
        "the images stand under a fair use notice of their authors, and no checksum of their "
        "archives is published; get them from " + source
    )
    counts: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "clipart": (48_129,),
        "infograph": (51_605,),
        "painting": (72_266,),
        "quickdraw": (172_500,),
        "real": (172_947,),
        "sketch": (69_128,),
    }
    default_protocol = "lodo"
    default_recipe = "laptop"
    layouts = ("", "domainnet")
    spellings: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "clipart": ("clip",),
        "infograph": ("info",),
        "painting": ("paint",),
        "quickdraw": ("quick",),
    }
    list_folders = ("splits", "", "txt")
    without_lists = True

    def differences(self, records: Listing) -> Iterator[tuple[str, str | None, str]]:
        """Yield unexpected counts; a message says if the known duplicates are the cause."""
        counts = self.count(records).sum(axis=1)
        for domain, name, text in super().differences(records):
            more = counts[self.domains.index(domain)] - sum(self.counts[domain])
            known = more == DUPLICATES.get(domain)
            cause = f": its known duplicates, which the lists {self.list_folders[0]}/*.txt omit"
            yield domain, name, text + (cause if known else "")
