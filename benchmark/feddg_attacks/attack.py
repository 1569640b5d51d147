"""Parts of every attack: an attacker's half, a scorer's half, and two controls.

The attacker's half gets messages, public images and targets. Only the scorer's half knows which
client holds which image. Every figure comes with two controls: *no leak* looks for the target in
messages of clients that do not hold it, real or made for the control, and must be at chance;
*planted leak* looks in messages of the target alone, and must find it. If a control fails, the
figure is withheld.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from feddg_attacks.capture import Exchange, Message, visible
from feddg_attacks.judges import NOBODY, Judges
from feddg_attacks.records import Attacker, AttackResult, Control, Interval
from feddg_bench.common.errors import SettingsError
from feddg_bench.common.streams import generator
from feddg_bench.config.schema import RunSettings
from feddg_bench.core.server import Uplink
from feddg_bench.data.federated import Federation
from feddg_bench.plugins import load_plugin

RESAMPLES = 1000
"""Resamples of a bootstrap."""
NEAR_CHANCE = 0.05
"""Largest allowed distance of the *no leak* interval from chance."""

OnStep = Callable[[str, int, int], None]
"""Called with the name of a step, the amount done, and the total."""


def silent(_what: str, _done: int, _total: int) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class Pictures:
    """Images as stored, with the label and domain of each, which an attacker can see."""

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
    """One run, as an attack sees it.

    Attributes:
        settings: The run's settings, which are public.
        federation: Which client holds which image; for scorers only.
        exchanges: All exchanges of the run.
        attacker: Who attacks.
        step: Called with the attack's progress.
        judges: Networks that judge pictures.
        items: Declared names of the items to attack; all if empty.
        workers: Number of search threads; 0: one per core. Figures do not depend on it.
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
        """The first client: the attacker, if a client attacks."""
        return next(iter(self.federation.clients))

    def messages(self) -> list[Message]:
        """Return the messages to attack; under secure sums, these include no client's reply."""
        seen = visible(self.exchanges, self.attacker, self.own)
        hidden = self.settings.privacy.aggregation == "secure"
        return [
            message
            for message in seen
            if not (message.up and hidden)
            and (not self.items or message.item.partition(".")[0] in self.items)
        ]

    def pictures(self, index: np.ndarray) -> Pictures:
        """Return images by their index in the data set."""
        f = self.federation
        images = f.images
        if not isinstance(images, np.ndarray):
            shape = (len(f.labels), f.size, f.size, f.channels)
            images = np.memmap(images, dtype=f.pixels, mode="r", shape=shape)
        return Pictures(np.array(images[index]), f.labels[index], f.domain_ids[index])

    def part(self, split: str, most: int) -> Pictures:
        """Return at most ``most`` images of an in-domain split, drawn at random."""
        parts = [index for name, _, index in self.federation.evaluation if name == split]
        index = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        draw = generator(self.settings.seed, "attack", split)
        return self.pictures(np.sort(draw.permutation(index)[:most]))

    def draw(self, *names: str | int) -> np.random.Generator:
        """Return the scorer's random generator of this name."""
        return generator(self.settings.seed, "attack", *names)


class Attack(ABC):
    """One kind of attack; `measure` is its scorer's half."""

    kind: ClassVar[str]
    wants: ClassVar[str] = "what clients measure on images, or weights they train"
    """Description of what it reads, for error messages."""
    overrides: ClassVar[Mapping[str, Any]] = {}
    """Settings of the attacked run that suit this kind, unless the user sets them."""
    sizes: ClassVar[tuple[int, ...]] = ()
    """Images per client, one run per size, unless the user sets the number of clients."""
    judged: ClassVar[bool] = False
    """Whether networks judge its pictures."""
    version: ClassVar[int] = 1
    """Raise it with every change that can alter figures or controls."""
    versions: ClassVar[Mapping[Attacker, int]] = {}
    """Versions for single attackers, where a change could alter only their figures."""

    def __init__(self) -> None:
        self.pictures: dict[str, bytes] = {}
        """PNG files by name, for figures that were not withheld."""

    @classmethod
    def version_of(cls, attacker: Attacker) -> int:
        """Return the version of the attack by this attacker."""
        return cls.versions.get(attacker, cls.version)

    def reads(self, item: str) -> bool:
        """Return whether the attack could read messages of this name."""
        return True

    def check(
        self,
        settings: RunSettings,
        attacker: Attacker,
        uplink: Uplink,
        items: Set[str] = frozenset(),
    ) -> None:
        """Refuse, before the run, an attack that can read none of the messages.

        Args:
            settings: The run's settings.
            attacker: Who attacks. What a client receives is known only after the run.
            uplink: What the method declares.
            items: Declared names of the items to attack; all if empty.

        Raises:
            SettingsError: If the attacker will see nothing that this attack reads.
        """
        if attacker == "client":
            return
        if settings.privacy.aggregation == "secure":
            raise SettingsError(
                f"under secure sums (privacy.aggregation=secure) a {attacker} sees sums over all "
                f"clients alone, and attacks read what single clients send: choose --attacker "
                f"client, or leave that setting out"
            )
        seen = {item for items in uplink.values() for item in items}
        if not any(map(self.reads, seen & items if items else seen)):
            raise self._unread(settings.method, attacker, seen, self.wants)

    @abstractmethod
    def measure(self, scene: Scene) -> Iterator[AttackResult]:
        """Attack the messages that the attacker sees, item by item.

        If many clients are asked in every round, only updates of the clients that `looked_at` in
        `perform` draws are kept; `by_item` leaves out the others.

        Raises:
            SettingsError: If the attack can read none of the messages.
        """

    def nothing(self, scene: Scene, wants: str = "") -> SettingsError:
        """Return the error that this kind of attack can read none of the messages."""
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
        groups: Values that belong together, such as those of one client.
        draw: Resamples groups.
    """
    sums = np.array([group.sum() for group in groups], dtype=float)
    counts = np.array([len(group) for group in groups], dtype=float)
    chosen = draw.integers(len(groups), size=(RESAMPLES, len(groups)))
    low, high = np.quantile(sums[chosen].sum(1) / counts[chosen].sum(1), (0.025, 0.975))
    return Interval(value=sums.sum() / counts.sum(), low=low, high=high)


def no_leak(measured: Interval, chance: float) -> Control:
    """Return the control whose interval must come within `NEAR_CHANCE` of chance."""
    near = measured.low <= chance + NEAR_CHANCE and measured.high >= chance - NEAR_CHANCE
    return Control(measured=measured, expected=f"about {chance:g}", holds=near)


def planted_leak(measured: Interval, least: float) -> Control:
    """Return the control whose figure must reach ``least``."""
    holds = measured.value >= least
    return Control(measured=measured, expected=f"at least {least:g}", holds=holds)
