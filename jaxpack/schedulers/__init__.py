"""Schedulers: which trial trains to which resource. Integers only, no jax."""

from jaxpack.schedulers.brackets import Assignment, Brackets, promote
from jaxpack.schedulers.hyperband import Hyperband
from jaxpack.schedulers.random_search import RandomSearch
from jaxpack.schedulers.scheduler import Scheduler
from jaxpack.schedulers.successive_halving import SuccessiveHalving

__all__ = [
    "Assignment",
    "Brackets",
    "Hyperband",
    "RandomSearch",
    "Scheduler",
    "SuccessiveHalving",
    "promote",
]
