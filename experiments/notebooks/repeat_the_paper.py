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
# # The paper's study, repeated
#
# *Understanding and Optimizing Packed Neural Network Training for Hyper-Parameter
# Tuning* (Liu, Krishnan, Elmore and Franklin,
# [arXiv 2002.02885](https://arxiv.org/abs/2002.02885)) trains several models in one
# program, a *pack*, and asks what that saves. This notebook asks it of jaxpack on the
# chip at hand, with the modules in `experiments/`, at sizes for one GPU of Colab and
# half an hour. On a CPU it takes smaller ones and some minutes. Each module has a
# command of its own for the full size, `python -m experiments.pairwise --help` say.
#
# **What to expect.** An *improvement* is the share of the time that a pack saves: 50 %
# is twice as fast, below 0 packing loses. The paper's figures are of GPUs, which one
# small model leaves mostly idle. **On a CPU one model fills a core, and most packs
# save little or lose**; the figures named below for a CPU are those measured on two
# shared cores. **On a GPU this project has measured nothing yet**: there the paper's
# claims are what is being tested.
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

import jax
from IPython.display import Image, display

from experiments import (
    hyperband,
    pack_size,
    pairwise,
    policies,
    shared_input,
    switching,
)

ON_CPU = jax.default_backend() == "cpu"
SMOKE = os.environ.get("JAXPACK_SMOKE") == "1"  # As short as a test.
RESULTS = pathlib.Path("runs/repeat_the_paper")
print(jax.devices(), f"jax {jax.__version__}")


def show(name):
    """Shows the picture that an experiment has drawn."""
    display(Image(RESULTS / f"{name}.png", width=700))


# What the studies of steps have in common: families of models, and how they are timed.
steps = {"directory": RESULTS, "batch_sizes": (32,), "smoke": ON_CPU}
steps["families"] = ("mlp",) if SMOKE else ("mlp", "resnet")
steps["repeats"] = 1 if SMOKE else 5

# %% [markdown]
# ## Two models in a pack
#
# *Claim: packing two models saves up to 40 % of the time of a training step on a GPU,
# and how much depends on the network and the batch size.* Like models become two lanes
# of one program under `jax.vmap`, unlike ones stand side by side in it.
#
# On two CPU cores: a median of nothing to 8 % for unlike pairs, and nothing for like
# ones.

# %%
pairwise.run(pairwise.Flags(**steps, optimizers=("adam", "momentum")))
show("pairwise")

# %% [markdown]
# ## More models in a pack
#
# *Claim: the more models are in a pack the more is saved, until the chip is full, and
# their memory grows by less than programs of their own would take.*
#
# On two CPU cores: eight small MLPs save about 30 % of the time and half the memory;
# eight small ResNets lose some 15 % of the time and save hardly any memory.

# %%
models = (2,) if SMOKE else (2, 4, 8) if ON_CPU else (2, 4, 8, 16, 32)
pack_size.run(pack_size.Flags(**steps, models=models))
show("pack_size")

# %% [markdown]
# ## One input for all
#
# *Claim: models that train on the same batches need them read, prepared and moved to
# the device once.* The claim is about batches that come from the host. jaxpack keeps
# the data on the device, where sharing has little left to save.
#
# On two CPU cores: 5 % to 10 % saved with batches from the host. With batches from the
# device sharing loses for the MLP, by up to a quarter.

# %%
shared_input.run(
    shared_input.Flags(**steps, models=2 if SMOKE else 4 if ON_CPU else 16)
)
show("shared_input")

# %% [markdown]
# ## Changing the trial in a lane
#
# *Claim: a model is loaded into a pack and taken out of it at little cost, while the
# others stay.* A swap is `take` and `put`; a new program has to be compiled, and a new
# process starts Python, too.
#
# On two CPU cores: a swap takes 1 ms for an MLP and 6 ms for a small ResNet, a new
# program about a thousand times that, a new process some thousand times.

# %%
models = ("mlp",) if SMOKE else ("mlp", "resnet8")
repeats = 3 if SMOKE else 20
switching.run(switching.Flags(models=models, repeats=repeats, directory=RESULTS))
show("switching")

# %% [markdown]
# ## Which trials to pack
#
# *Claim: on a space of 11 batch sizes, 4 optimizers and 4 activations, packing trials
# of one batch size (`equal_batch`) or near each other (`nearest`) beats packing at
# random.* Trials are packed as lanes with their own batch size (`own`), with all of
# them padded to the largest (`padded`), or side by side (`fused`).
#
# On two CPU cores, in a space of two batch sizes: no packing of these trials is surely
# better than `auto`, which trains them alone on both cores. Sweeps this short vary by
# more than the policies differ.

# %%
sweeps = {"directory": RESULTS, "model": "mlp", "dataset": "mnist5k", "max_resource": 9}
if SMOKE:
    sweeps |= {"dataset": "digits", "max_resource": 3, "size": 2, "batch_sizes": (64,)}
elif ON_CPU:
    sweeps = {"directory": RESULTS, "smoke": True}
ways = ("padded, nearest",) if SMOKE else ()
policies.run(policies.Flags(**sweeps, fused=2, ways=ways))
show("policies")

# %% [markdown]
# ## Hyperband
#
# *Claim: Hyperband with packing takes a fraction of the time of the original, which
# trains one trial at a time and starts each afresh at every rung.* Here trials go on
# where they stopped (`resumed`), are packed `within_rungs` as in the paper, or run
# `across_brackets`, where lanes go from trial to trial of any bracket. All come to the
# same scores and promotions, to the bit within an engine: that is
# `same_promotions`.
#
# On two CPU cores, where there can be two lanes at most: 1.1, 1.6 and 1.8 times the
# speed of the original. With any number of lanes, at R=81, what they could gain is at
# most the following.

# %%
import jaxpack as jp

print(hyperband.bounds(jp.Hyperband(81), None))

# %%
figures = hyperband.run(hyperband.Flags(**sweeps))
show("hyperband")
print("the same scores and promotions:", figures["same_promotions"])
