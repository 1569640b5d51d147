"""What every attack is made of: an attacker's half, a scorer's half, and two controls.

The attacker's half is given messages that crossed, public images and targets; the scorer's half
alone knows who holds what. Beside every figure stand two controls: *no leak* attacks messages of
clients that do not hold the target and must be at chance, *planted leak* attacks messages that hold
the target alone and must find it. A figure whose controls fail is withheld.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.streams import generator
from feddg_bench.config.schema import RunSettings
from feddg_bench.core.server import Uplink
from feddg_bench.data.federated import Federation
from feddg_bench.plugins import load_plugin
from feddg_bench.privacy.capture import Exchange, Message, visible
from feddg_bench.privacy.judges import NOBODY, Judges
from feddg_bench.records.attacks import Attacker, AttackResult, Control, Interval

RESAMPLES = 1000
"""Of a bootstrap."""
NEAR_CHANCE = 0.05
"""How far from chance the interval of *no leak* may stay."""

OnStep = Callable[[str, int, int], None]
"""Is told what is done, how much of it is done, and how much there is."""


def silent(_what: str, _done: int, _total: int) -> None:
    """Say nothing of how far it is."""


@dataclass(frozen=True)
class Pictures:
    """Some images, as they are stored, and what an attacker can see of each."""

    images: np.ndarray  # uint8 [n, H, W, C], or float16
    labels: np.ndarray  # [n]
    domains: np.ndarray  # ids of source domains, int64 [n]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: Any) -> Pictures:
        return Pictures(self.images[chosen], self.labels[chosen], self.domains[chosen])

    def __add__(self, other: Pictures) -> Pictures:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Pictures(*(np.concatenate(pair) for pair in pairs))


@dataclass(frozen=True)
class Scene:
    """One run as an attack finds it.

    Attributes:
        settings: Of the run; everybody knows them.
        federation: Who holds what: for scorers alone.
        exchanges: All that crossed.
        attacker: Whose eyes look.
        step: Is told how far the attack is.
        judges: Of pictures.
        items: Declared names of what is looked at; all if there is none.
        workers: Threads that search at once; 0 is one a core. No figure depends on it.
    """

    settings: RunSettings
    federation: Federation
    exchanges: Sequence[Exchange]
    attacker: Attacker = "server"
    step: OnStep = silent
    judges: Judges = NOBODY
    items: Set[str] = frozenset()
    workers: int = 0

    @property
    def own(self) -> str:
        """The client that attacks, where one does: the first."""
        return next(iter(self.federation.clients))

    def messages(self) -> list[Message]:
        """Return what the attacker looks at: under secure sums no reply of a single client."""
        seen = visible(self.exchanges, self.attacker, self.own)
        hidden = self.settings.privacy.aggregation == "secure"
        return [
            message
            for message in seen
            if not (message.up and hidden)
            and (not self.items or message.item.partition(".")[0] in self.items)
        ]

    def pictures(self, index: np.ndarray) -> Pictures:
        """Return images by their place in the data set."""
        f = self.federation
        images = f.images
        if not isinstance(images, np.ndarray):
            shape = (len(f.labels), f.size, f.size, f.channels)
            images = np.memmap(images, dtype=f.pixels, mode="r", shape=shape)
        return Pictures(np.array(images[index]), f.labels[index], f.domain_ids[index])

    def part(self, split: str, most: int) -> Pictures:
        """Return at most so many images of an in-domain split, drawn."""
        parts = [index for name, _, index in self.federation.evaluation if name == split]
        index = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        draw = generator(self.settings.seed, "attack", split)
        return self.pictures(np.sort(draw.permutation(index)[:most]))

    def draw(self, *names: str | int) -> np.random.Generator:
        """Return a generator of the scorer's, by name."""
        return generator(self.settings.seed, "attack", *names)


