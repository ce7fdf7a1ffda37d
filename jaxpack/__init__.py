"""jaxpack: trains many networks in one XLA program, under Hyperband."""

from jaxpack import data, exports, metrics, models, optimizers, schedules
from jaxpack.dimensions import choice, integer, log_uniform, uniform
from jaxpack.explain import explain
from jaxpack.export import export
from jaxpack.fixed import grid
from jaxpack.load import load
from jaxpack.nn import switch
from jaxpack.predict import predict
from jaxpack.report import by_configuration
from jaxpack.schedulers import Hyperband, RandomSearch, SuccessiveHalving, promote
from jaxpack.space import Space, when
from jaxpack.sweep import SweepResult, sweep
from jaxpack.task import Task
from jaxpack.train import train
from jaxpack.types import HParams, TrialResult
from jaxpack.verify import verify

__all__ = [
    "HParams",
    "Hyperband",
    "RandomSearch",
    "Space",
    "SuccessiveHalving",
    "SweepResult",
    "Task",
    "TrialResult",
    "by_configuration",
    "choice",
    "data",
    "explain",
    "export",
    "exports",
    "grid",
    "integer",
    "load",
    "log_uniform",
    "metrics",
    "models",
    "optimizers",
    "predict",
    "promote",
    "schedules",
    "sweep",
    "switch",
    "train",
    "uniform",
    "verify",
    "when",
]
__version__ = "0.1.0"
