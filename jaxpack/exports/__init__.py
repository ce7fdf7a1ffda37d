"""Takes a sweep to other tools: tables in files, Optuna, TensorBoard."""

from jaxpack.exports.events import to_tensorboard
from jaxpack.exports.files import to_csv, to_parquet
from jaxpack.exports.studies import to_optuna

__all__ = ["to_csv", "to_optuna", "to_parquet", "to_tensorboard"]
