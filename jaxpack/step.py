"""One trial: initialisation, a training step, an evaluation.

Plain pure functions of one lane. The engines put them into programs, and nothing is
jitted here.

Random streams. A trial's key is `fold_in(key(seed), trial_id)`, threefry whatever
the default implementation is; an hparam `seed` takes the place of the trial id. From
it come

- `fold_in(key, 0)`: the model's initialisation. A model of `flax.nnx` is built from
  `nnx.Rngs` of it and draws its dropout masks from its own streams, whose counts are
  part of the trial's state;
- `fold_in(fold_in(key, 1), s)`: the dropout masks of step `s`;
- `fold_in(fold_in(key, 2), s)`: the task's augmentation in step `s`.

The order of the data depends on the sweep's seed and the epoch alone (see
`jaxpack.data.deck`). So nothing depends on the lane, on its neighbours or on time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpack import threefry
from jaxpack.rewrite import replace_operations
from jaxpack.task import Functions, mean_parts, per_example, weighted_mean
from jaxpack.types import HParams, LaneState, PyTree, TracedChoice

PRNG = "threefry2x32"
BATCH_SIZE = "batch_size"
"""The hparam that says how many examples a trial's batches have."""


class LaneHParam(NamedTuple):
    """How an hparam that differs between lanes enters a program.

    Attributes:
      name: Its name.
      dtype: "float32", "int32" or "bool".
      options: The strings it chooses between; its value is then their index.
    """

    name: str
    dtype: str
    options: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """What trials must have in common to share one XLA program: their pack key.

    Programs are equal when they compute the same, which the fingerprint of the
    traced computation tells; the functions and static hparams that led to it do not
    count, so a task built anew shares the programs of an equal one.

    Attributes:
      fingerprint: Hash of the traced initialisation, step and evaluation.
      lane_hparams: The hparams given as arguments, one value a lane.
      batch_size: `B`. Where `batch_size` is among the per-lane hparams, the largest:
        a lane's smaller batches are padded to it, and masked.
      num_examples: Training examples in an epoch.
      eval_batch_size: Examples evaluated at once.
      mixes_examples: Whether outputs depend on the other examples of a batch in a
        way that no mask prevents. The short last batch of an epoch is then computed
        at its true size.
      functions: The task's pure functions.
      static: The hparams that fix the program.
    """

    fingerprint: str
    lane_hparams: tuple[LaneHParam, ...]
    batch_size: int
    num_examples: int
    eval_batch_size: int
    mixes_examples: bool
    functions: Functions = dataclasses.field(compare=False, repr=False)
    static: tuple[tuple[str, Any], ...] = dataclasses.field(compare=False)

    @property
    def padded(self) -> bool:
        """Whether its lanes have batches of sizes of their own."""
        return any(lane.name == BATCH_SIZE for lane in self.lane_hparams)

    def steps_per_epoch(self, lane: Mapping[str, Any]) -> Any:
        """Steps in an epoch; the last one may be of fewer examples.

        Args:
          lane: The per-lane hparams, each `[]` or `[N]`.
        """
        size = lane[BATCH_SIZE] if self.padded else self.batch_size
        return -(-self.num_examples // size)


def lane_values(
    lane_hparams: tuple[LaneHParam, ...], hparams: Mapping[str, Any]
) -> dict[str, np.generic]:
    """A trial's per-lane hparams as numpy scalars, ready for the device.

    Examples:
      >>> lane_values((LaneHParam("lr", "float32"),), {"lr": 0.5, "width": 8})
      {'lr': np.float32(0.5)}
      >>> act = LaneHParam("act", "int32", ("relu", "tanh"))
      >>> lane_values((act,), {"act": "tanh"})
      {'act': np.int32(1)}
    """
    values = {}
    for name, dtype, options in lane_hparams:
        value = hparams[name]
        values[name] = np.dtype(dtype).type(options.index(value) if options else value)
    return values


def lane_avals(
    lane_hparams: tuple[LaneHParam, ...], num_lanes: int | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of `lane_values`, with a lane axis if `num_lanes` is given.

    The scalars are weakly typed, as Python numbers are: a float32 learning rate
    would turn a bfloat16 model into a float32 one.
    """
    shape = () if num_lanes is None else (num_lanes,)
    return {
        name: jax.ShapeDtypeStruct(
            shape, np.dtype(dtype), weak_type=dtype != "bool" and options is None
        )
        for name, dtype, options in lane_hparams
    }


def bind(program: Program, lane: Mapping[str, jax.Array]) -> HParams:
    """The hparams that the user's functions see inside the program.

    Args:
      program: The program.
      lane: The per-lane hparams of one trial, each `[]`.
    """
    spe = program.steps_per_epoch(lane)
    return bind_hparams(program.lane_hparams, program.static, lane, spe)


def bind_hparams(
    lane_hparams: tuple[LaneHParam, ...],
    static: tuple[tuple[str, Any], ...],
    lane: Mapping[str, jax.Array],
    steps_per_epoch: Any,
    inactive: Mapping[str, str] | None = None,
) -> HParams:
    """As `bind`, before there is a program; for `inactive` see `HParams.inactive_`."""
    values = dict(static)
    for name, _, options in lane_hparams:
        value = lane[name]
        values[name] = TracedChoice(name, value, options) if options else value
    total_steps = values.pop("total_steps")
    return HParams(
        values,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        inactive=inactive,
    )


def trial_key(seed: Any, trial: Any) -> jax.Array:
    """A trial's random key, from the sweep's seed and its number (`[]` uint32)."""
    return jax.random.fold_in(jax.random.key(seed, impl=PRNG), trial)


def init_key(key: jax.Array) -> jax.Array:
    """The key that a trial's model is initialised with."""
    return jax.random.fold_in(key, 0)


def dropout_key(key: jax.Array, step: Any) -> jax.Array:
    """The key of a trial's dropout masks in one step."""
    return threefry.fold_in(threefry.fold_in(key, 1), step)


def augment_key(key: jax.Array, step: Any) -> jax.Array:
    """The key of a trial's augmentation in one step."""
    return threefry.fold_in(threefry.fold_in(key, 2), step)


def init(
    functions: Functions, hp: HParams, seed: Any, trial: Any, x: PyTree
) -> LaneState:
    """A trial's state before its first step.

    Args:
      functions: The task's functions.
      hp: Its hparams, as bound inside the program.
      seed: `[]` uint32, the sweep's seed.
      trial: `[]` uint32, the trial's number or its own seed.
      x: Inputs of at least one example, leaves `[B, ...]`.
    """
    key = trial_key(seed, trial)
    variables = functions.init(init_key(key), hp, x)
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise ValueError(
            f"init returned a {type(variables).__name__} without 'params'; it must "
            "return a dict of variables, the weights under 'params'"
        )
    variables = dict(variables)
    params = variables.pop("params")
    state = LaneState(
        params=params,
        model_state=variables,
        opt_state=_transformation(functions, hp).init(params),
        key=jax.random.key_data(key),
        step=jnp.int32(0),
        target_step=jnp.int32(0),
        first_bad_step=jnp.int32(-1),
        epoch_loss=jnp.float32(0),
        epoch_weight=jnp.float32(0),
    )
    return _like(state, state)


def update(
    functions: Functions,
    hp: HParams,
    state: LaneState,
    x: PyTree,
    y: PyTree,
    mask: jax.Array | None,
) -> tuple[LaneState, tuple[jax.Array, jax.Array]]:
    """One step of gradient descent on one batch.

    Args:
      functions: The task's functions.
      hp: The trial's hparams, as bound inside the program.
      state: The trial's state.
      x: Inputs, leaves `[B, ...]`.
      y: Labels, leaves `[B, ...]`.
      mask: `[B]` bool, false on padding, or None without padding.

    Returns:
      The state after the step, and the batch's loss as numerator and denominator,
      each `[]` float32.
    """
    trial = jax.random.wrap_key_data(jnp.asarray(state.key), impl=PRNG)
    key = dropout_key(trial, state.step)
    x = augmented(functions, hp, trial, state.step, x)

    def loss_of(params: PyTree) -> tuple[jax.Array, tuple[PyTree, PyTree]]:
        variables = {"params": params, **state.model_state}
        outputs, model_state = _apply(functions, variables, hp, x, True, key, mask)
        batch = jax.tree.leaves(x)[0].shape[0]
        value, weight = per_example(functions.loss, "loss", outputs, y, hp, batch)
        parts = mean_parts(value, weight, mask)
        return weighted_mean(*parts), (model_state, parts)

    loss_of = replace_operations(loss_of)
    (loss, (model_state, parts)), grads = jax.value_and_grad(loss_of, has_aux=True)(
        state.params
    )
    transformation = optax.with_extra_args_support(_transformation(functions, hp))
    updates, opt_state = transformation.update(
        grads, state.opt_state, state.params, value=loss
    )
    bad = ~jnp.isfinite(loss) & (state.first_bad_step < 0)
    new = state._replace(
        params=optax.apply_updates(state.params, updates),
        model_state=model_state,
        opt_state=opt_state,
        step=state.step + 1,
        first_bad_step=jnp.where(bad, state.step, state.first_bad_step),
    )
    return _like(new, state), jax.tree.map(lambda part: part.astype(jnp.float32), parts)


def augmented(
    functions: Functions, hp: HParams, key: jax.Array, step: Any, x: PyTree
) -> PyTree:
    """The inputs of a training batch as the task's augmentation leaves them.

    Args:
      functions: The task's functions.
      hp: The trial's hparams, as bound inside the program.
      key: The trial's key.
      step: `[]` int32, the step.
      x: Inputs, leaves `[B, ...]`.

    Raises:
      ValueError: If the augmentation changes their structure, shapes or dtypes.
    """
    if functions.augment is None:
        return x
    new = functions.augment(augment_key(key, step), x, hp)
    before, after = (
        jax.tree.map(lambda a: f"{jnp.result_type(a)}{list(jnp.shape(a))}", tree)
        for tree in (x, new)
    )
    if before != after:
        raise ValueError(
            f"augment turned inputs of {before} into {after}; it must keep their "
            "structure, shapes and dtypes"
        )
    return new


def train_step(
    program: Program,
    state: LaneState,
    lane: Mapping[str, jax.Array],
    data: tuple[PyTree, PyTree],
    deck: jax.Array,
    first_epoch: Any,
) -> LaneState:
    """One training step of one trial, its batch taken from the data by the deck.

    Args:
      program: The program.
      state: The trial's state.
      lane: Its per-lane hparams, each `[]`.
      data: All training inputs and labels, leaves `[num_examples, ...]`.
      deck: `[E, num_examples]` int32, the order of the examples in each epoch.
      first_epoch: `[]` int32, the epoch in the deck's first row.
    """
    hp = bind(program, lane)
    size, count = program.batch_size, program.num_examples
    own = lane[BATCH_SIZE] if program.padded else size
    epoch, index = jnp.divmod(state.step, program.steps_per_epoch(lane))

    def step_on(size: int, *, masked: bool) -> LaneState:
        places = jnp.arange(size)
        positions = index * own + places
        # Clipped, so that padding repeats a real example and stays finite.
        rows = deck[epoch - first_epoch, jnp.minimum(positions, count - 1)]
        x, y = jax.tree.map(lambda leaf: leaf[rows], data)
        mask = positions < count if masked else None
        if mask is not None and program.padded:
            mask &= places < own
        new, (loss, weight) = update(program.functions, hp, state, x, y, mask)
        same_epoch = index != 0
        return new._replace(
            epoch_loss=jnp.where(same_epoch, state.epoch_loss, 0) + loss,
            epoch_weight=jnp.where(same_epoch, state.epoch_weight, 0) + weight,
        )

    short = count % size
    if short and program.mixes_examples:
        return jax.lax.cond(
            index == program.steps_per_epoch(lane) - 1,
            lambda: step_on(short, masked=False),
            lambda: step_on(size, masked=False),
        )
    return step_on(size, masked=bool(short) or program.padded)


def active(state: LaneState, first_epoch: Any, epochs: int, spe: Any) -> jax.Array:
    """Whether a lane trains on: short of its target, finite, and within the deck.

    Args:
      state: The lane's state.
      first_epoch: `[]` int32, the epoch in the deck's first row.
      epochs: Rows of the deck.
      spe: Steps per epoch, an int or `[]` int32.

    Returns:
      `[]` bool.
    """
    epoch = state.step // spe - first_epoch
    inside = (epoch >= 0) & (epoch < epochs)
    return (state.step < state.target_step) & (state.first_bad_step < 0) & inside


def metric_parts(
    functions: Functions,
    hp: HParams,
    params: PyTree,
    model_state: PyTree,
    x: PyTree,
    y: PyTree,
    mask: jax.Array | None,
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Numerator and denominator of the loss and each metric over one batch.

    Args:
      functions: The task's functions.
      hp: The trial's hparams, as bound inside the program.
      params: The weights.
      model_state: The model's other variables.
      x: Inputs, leaves `[B, ...]`.
      y: Labels, leaves `[B, ...]`.
      mask: `[B]` bool, false on padding, or None without padding.
    """

    def parts_of(params: PyTree) -> dict[str, tuple[jax.Array, jax.Array]]:
        variables = {"params": params, **model_state}
        key = jax.random.key(0, impl=PRNG)
        outputs, _ = _apply(functions, variables, hp, x, False, key, mask)
        batch = jax.tree.leaves(x)[0].shape[0]
        return {
            name: mean_parts(*per_example(function, name, outputs, y, hp, batch), mask)
            for name, function in (("loss", functions.loss), *functions.metrics)
        }

    return replace_operations(parts_of)(params)


def outputs(
    functions: Functions, hp: HParams, variables: PyTree, x: PyTree, mask: jax.Array
) -> PyTree:
    """What the model returns in an evaluation.

    Args:
      functions: The task's functions.
      hp: The trial's hparams.
      variables: The weights under "params", beside the model's other variables.
      x: Inputs, leaves `[B, ...]`.
      mask: `[B]` bool, false on padding.
    """

    def outputs_of(variables: PyTree) -> PyTree:
        key = jax.random.key(0, impl=PRNG)
        return _apply(functions, variables, hp, x, False, key, mask)[0]

    return replace_operations(outputs_of)(variables)


def evaluate(
    program: Program,
    params: PyTree,
    model_state: PyTree,
    lane: Mapping[str, jax.Array],
    data: tuple[PyTree, PyTree],
    first: Any,
    count: Any,
) -> dict[str, jax.Array]:
    """The loss and every metric of one trial, each example counted exactly once.

    Args:
      program: The program.
      params: The weights.
      model_state: The model's other variables.
      lane: The trial's per-lane hparams, each `[]`.
      data: Inputs and labels of every split but training, one after the other, so
        that one program serves them all.
      first: `[]` int32, where the split starts.
      count: `[]` int32, how many examples it has.

    Returns:
      The weighted mean of each, `[]` float32.
    """
    hp = bind(program, lane)
    size = program.eval_batch_size

    def parts(index: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
        positions = index * size + jnp.arange(size)
        rows = first + jnp.minimum(positions, count - 1)
        x, y = jax.tree.map(lambda leaf: leaf[rows], data)
        mask = positions < count
        return metric_parts(program.functions, hp, params, model_state, x, y, mask)

    def body(index: Any, sums: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, sums, parts(index))

    sums = jax.tree.map(
        lambda part: jnp.zeros(part.shape, part.dtype), jax.eval_shape(parts, 0)
    )
    sums = jax.lax.fori_loop(0, (count + size - 1) // size, body, sums)
    # NaN where nothing has any weight: no score is better than a wrong one.
    return {name: part[0] / part[1] for name, part in sums.items()}


def _apply(
    functions: Functions,
    variables: PyTree,
    hp: HParams,
    x: PyTree,
    train: bool,
    key: jax.Array,
    mask: jax.Array | None,
) -> tuple[PyTree, PyTree]:
    result = functions.apply(variables, hp, x, train=train, key=key, mask=mask)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"apply returned a {type(result).__name__}; it must return the outputs "
            "and a dict of the variables other than the params"
        )
    return result


def _transformation(
    functions: Functions, hp: HParams
) -> optax.GradientTransformation | optax.GradientTransformationExtraArgs:
    transformation = functions.optimizer(hp)
    if isinstance(transformation, optax.MultiSteps):
        transformation = transformation.gradient_transformation()
    if not isinstance(transformation, optax.GradientTransformation):
        raise ValueError(
            f"optimizer(hp) returned {transformation!r}; it must return an "
            "optax.GradientTransformation"
        )
    return transformation


def _like(new: LaneState, old: LaneState) -> LaneState:
    """`new`, with strong dtypes, after checking that a step keeps the state's form.

    Raises:
      ValueError: If a leaf of the state changed its shape or dtype.
    """
    for field, a, b in zip(new._fields, new, old, strict=True):
        if jax.tree.structure(a) != jax.tree.structure(b):
            raise ValueError(
                f"a training step changed the structure of the trial's {field} from "
                f"{_short(jax.tree.structure(b))} to {_short(jax.tree.structure(a))}; "
                "what a model sows, for one, is not kept between steps"
            )

    def same(path: Any, a: Any, b: Any) -> jax.Array:
        a, b = jnp.asarray(a), jnp.asarray(b)
        leaf = jax.tree_util.keystr(path)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"the state's {leaf} is a typed random key; keep its data instead, "
                "by jax.random.key_data and jax.random.wrap_key_data"
            )
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"a training step changed the state's {leaf} "
                f"from {b.dtype}{list(b.shape)} to {a.dtype}{list(a.shape)}"
            )
        return jax.lax.convert_element_type(a, a.dtype)

    return jax.tree_util.tree_map_with_path(same, new, old)


def _short(structure: Any) -> str:
    text = str(structure)
    return text if len(text) <= 200 else text[:200] + "..."
