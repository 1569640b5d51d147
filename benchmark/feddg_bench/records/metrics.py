"""Metrics: display, range and computation of each.

Each metric is an entry of `METRICS`, the only source of its properties for data sets, tasks,
records, tables, reports and sweeps. Functions take the truth and the predictions of n images, both
[n], and return a float in double precision, as defined by wilds (Koh et al., ICML 2021); 0 if there
are no images. Some take the logarithms of the classes' probabilities, [n, C], for predictions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[Any]

WHOLE = "all"
"""Name of the part of a split that holds all of its images."""

CLIENT_SPLITS = ("client_test", "unseen_clients")
"""Splits whose parts are clients instead of domains."""
PERSONAL = "personal"
"""Name for the accuracies of clients' personal models, on their ``client_test``."""


def accuracy(truth: Values, predictions: Values) -> float:
    """Return the share of correct predictions, in [0, 1], a ratio of integers.

    >>> import numpy as np
    >>> accuracy(np.array([0, 1, 2, 2]), np.array([0, 1, 2, 1]))
    0.75
    """
    if not len(truth):
        return 0.0
    return int((truth == predictions).sum()) / len(truth)


def macro_f1(truth: Values, predictions: Values) -> float:
    """Return the mean F1 over the classes that occur in the truth, in [0, 1].

    Predictions of other classes lower the recall, but those classes do not enter the mean, as in
    wilds. A mean over all classes of a data set would be lower for parts that lack some.

    >>> import numpy as np
    >>> macro_f1(np.array([0, 0, 1, 1]), np.array([0, 1, 1, 2]))
    0.5833333333333333
    """
    if not len(truth):
        return 0.0
    import torch

    classes = int(max(truth.max(), predictions.max())) + 1
    hits, support, predicted = (
        torch.from_numpy(values).bincount(minlength=classes).double()  # [C]
        for values in (truth[truth == predictions], truth, predictions)
    )
    f1 = 2 * hits / (support + predicted)
    return float(f1[support > 0].mean())


def pearson(truth: Values, predictions: Values) -> float:
    """Return Pearson's correlation coefficient, in [-1, 1]; 0 where it is not defined.

    It is not defined for fewer than two images, constant values, or values that are not finite.

    >>> import numpy as np
    >>> pearson(np.array([1.0, 2.0, 3.0]), np.array([3.0, 5.0, 7.0]))
    1.0
    """
    import torch
    from torchmetrics.functional.regression import pearson_corrcoef

    # Shifted and scaled to [0, 1], which does not change a correlation: torchmetrics fails for a
    # variance that is small in absolute terms.
    x, y = _unit_range(predictions), _unit_range(truth)
    if x is None or y is None:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about a small variance, which gives NaN
        found = float(pearson_corrcoef(torch.from_numpy(x), torch.from_numpy(y)))
    return found if math.isfinite(found) else 0.0


def _unit_range(values: Values) -> NDArray[np.float64] | None:
    import numpy as np

    exact = values.astype(np.float64)
    if len(exact) < 2 or not np.isfinite(exact).all() or np.ptp(exact) == 0:
        return None
    scaled: NDArray[np.float64] = (exact - exact.min()) / np.ptp(exact)
    return scaled


def balanced_accuracy(truth: Values, predictions: Values) -> float:
    """Return the mean recall over the classes that occur in the truth, in [0, 1].

    >>> import numpy as np
    >>> balanced_accuracy(np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1]))
    0.8333333333333333
    """
    import numpy as np

    if not len(truth):
        return 0.0
    support = np.bincount(truth)
    hits = np.bincount(truth[truth == predictions], minlength=len(support))
    return float((hits[support > 0] / support[support > 0]).mean())


def log_likelihood(truth: Values, logs: Values) -> float:
    """Return the mean negative log likelihood of the true classes, at least 0."""
    return float(-logs[range(len(truth)), truth].mean()) if len(truth) else 0.0


def brier(truth: Values, logs: Values) -> float:
    """Return the Brier score for several classes, in [0, 2] (Brier, 1950).

    It is the mean over images of the squared distance between probabilities and the true class.

    >>> import numpy as np
    >>> round(brier(np.array([0]), np.log([[0.5, 0.25, 0.25]])), 6)
    0.375
    """
    import numpy as np

    apart = np.exp(logs)
    apart[range(len(truth)), truth] -= 1
    return float((apart**2).sum(axis=1).mean()) if len(truth) else 0.0


