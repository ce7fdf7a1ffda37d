"""`init`: a module to begin with."""

from __future__ import annotations

import pathlib
from typing import Annotated

import tyro

from jaxpack.cli.errors import DONE, UsageError

EXAMPLE = '''\
"""Two moons told apart by small networks: python -m jaxpack sweep task.py"""

import flax.linen as nn
import numpy as np
import optax

import jaxpack as jp


class Net(nn.Module):
    width: int
    dropout: float

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.relu(nn.Dense(self.width)(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(2)(nn.relu(nn.Dense(self.width)(x)))


def moons(count, seed):
    rng = np.random.default_rng(seed)
    angle, y = rng.uniform(0, np.pi, count), rng.integers(0, 2, count)
    x = np.stack([np.cos(angle) + y, np.sin(angle)], 1)
    x[y == 1] *= [1, -1]
    return (x + rng.normal(0, 0.2, x.shape)).astype(np.float32), y.astype(np.int32)


task = jp.Task(
    model=lambda hp: Net(hp.width, hp.dropout),
    optimizer=lambda hp: optax.adam(hp.learning_rate),
    dataset=jp.data.Dataset.from_arrays(  # Your own arrays, [num_examples, ...].
        train=moons(1000, 0), validation=moons(500, 1), test=moons(500, 2)
    ),
)
space = jp.Space(
    learning_rate=jp.log_uniform(1e-4, 1e-1),
    dropout=jp.uniform(0.0, 0.5),
    width=jp.choice(16, 32),
)
scheduler = jp.Hyperband(max_resource=27)
'''

File = Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]


def init(file: File = pathlib.Path("task.py")) -> int:
    """Writes an example: a model, data and a space, ready to be swept.

    It runs as it is, and is made to be changed: your own flax model, your own arrays,
    your own hparams. A file that exists is left alone.

        python -m jaxpack init task.py
        python -m jaxpack sweep task.py

    Args:
      file: The file to write.
    """
    if file.suffix != ".py":
        raise UsageError(f"file is {str(file)!r}; its name has to end in .py")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(EXAMPLE.replace("task.py", str(file)))
    except FileExistsError:
        raise UsageError(
            f"file is {str(file)!r}, which exists already; name another one"
        ) from None
    print(f"{file} is written; next: python -m jaxpack sweep {file}")
    return DONE
