"""optax's schedules with every argument traceable.

Each has the arguments of the optax function it mirrors and, given Python numbers,
its values. A traced argument may be a lane's hparam: the peak, the length of the
warm-up, the horizon. Where optax refuses a value, so do these if it is a Python
number; if it is traced, the schedule gives NaN from the step that needs it on.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def constant(value: Any) -> optax.Schedule:
    """Keeps one value, as `optax.constant_schedule`.

    Examples:
      >>> constant(0.1)(7)
      0.1
    """
    return lambda count: value


def linear(
    init_value: Any, end_value: Any, transition_steps: Any, transition_begin: Any = 0
) -> optax.Schedule:
    """Goes from one value to another in a line, as `optax.linear_schedule`.

    Args:
      init_value: `[]`, the value up to step `transition_begin`.
      end_value: `[]`, the value from `transition_steps` steps later.
      transition_steps: `[]`, steps in between; the value stays `init_value` for good
        if there are none.
      transition_begin: `[]`, the step to start at; a negative one counts as 0.

    Returns:
      A function of the step count, `[]` int32, to the value, `[]` float32.

    Examples:
      >>> print(linear(1.0, 0.0, 10)(5))
      0.5
    """

    def schedule(count: Any) -> jax.Array:
        begin = jnp.maximum(transition_begin, 0)
        moving = jnp.asarray(transition_steps) > 0
        steps = jnp.where(moving, transition_steps, 1)
        fraction = 1 - jnp.clip(count - begin, 0, steps) / steps
        value = (init_value - end_value) * fraction + end_value
        return jnp.where(moving, value, init_value)

    return schedule


def cosine(
    init_value: Any, decay_steps: Any, alpha: Any = 0.0, exponent: Any = 1.0
) -> optax.Schedule:
    """Decays along half a cosine, as `optax.cosine_decay_schedule`.

    See Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm
    Restarts", 2017, https://arxiv.org/abs/1608.03983.

    Args:
      init_value: `[]`, the value at step 0.
      decay_steps: `[]`, the step from which the value stays.
      alpha: `[]`, the last value as a fraction of `init_value`.
      exponent: `[]`, the power to which the cosine is raised.

    Returns:
      A function of the step count, `[]` int32, to the value, `[]` float32.

    Raises:
      ValueError: If `decay_steps` is a number and not above 0.

    Examples:
      >>> schedule = cosine(1.0, 10)
      >>> [round(float(schedule(count)), 3) for count in (0, 5, 10)]
      [1.0, 0.5, 0.0]
    """
    _check_positive("decay_steps", decay_steps)

    def schedule(count: Any) -> jax.Array:
        steps = _as_float(decay_steps)
        count = jnp.minimum(_as_float(count), steps)
        wave = 0.5 * (1 + jnp.cos(jnp.pi * count / steps))
        value = init_value * ((1 - alpha) * wave**exponent + alpha)
        return jnp.where(steps > 0, value, jnp.nan)

    return schedule


def warmup_cosine(
    init_value: Any,
    peak_value: Any,
    warmup_steps: Any,
    decay_steps: Any,
    end_value: Any = 0.0,
    exponent: Any = 1.0,
) -> optax.Schedule:
    """Rises in a line, then decays, as `optax.warmup_cosine_decay_schedule`.

    Args:
      init_value: `[]`, the value at step 0.
      peak_value: `[]`, the value at step `warmup_steps`.
      warmup_steps: `[]`, steps to the peak.
      decay_steps: `[]`, the step from which the value stays, warm-up included.
      end_value: `[]`, the last value.
      exponent: `[]`, the power to which the cosine is raised.

    Returns:
      A function of the step count, `[]` int32, to the value, `[]` float32.

    Raises:
      ValueError: If `decay_steps` and `warmup_steps` are numbers and the first is
        not above the second.

    Examples:
      >>> schedule = warmup_cosine(0.0, 1.0, warmup_steps=2, decay_steps=12)
      >>> [round(float(schedule(count)), 3) for count in (0, 1, 2, 7, 12)]
      [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _check_positive("decay_steps - warmup_steps", decay_steps - warmup_steps)
    if _is_number(peak_value):
        alpha = 0.0 if peak_value == 0.0 else end_value / peak_value
    else:
        divisor = jnp.where(peak_value == 0.0, 1.0, peak_value)
        alpha = jnp.where(peak_value == 0.0, 0.0, end_value / divisor)
    warmup = linear(init_value, peak_value, warmup_steps)
    decay = cosine(peak_value, decay_steps - warmup_steps, alpha, exponent)

    def schedule(count: Any) -> jax.Array:
        before = count < warmup_steps
        return jnp.where(before, warmup(count), decay(count - warmup_steps))

    return schedule


def one_cycle(
    transition_steps: Any,
    peak_value: Any,
    pct_start: Any = 0.3,
    div_factor: Any = 25.0,
    final_div_factor: Any = 1e4,
) -> optax.Schedule:
    """Rises and falls along cosines, as `optax.cosine_onecycle_schedule`.

    See Smith and Topin, "Super-Convergence: Very Fast Training of Neural Networks
    Using Large Learning Rates", 2017, https://arxiv.org/abs/1708.07120.

    Args:
      transition_steps: `[]`, the step from which the value stays.
      peak_value: `[]`, the highest value.
      pct_start: `[]`, the fraction of the steps spent rising.
      div_factor: `[]`, the peak over the value at step 0.
      final_div_factor: `[]`, the value at step 0 over the last.

    Returns:
      A function of the step count, `[]` int32, to the value, `[]` float32.

    Raises:
      ValueError: If `transition_steps` is a number and not above 0.

    Examples:
      >>> schedule = one_cycle(10, 1.0, div_factor=10.0)
      >>> [round(float(schedule(count)), 3) for count in (0, 3, 10)]
      [0.1, 1.0, 0.0]
    """
    _check_positive("transition_steps", transition_steps)
    knots = [
        (_whole(pct_start * transition_steps), div_factor),
        (_whole(transition_steps), 1.0 / (div_factor * final_div_factor)),
    ]
    if all(_is_number(end) for end, _ in knots):
        # As in optax: at a `pct_start` of 1 or above there is no rise to the peak.
        knots = sorted(dict(knots).items())

    def schedule(count: Any) -> jax.Array:
        begin, low = 0, peak_value / div_factor
        low = jnp.where(jnp.asarray(transition_steps) > 0, low, jnp.nan)
        value = low
        for end, scale in knots:
            high = low * scale
            fraction = (count - begin) / jnp.maximum(end - begin, 1)
            wave = (jnp.cos(jnp.pi * fraction) + 1) / 2
            value = jnp.where(count < begin, value, high + (low - high) * wave)
            value = jnp.where(count < end, value, high)
            begin, low = end, high
        return value

    return schedule


def _is_number(value: Any) -> bool:
    return not isinstance(value, jax.Array)


def _as_float(value: Any) -> Any:
    # By arithmetic, so that a traced number goes the way of a Python one.
    return value * 1.0


def _whole(steps: Any) -> Any:
    return float(int(steps)) if _is_number(steps) else jnp.floor(_as_float(steps))


def _check_positive(name: str, value: Any) -> None:
    if _is_number(value) and not value > 0:
        raise ValueError(f"{name} is {value}; it must be above 0")