class Attack(ABC):
    """One kind of attack; `measure` is its scorer's half."""

    kind: ClassVar[str]
    wants: ClassVar[str] = "what clients measure on images, or weights they train"
    """What it reads, in words."""
    overrides: ClassVar[Mapping[str, Any]] = {}
    """Settings of the attacked run that suit this kind, unless the user sets them."""
    sizes: ClassVar[tuple[int, ...]] = ()
    """Images a client that runs are made with, unless the user says how many clients there are."""
    judged: ClassVar[bool] = False
    """Whether networks judge pictures that it makes."""
    version: ClassVar[int] = 1
    """Raise it with every change that can move figures."""

    def __init__(self) -> None:
        self.pictures: dict[str, bytes] = {}
        """PNG files by a name each, of figures that were not withheld."""

    def reads(self, item: str) -> bool:
        """Return whether messages of this name may be of the kind that it reads."""
        return True

    def check(
        self,
        settings: RunSettings,
        attacker: Attacker,
        uplink: Uplink,
        items: Set[str] = frozenset(),
    ) -> None:
        """Refuse, before there is a run, an attack that none of its messages can serve.

        Args:
            settings: Of the run.
            attacker: Whose eyes look; what a client is sent shows only in a run.
            uplink: What the method declares.
            items: Of it, what is to be looked at; all if there is none.

        Raises:
            SettingsError: If the attacker will see nothing of the kind that this reads.
        """
        secure = settings.privacy.aggregation == "secure"
        seen = set() if secure else {item for items in uplink.values() for item in items}
        if attacker != "client" and not any(map(self.reads, seen & items if items else seen)):
            raise self._unread(settings.method, attacker, seen, self.wants)

    @abstractmethod
    def measure(self, scene: Scene) -> Iterator[AttackResult]:
        """Attack what the attacker sees, item by item.

        Of many clients that are all asked, the updates of those alone are kept that `looked_at` in
        `perform` draws: `by_item` leaves the others out.

        Raises:
            SettingsError: If nothing that crosses is of the kind that this attacks.
        """

    def nothing(self, scene: Scene, wants: str = "") -> SettingsError:
        """Return the error that nothing crosses which this kind of attack could read."""
        seen = {message.item for message in scene.messages()}
        return self._unread(scene.settings.method, scene.attacker, seen, wants or self.wants)

    def _unread(self, method: str, attacker: str, seen: set[str], wants: str) -> SettingsError:
        return SettingsError(
            f"{self.kind} reads {wants}, and of {method} a {attacker} sees "
            f"{', '.join(sorted(seen)) or 'nothing'}: choose another --kind, --attacker or "
            f"--method, or other --items"
        )


def load_attack(name: str) -> type[Attack]:
    """Return the class of a kind of attack.

    Raises:
        SettingsError: If there is no such kind.
        PluginError: If it cannot be imported.
    """
    loaded: type[Attack] = load_plugin("attack", name, Attack)
    return loaded


def interval(groups: Sequence[np.ndarray], draw: np.random.Generator) -> Interval:
    """Return the mean over all values, and its 95 % bootstrap interval over groups.

    Args:
        groups: Values that go together, such as those of one client.
        draw: Chooses groups.
    """
    sums = np.array([group.sum() for group in groups], dtype=float)
    counts = np.array([len(group) for group in groups], dtype=float)
    chosen = draw.integers(len(groups), size=(RESAMPLES, len(groups)))
    low, high = np.quantile(sums[chosen].sum(1) / counts[chosen].sum(1), (0.025, 0.975))
    return Interval(value=sums.sum() / counts.sum(), low=low, high=high)


def no_leak(measured: Interval, chance: float) -> Control:
    """Return the control whose interval must reach chance, or nearly so."""
    near = measured.low <= chance + NEAR_CHANCE and measured.high >= chance - NEAR_CHANCE
    return Control(measured=measured, expected=f"about {chance:g}", holds=near)


def planted_leak(measured: Interval, least: float) -> Control:
    """Return the control that must be found: its figure reaches ``least``."""
    holds = measured.value >= least
    return Control(measured=measured, expected=f"at least {least:g}", holds=holds)