BINS = 15
"""Bins of equal width of the expected calibration error, as in Guo et al. (ICML 2017)."""


def calibration_error(truth: Values, logs: Values) -> float:
    """Return the expected calibration error of the predicted class over `BINS` bins, in [0, 1].

    It is the mean distance between confidence and accuracy of a bin, weighted by images.
    """
    import numpy as np
    import torch
    from torchmetrics.functional.classification import multiclass_calibration_error

    if not len(truth):
        return 0.0
    shares, labels = torch.from_numpy(np.exp(logs)), torch.from_numpy(truth)
    return float(multiclass_calibration_error(shares, labels, logs.shape[1], n_bins=BINS))


def auroc(truth: Values, logs: Values) -> float:
    """Return the mean one-versus-rest area under the ROC curve, in [0, 1].

    The mean is over the classes that occur in the truth; 0.5 if only one does.
    """
    import numpy as np
    import torch
    from torchmetrics.functional.classification import binary_auroc

    there = np.unique(truth)
    if len(there) < 2:
        return 0.5
    shares = torch.from_numpy(np.exp(logs))
    own = torch.from_numpy(truth[:, None] == there).long()
    areas = [binary_auroc(shares[:, k], own[:, n]) for n, k in enumerate(there.tolist())]
    return float(torch.stack(areas).double().mean())


@dataclass(frozen=True)
class Metric:
    """A number that is measured on images."""

    name: str  # its key in records, tables and settings
    title: str  # display name
    percent: bool = False  # whether it is a share, displayed in percent
    poolable: bool = False  # whether a split's value is its domains' mean, weighted by images
    range: tuple[float, float] = (-math.inf, math.inf)  # smallest and largest value
    tasks: tuple[str, ...] = ("classification", "regression")  # the tasks that have it
    function: Callable[[Values, Values], float] | None = None  # of truth and predictions
    asked: bool = False  # whether it is measured only if a data set or a setting names it
    logs: bool = False  # whether `function` takes logarithms of probabilities for predictions
    lower: bool = False  # whether lower is better
    # The split over whose clients `over` summarises the task's main metric, or `PERSONAL`.
    clients: str = ""
    over: Callable[[Values], Any] | None = None

    def display(self, value: float) -> float:
        """Return a value in its display unit: a share in percent."""
        return 100 * value if self.percent else value

    def text(self, value: float, decimals: int) -> str:
        """Return a value as text: a share in percent, anything else with one more decimal."""
        return f"{self.display(value):.{decimals if self.percent else decimals + 1}f}"

    @property
    def needs(self) -> str:
        """What a run needs to measure it; empty if that is a matter of its data set."""
        if self.clients == CLIENT_SPLITS[1]:
            return "federation.unseen_clients, such as 2"
        if self.clients:
            own = ", and a method whose clients have models of their own, such as fedbn"
            return "data.client_test_fraction, such as 0.2" + own * (self.clients == PERSONAL)
        return f"evaluation.metrics=[{self.name}]" if self.asked else ""

    @property
    def remedy(self) -> str:
        """The end of a sentence on runs that have not measured it; empty if it needs nothing."""
        return f": it needs {self.needs}" if self.needs else ""

    @property
    def label(self) -> str:
        """The title with its unit, as on an axis."""
        return f"{self.title} (%)" if self.percent else self.title


def _asked(
    name: str, title: str, most: float, function: Callable[[Values, Values], float], **more: Any
) -> Metric:
    """Return a metric of a classification from 0 to ``most``; by default an error."""
    own: dict[str, Any] = {"logs": True, "lower": True, **more}
    tasks = ("classification",)
    return Metric(name, title, range=(0, most), tasks=tasks, function=function, asked=True, **own)


