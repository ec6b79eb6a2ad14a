"""GLUE's metrics of a task's predictions, by scikit-learn and SciPy.

The correlation with a constant is undefined, and is 0 here, as scikit-learn defines Matthews'
correlation. F1 without positive predictions and labels is also 0.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats
from sklearn import metrics

from experiments.config.glue_tasks import Task


def _correlation(correlate: Callable, wanted_N: np.ndarray, predicted_N: np.ndarray) -> float:
    wanted_N, predicted_N = wanted_N.astype(np.float64), predicted_N.astype(np.float64)
    varies = np.ptp(wanted_N) > 0 and np.ptp(predicted_N) > 0
    return correlate(wanted_N, predicted_N).statistic if varies else 0.0


def _f1(wanted_N: np.ndarray, predicted_N: np.ndarray) -> float:
    zero: Any = 0.0  # the stub says str
    return metrics.f1_score(wanted_N, predicted_N, zero_division=zero)


METRICS: dict[str, Callable] = {
    "accuracy": metrics.accuracy_score,
    "f1": _f1,
    "matthews": metrics.matthews_corrcoef,
    "pearson": functools.partial(_correlation, stats.pearsonr),
    "spearman": functools.partial(_correlation, stats.spearmanr),
}


def measure(task: Task, labels_N: np.ndarray, predicted_N: np.ndarray) -> dict[str, float]:
    """Returns the task's metrics of classes or scores (N,), each from 0 or -1 to 1."""
    return {name: float(METRICS[name](labels_N, predicted_N)) for name in task.metrics}
