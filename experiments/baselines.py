"""One trial at a time, as a good user would write it without jaxpack.

| name | what it is |
|---|---|
| `one` | a jitted, donated step with the hparams as arguments, in a Python loop |
| `one_scan` | the same with the epoch in `lax.scan` |
| `one_scan_conv` | that with jaxpack's convolution, to tell its gain from packing's |
| `one_recompile` | `one` with the hparams as Python numbers, compiled for every trial |

In all of them the data stay on the device, batches are gathered there, and nothing
waits for the device within an epoch. Keys and the order of the data are those of
jaxpack, so a trial comes to the same weights: they do the same work.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.models import Problem
from jaxpack import step
from jaxpack.data import deck
from jaxpack.nn import intercept

NAMES = ("one", "one_scan", "one_scan_conv")
"""Those that compile once for all trials."""

HParamValues = Mapping[str, Any]


class State(NamedTuple):
    """A trial's state; `step` is `[]` int32."""

    params: Any
    model_state: Any
    opt_state: Any
    key: jax.Array
    step: jax.Array


class Baseline(NamedTuple):
    """The programs of a baseline.

    Attributes:
      init: `init(hparams, seed, trial) -> State`.
      advance: `advance(state, hparams, data, order) -> State`, which takes over the
        memory of `state`.
      evaluate: `evaluate(state, hparams) -> accuracy` on the validation split.
      data: Training inputs and labels on the device.
      steps_per_call: Steps that a call of `advance` takes: 1 or an epoch's.
    """

    init: Callable[[HParamValues, Any, Any], State]
    advance: Callable[..., State]
    evaluate: Callable[[State, HParamValues], jax.Array]
    data: tuple[Any, Any]
    steps_per_call: int


def make(
    name: str,
    problem: Problem,
    data: tuple[Any, Any],
    constants: HParamValues | None = None,
) -> Baseline:
    """Builds a baseline; nothing is compiled yet.

    Args:
      name: One of those above.
      problem: What is trained.
      data: Its data, as `put` gives them.
      constants: The hparams of the one trial that "one_recompile" is for.

    Raises:
      ValueError: If there is no such baseline.
    """
    if name not in (*NAMES, "one_recompile"):
        raise ValueError(f"name is {name!r}; it must be one of {NAMES}")
    bind = functools.partial(_bind, constants)
    train, validation = data
    train_step = _train_step(problem, bind, convolutions=name == "one_scan_conv")

    def init(hparams: HParamValues, seed: Any, trial: Any) -> State:
        hp = bind(hparams)
        key = step.trial_key(seed, trial)
        with intercept():
            x = problem.dataset.train[0][:1]
            variables = dict(problem.model(hp).init(step.init_key(key), x))
        params = variables.pop("params")
        opt_state = problem.optimizer(hp).init(params)
        return State(params, variables, opt_state, key, jnp.int32(0))

    def epoch(state: State, hparams: HParamValues, data: Any, order: Any) -> State:
        def body(state: State, _: None) -> tuple[State, None]:
            return train_step(state, hparams, data, order), None

        return jax.lax.scan(body, state, None, length=len(order))[0]

    def evaluate(state: State, hparams: HParamValues, data: Any) -> jax.Array:
        variables = {"params": state.params, **state.model_state}
        with intercept():
            outputs: Any = problem.model(bind(hparams)).apply(variables, data[0])
        return jnp.mean(outputs.argmax(-1) == data[1])

    scanned = name.startswith("one_scan")
    compiled = jax.jit(evaluate)
    return Baseline(
        init=jax.jit(init),
        advance=jax.jit(epoch if scanned else train_step, donate_argnums=0),
        evaluate=lambda state, hparams: compiled(state, hparams, validation),
        data=train,
        steps_per_call=problem.steps_per_epoch if scanned else 1,
    )


def put(problem: Problem) -> tuple[Any, Any]:
    """The training and the validation split on the device."""
    return jax.device_put((problem.dataset.train, problem.dataset.validation))


def train(
    baseline: Baseline,
    state: State,
    hparams: HParamValues,
    orders: list[jax.Array],
) -> State:
    """Trains a trial for some epochs, without waiting for the device.

    Args:
      baseline: The programs.
      state: The trial's state, which is used up.
      hparams: Its hparams on the device.
      orders: The rows of each batch, `[S, B]` int32 an epoch.
    """
    advance, data = baseline.advance, baseline.data
    for order in orders:
        for _ in range(len(order) // baseline.steps_per_call):
            state = advance(state, hparams, data, order)
    return state


def batches(problem: Problem, seed: int, num_epochs: int) -> list[jax.Array]:
    """The rows of each batch of each epoch, on the device, `[S, B]` int32 an epoch."""
    shape = problem.steps_per_epoch, problem.batch_size
    rows = deck(seed, problem.dataset.num_train, num_epochs)
    return [jax.device_put(row.reshape(shape)) for row in rows]


def on_device(hparams: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The numbers among a trial's hparams as arrays, `[]` float32."""
    return {
        name: jax.device_put(np.float32(value))
        for name, value in hparams.items()
        if isinstance(value, int | float)
    }


def _bind(constants: HParamValues | None, hparams: HParamValues) -> Any:
    """The hparams as the model and the optimizer read them."""
    return types.SimpleNamespace(**(hparams if constants is None else constants))


def _train_step(
    problem: Problem, bind: Callable[[HParamValues], Any], *, convolutions: bool
) -> Callable[..., State]:
    """One step on the batch that is the state's turn."""

    def train_step(state: State, hparams: HParamValues, data: Any, order: Any) -> State:
        hp = bind(hparams)
        model, optimizer = problem.model(hp), problem.optimizer(hp)
        rows = order[state.step % len(order)]
        x, y = data[0][rows], data[1][rows]
        key = step.dropout_key(state.key, state.step)

        def loss_of(params: Any) -> tuple[jax.Array, Any]:
            # Lets stock dropout take a rate that is an argument.
            with intercept():
                outputs, model_state = model.apply(
                    {"params": params, **state.model_state},
                    x,
                    train=True,
                    rngs={"dropout": key},
                    mutable=list(state.model_state),
                )
            losses = optax.softmax_cross_entropy_with_integer_labels(outputs, y)
            return losses.mean(), dict(model_state)

        if convolutions:
            from jaxpack.rewrite import replace_operations

            loss_of = replace_operations(loss_of)
        grads, model_state = jax.grad(loss_of, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, model_state, opt_state, state.key, state.step + 1)

    return train_step
