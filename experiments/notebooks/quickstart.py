# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # jaxpack: a quickstart
#
# Your own model, the plan, a sweep under Hyperband, its table, pictures and page, the
# best weights at work, and how a sweep goes on after an interruption. On one GPU of
# Colab it takes some minutes; on a CPU it trains on smaller data, in half a minute.
#
# The next cell makes jaxpack importable. In a clone of the repository there is nothing
# to do. Elsewhere, as on Colab, write the repository's Git URL into it.

# %%
import importlib.util
import pathlib
import subprocess
import sys

URL = ""  # @param {type: "string"}

here = pathlib.Path.cwd()
clone = next(
    (f for f in (here, *here.parents) if (f / "jaxpack/sweep.py").exists()), None
)
if clone is None and URL:
    clone = here / "jaxpack_clone"
    subprocess.run(["git", "clone", "--depth=1", URL, clone], check=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, f"{clone}[experiments]"], check=True)
if clone is not None:
    sys.path.insert(0, str(clone))
if importlib.util.find_spec("jaxpack") is None:
    raise ImportError("there is no jaxpack here: write its Git URL into URL above")

# %%
import os

import flax.linen as nn
import jax
import numpy as np
import optax
import pandas as pd
from IPython.display import Image, display

import jaxpack as jp

ON_CPU = jax.default_backend() == "cpu"
SMOKE = os.environ.get("JAXPACK_SMOKE") == "1"  # As short as a test.
MAX_RESOURCE = 3 if SMOKE else 27
print(jax.devices(), f"jax {jax.__version__}, jaxpack {jp.__version__}")

# %% [markdown]
# ## A task: a model, an optimizer, data
#
# The model is yours, of stock layers. What is tuned comes in by `hp`: numbers such as
# the dropout rate may differ between the trials of one program. So may a choice between
# strings by `jp.switch`. The layers' width has to fix a program.


# %%
class Net(nn.Module):
    """A residual MLP."""

    width: int
    dropout: float
    activation: object

    @nn.compact
    def __call__(self, x, *, train=False):
        x = nn.Dense(self.width)(x.reshape(len(x), -1))
        y = self.activation(nn.Dense(self.width)(nn.LayerNorm()(x)))
        x = x + nn.Dropout(self.dropout)(y, deterministic=not train)
        return nn.Dense(10)(x)


def model(hp):
    activations = {"relu": nn.relu, "gelu": nn.gelu, "tanh": nn.tanh}
    return Net(hp.width, hp.dropout, jp.switch(hp.activation, activations))


def optimizer(hp):
    schedule = jp.schedules.cosine(hp.learning_rate, hp.total_steps)
    return optax.adamw(schedule, weight_decay=hp.weight_decay)


task = jp.Task(model, optimizer, jp.data.load("digits" if ON_CPU else "mnist5k"))
space = jp.Space(
    learning_rate=jp.log_uniform(1e-4, 3e-2),
    weight_decay=jp.log_uniform(1e-6, 1e-2),
    dropout=jp.uniform(0.0, 0.5),
    activation=jp.choice("relu", "gelu", "tanh"),
    width=32 if SMOKE else jp.choice(32, 64) if ON_CPU else jp.choice(128, 256),
)

# %% [markdown]
# ## The plan
#
# Before anything is trained, `explain` traces the task and says which hparams may
# differ within a program, which fix one and why, and which programs there will be.

# %%
scheduler = jp.Hyperband(MAX_RESOURCE)
print(jp.explain(task, space, scheduler))

# %% [markdown]
# ## The sweep
#
# Half of a sweep's promise is that it can be stopped. This one is given a second. The
# directory holds all that it needs to go on: on Colab, put it on a mounted Drive.

# %%
directory = pathlib.Path("runs/quickstart")
options = {"seed": 0, "directory": directory}
part = jp.sweep(
    task, space, scheduler, **options, overwrite=True, progress=False, max_seconds=1
)
print(f"stopped by {part.stopped}, after {part.stats.lane_epochs} epochs of trials")

# %% [markdown]
# The same call goes on, in this process or in another one, tomorrow, on another
# machine.

# %%
result = jp.sweep(task, space, scheduler, **options, progress=not SMOKE)
result

# %% [markdown]
# On a complete sweep the same call gives the result and trains nothing. And it ends
# with the same table as one that nothing interrupted.

# %%
again = jp.sweep(task, space, scheduler, **options, progress=False)
whole = jp.sweep(task, space, scheduler, seed=0, progress=False)
columns = ["status", "score", "epochs"]
for other in (again, whole):
    table = other.to_pandas()
    pd.testing.assert_frame_equal(result.to_pandas()[columns], table[columns])
print("the same table, three times")

# %% [markdown]
# ## The table, the picture, the page

# %%
result.to_pandas().sort_values("score", ascending=False).head()

# %%
display(Image(result.plot(directory / "rungs.png")))

# %% [markdown]
# The page has learning curves, the score against every hparam, parallel coordinates,
# where the time went and a table that sorts, in one file.

# %%
print("open", result.report())

# %% [markdown]
# ## The best weights
#
# `result.best` has the weights that its score was read at. `jp.predict` puts the inputs
# into the form that the model was trained on; flax can use the weights without jaxpack.

# %%
x, y = task.dataset.validation
logits = jp.predict(task, result.best, "validation")
accuracy = (logits.argmax(-1) == y).mean()
print(f"validation accuracy {accuracy:.4f}; at its rung: {result.best_score:.4f}")
assert np.isclose(accuracy, result.best_score)
print("on the test split, looked at once:", result.test_metrics)

# %%
net = model(result.best_hparams)
by_flax = net.apply({"params": result.best.params}, x)
assert np.allclose(by_flax, logits, atol=1e-4)

# %%
print("hparams and weights without jaxpack:", jp.export(task, result.best, "runs/best"))