def _worst_tenth(values: Values) -> Any:
    import numpy as np

    return np.sort(values)[: -(-len(values) // 10)].mean()


_OVER: dict[str, tuple[str, Callable[[Values], Any]]] = {
    "mean": ("mean over", lambda values: values.mean()),
    "std": ("standard deviation over", lambda values: values.std()),
    "worst_tenth": ("mean over the worst tenth of", _worst_tenth),
    "worst": ("worst of", lambda values: values.min()),
}
"""Summaries over clients, which all count the same: the mean (FDSE, CVPR 2025), the population
standard deviation (PFLlib), the mean of the worst tenth, rounded up (q-FFL, ICLR 2020), the worst.
"""


def _over_clients() -> Iterator[Metric]:
    """Yield the summaries over clients of each kind."""
    for prefix, split, whom in (
        ("client", CLIENT_SPLITS[0], "clients"),
        ("unseen_client", CLIENT_SPLITS[1], "unseen clients"),
        (PERSONAL, PERSONAL, "clients' personal models"),
    ):
        for name, (title, over) in _OVER.items():
            yield Metric(
                f"{prefix}_{name}",
                f"{title} {whom}",
                percent=True,
                tasks=(),
                lower=name == "std",
                clients=split,
                over=over,
            )


METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "accuracy", True, True, (0, 1), ("classification",), accuracy),
        Metric("macro_f1", "macro F1", True, False, (0, 1), ("classification",), macro_f1),
        Metric("pearson", "Pearson's r", False, False, (-1, 1), ("regression",), pearson),
        Metric("worst_group", "worst group", range=(-1, 1)),
        Metric("loss", "loss", poolable=True, range=(0, math.inf), lower=True),
        _asked("nll", "negative log likelihood", math.inf, log_likelihood, poolable=True),
        _asked("ece", "expected calibration error", 1, calibration_error, percent=True),
        _asked("brier", "Brier score", 2, brier, poolable=True),
        _asked("auroc", "AUROC", 1, auroc, percent=True, lower=False),
        _asked(
            "balanced_accuracy",
            "balanced accuracy",
            1,
            balanced_accuracy,
            percent=True,
            logs=False,
            lower=False,
        ),
        Metric("recovered", "recovered", True, tasks=()),
        Metric("attained", "difference to the attainable accuracy", True, tasks=()),
        *_over_clients(),
    )
}
"""All metrics by name. The first one of a task is its main metric; `worst_group` is the smallest
value of that metric over groups of images, with its unit and range (see `find_metric`). Those
without a task are not measured: `derived` computes them, or they summarise clients."""

DERIVED = tuple(m.name for m in METRICS.values() if not (m.tasks or m.clients))
"""Names of the metrics that `derived` computes."""

GAP = 0.2
"""`recovered` needs a larger difference between the accuracies of the invariant and ERM's rule."""


def derived(metric: str, accuracy: float, answers: Mapping[str, float]) -> float | None:
    """Return a metric of a data set for which accuracies of rules are known.

    ``recovered`` is the share of the gap between ERM's rule and the invariant rule that is closed:
    0 is ERM's rule, 1 the invariant one; ``None`` if the gap is at most `GAP`. ``attained`` is the
    difference to the invariant rule.

    Args:
        metric: One of `DERIVED`.
        accuracy: Accuracy on the test domain, in [0, 1].
        answers: ``invariant`` and ``erm``: accuracies of the two rules there.

    >>> round(derived("recovered", 0.25, {"invariant": 0.85, "erm": 0.05}), 3)
    0.25
    """
    if not {"invariant", "erm"} <= answers.keys():
        return None
    gap = answers["invariant"] - answers["erm"]
    if metric == "recovered":
        return (accuracy - answers["erm"]) / gap if gap > GAP else None
    return accuracy - answers["invariant"]


def metrics_of(task: str) -> tuple[str, ...]:
    """Return the names of a task's metrics, the main one first; not the loss, nor those `asked`.

    >>> metrics_of("regression")
    ('pearson', 'worst_group')
    """
    known = (m for m in METRICS.values() if task in m.tasks and not m.asked)
    return tuple(metric.name for metric in known if metric.name != "loss")


@lru_cache(maxsize=1000)
def find_metric(name: str, task: str = "classification") -> Metric:
    """Return a metric by name; an unknown one, such as a cost, has only its name.

    >>> find_metric("worst_group", "classification").percent
    True
    >>> find_metric("aggregation_time").title
    'aggregation time'
    """
    if name == "worst_group" and (main := METRICS.get(next(iter(metrics_of(task)), ""))):
        return replace(main, name=name, title=METRICS[name].title, poolable=False, function=None)
    if (known := METRICS.get(name)) and known.clients:
        main = METRICS[metrics_of(task)[0]]
        return replace(known, title=f"{main.title}, {known.title}", percent=main.percent)
    return METRICS.get(name) or Metric(name, name.replace("_", " "))
