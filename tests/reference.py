"""One trial trained alone, as one would write it without jaxpack.

Plain optax with Python numbers, stock flax layers, short last batches at their true
size, a Python loop. Only the order of the data and the random keys are jaxpack's, by
its documented rules.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from jaxpack.data import deck


def trial_key(seed, trial):
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), trial)


def train_alone(
    module,
    optimizer,
    data,
    *,
    steps,
    batch_size,
    seed=0,
    trial=0,
    train_flag=None,
    loss=optax.softmax_cross_entropy_with_integer_labels,
):
    """Returns the variables and the optimizer's state after `steps` steps."""
    x, y = data
    key = trial_key(seed, trial)
    flags = {} if train_flag is None else {train_flag: False}
    variables = dict(_init(module, jax.random.fold_in(key, 0), x[:1], flags))
    params = variables.pop("params")
    opt_state = optimizer.init(params)
    flags = {} if train_flag is None else {train_flag: True}

    @jax.jit
    def step(params, state, opt_state, dropout_key, x, y):
        def loss_of(params):
            outputs, new_state = module.apply(
                {"params": params, **state},
                x,
                rngs={"dropout": dropout_key},
                mutable=list(state),
                **flags,
            )
            return loss(outputs, y).mean(), new_state

        grads, new_state = jax.grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new_state, opt_state

    steps_per_epoch = -(-len(x) // batch_size)
    for i in range(steps):
        epoch, index = divmod(i, steps_per_epoch)
        order = deck(seed, len(x), 1, epoch)[0]
        rows = order[index * batch_size : (index + 1) * batch_size]
        dropout_key = jax.random.fold_in(jax.random.fold_in(key, 1), i)
        params, variables, opt_state = step(
            params, variables, opt_state, dropout_key, x[rows], y[rows]
        )
    return params, dict(variables), opt_state


_compiled: dict[str, Any] = {}


def _init(module, key, x, flags):
    # One program: op by op, the forward pass would be compiled as well. At this level
    # the values are the same to the bit; at 0 they are not.
    init = jax.jit(lambda key, x: module.init(key, x, **flags)).lower(key, x)
    text = init.as_text()
    if text not in _compiled:
        _compiled[text] = init.compile({"xla_backend_optimization_level": "1"})
    return _compiled[text](key, x)


def difference(a, b):
    """The largest absolute difference between two pytrees."""
    leaves = jax.tree.leaves(
        jax.tree.map(lambda a, b: np.max(np.abs(np.asarray(a) - np.asarray(b))), a, b)
    )
    return max(map(float, leaves), default=0.0)
