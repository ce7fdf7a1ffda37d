"""What the user defines, turned into pure functions of one trial."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpack import checks, nn, nnx
from jaxpack.data import Dataset
from jaxpack.metrics import accuracy
from jaxpack.types import HParams, PyTree

# fmt: off
RESERVED = frozenset({
    "loss", "train_loss", "epochs", "steps", "bracket", "rung", "score", "status",
    "seconds", "reason", "trial_id", "hparams", "first_bad_step", "not_finite", "crc",
})
# fmt: on
"""What the rows of a trial's history and table hold besides its metrics."""

PerExample = Callable[..., Any]
"""A loss or metric: `f(outputs, labels)` or `f(outputs, labels, hp)`."""


Augment = Callable[[jax.Array, PyTree, HParams], PyTree]
"""Changes the inputs of a training batch: `augment(key, x, hp)`, `[B, ...]` each."""


class Functions(NamedTuple):
    """The pure functions that one trial is made of.

    Attributes:
      init: `init(key, hp, x) -> variables`, a dict with at least `"params"`.
      apply: `apply(variables, hp, x, *, train, key, mask) -> (outputs, new_state)`,
        where `new_state` holds the variables other than the params. `mask` is `[B]`
        bool, false on padding, or None where there is no padding.
      optimizer: `optimizer(hp)`, an optax transformation.
      loss: `loss(outputs, labels, hp)`, `[B]` or a pair of value and weight, each
        `[B]`.
      metrics: Name and function of each metric, with the loss's signature.
      augment: `augment(key, x, hp) -> x`, or None.
    """

    init: Callable[..., PyTree]
    apply: Callable[..., tuple[PyTree, PyTree]]
    optimizer: Callable[[HParams], optax.GradientTransformation]
    loss: PerExample
    metrics: tuple[tuple[str, PerExample], ...]
    augment: Augment | None = None


class Task:
    """A model, an optimizer, a loss and a dataset: what every trial trains.

    Args:
      model: `model(hp) -> flax.linen.Module`. The module is called as `module(x)`,
        with `train=`, `training=` or `deterministic=` (inverted) where its
        `__call__` has that parameter, and with `mask=` (`[B]` bool, false on
        padding, None without padding) where it has that one.
      optimizer: `optimizer(hp) -> optax.GradientTransformation`.
      dataset: The data.
      loss: `loss(outputs, labels)`: one value per example, `[B]`, or
        `(value, weight)`, each `[B]`; the loss of a batch is
        `sum(value * weight) / sum(weight)`. With a third positional parameter
        without a default, or a parameter named `hp`, it is given the hparams as
        well, so that a label smoothing, say, can differ between lanes. The same
        function is the validation loss: of trials whose losses differ, compare
        another metric.
      metrics: Name -> function with the loss's signature. By default accuracy
        where y is an array of integers, else none. `"loss"` is always there.
      augment: `augment(key, x, hp)`, which changes the inputs of a training batch at
        random, inside the program and for every lane in its own way: `x` has leaves
        `[B, ...]` and keeps its shapes and dtypes. The key is new at every step and
        for every trial. Evaluations see the inputs as they are.
      batch_size: Used unless a trial's hparams name one.
      eval_batch_size: Examples evaluated at once; about 512 if None.

    Raises:
      ValueError: If an argument is not what it should be.

    Examples:
      >>> import jaxpack as jp, optax
      >>> task = jp.Task(
      ...     model=lambda hp: jp.models.MLP(width=hp.width),
      ...     optimizer=lambda hp: optax.adam(hp.learning_rate),
      ...     dataset=jp.data.load("digits"),
      ... )
      >>> task.default_metric
      'accuracy'
    """

    def __init__(
        self,
        model: Callable[[HParams], linen.Module],
        optimizer: Callable[[HParams], optax.GradientTransformation],
        dataset: Dataset,
        *,
        loss: PerExample = optax.softmax_cross_entropy_with_integer_labels,
        metrics: Mapping[str, PerExample] | None = None,
        augment: Augment | None = None,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
    ):
        if isinstance(model, linen.Module) or (
            inspect.isclass(model) and issubclass(model, linen.Module)
        ):
            raise ValueError(
                f"model is {model!r}; it must be a function of the hparams that "
                "returns a module, such as lambda hp: MLP(hp.width)"
            )
        init, apply = _from_linen(checks.function("model", model))
        self._setup(
            Functions(init, apply, optimizer, loss, (), augment),
            dataset,
            metrics,
            batch_size,
            eval_batch_size,
        )

    @classmethod
    def from_functions(
        cls,
        init: Callable[..., PyTree],
        apply: Callable[..., tuple[PyTree, PyTree]],
        optimizer: Callable[[HParams], optax.GradientTransformation],
        dataset: Dataset,
        *,
        loss: PerExample = optax.softmax_cross_entropy_with_integer_labels,
        metrics: Mapping[str, PerExample] | None = None,
        augment: Augment | None = None,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
    ) -> Task:
        """The same for a model that is not a linen module.

        Args:
          init: `init(key, hp, x) -> variables`, a dict with `"params"` and, where
            the model has other variables, more entries. `x` is one batch.
          apply: `apply(variables, hp, x, *, train, key, mask)`, which returns the
            outputs and a dict of the variables other than the params.
          optimizer: As for `Task`, like all that follows.
          dataset: The data.
          loss: The loss.
          metrics: The metrics.
          augment: The augmentation.
          batch_size: Used unless a trial's hparams name one.
          eval_batch_size: Examples evaluated at once.
        """
        task = cls.__new__(cls)
        init, apply = checks.function("init", init), checks.function("apply", apply)
        task._setup(
            Functions(init, apply, optimizer, loss, (), augment),
            dataset,
            metrics,
            batch_size,
            eval_batch_size,
        )
        return task

    @classmethod
    def from_nnx(
        cls,
        model: Callable[[HParams, Any], Any],
        optimizer: Callable[[HParams], optax.GradientTransformation],
        dataset: Dataset,
        *,
        loss: PerExample = optax.softmax_cross_entropy_with_integer_labels,
        metrics: Mapping[str, PerExample] | None = None,
        augment: Augment | None = None,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
    ) -> Task:
        """The same for a model of `flax.nnx`.

        Args:
          model: `model(hp, rngs) -> flax.nnx.Module`, which builds the module as
            anywhere else, from `nnx.Rngs(key)`. It is called as `module(x)` after
            `module.train()` or `module.eval()`, with the further arguments that a
            linen module may have. It is built in every trace and then given the
            trial's variables, so what is random has to be an `nnx.Variable`.
          optimizer: As for `Task`, like all that follows; it sees the `nnx.Param`s.
          dataset: The data.
          loss: The loss.
          metrics: The metrics.
          augment: The augmentation.
          batch_size: Used unless a trial's hparams name one.
          eval_batch_size: Examples evaluated at once.

        Examples:
          >>> import jaxpack as jp, optax
          >>> from flax import nnx
          >>> def model(hp, rngs):
          ...     return nnx.Sequential(
          ...         lambda x: x.reshape(len(x), -1),
          ...         nnx.Linear(64, hp.width, rngs=rngs),
          ...         nnx.relu,
          ...         nnx.Dropout(hp.dropout, rngs=rngs),
          ...         nnx.Linear(hp.width, 10, rngs=rngs),
          ...     )
          >>> task = jp.Task.from_nnx(
          ...     model, lambda hp: optax.adam(1e-3), jp.data.load("digits")
          ... )
          >>> (result,) = jp.train(task, [{"width": 16, "dropout": 0.2}], epochs=1)
          >>> sorted(result.params["layers"])
          ['1', '4']
        """
        init, apply = nnx.pure(checks.function("model", model))
        return cls.from_functions(
            init,
            apply,
            optimizer,
            dataset,
            loss=loss,
            metrics=metrics,
            augment=augment,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
        )

    def _setup(
        self,
        given: Functions,
        dataset: Dataset,
        metrics: Mapping[str, PerExample] | None,
        batch_size: int,
        eval_batch_size: int | None,
    ) -> None:
        if not isinstance(dataset, Dataset):
            raise ValueError(
                f"dataset is a {type(dataset).__name__}; make one with "
                "jaxpack.data.load or jaxpack.data.Dataset.from_arrays"
            )
        labels = _class_labels(dataset)
        if metrics is None:
            metrics = {} if labels is None else {"accuracy": accuracy}
        if not isinstance(metrics, Mapping):
            raise ValueError(
                f"metrics is {metrics!r}; it must map names to functions, such as "
                '{"accuracy": jaxpack.metrics.accuracy}'
            )
        for name in metrics:
            if not isinstance(name, str) or not name:
                raise ValueError(f"metrics holds {name!r}; a metric's name is a text")
            if name in RESERVED:
                raise ValueError(
                    f"metrics holds {name!r}, which names something else in results; "
                    "give the metric another name"
                )
        if given.augment is not None:
            checks.function("augment", given.augment)
        self.functions = given._replace(
            optimizer=checks.function("optimizer", given.optimizer),
            loss=_for_classes(
                _given_hparams("loss", given.loss), given.loss, dataset, labels
            ),
            metrics=tuple(
                (name, _given_hparams(f"metrics[{name!r}]", metric))
                for name, metric in metrics.items()
            ),
        )
        self.dataset = dataset
        self.batch_size = check_batch_size(batch_size, dataset.num_train)
        num_validation = dataset.num_validation
        if eval_batch_size is None:
            batches = -(-num_validation // 512)
            eval_batch_size = -(-num_validation // batches)
        self.eval_batch_size = min(
            check_batch_size(eval_batch_size, None, "eval_batch_size"), num_validation
        )

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics that can be chosen: the task's own, then the loss."""
        return (*(name for name, _ in self.functions.metrics), "loss")

    @property
    def default_metric(self) -> str:
        """The task's first metric."""
        return self.metric_names[0]


def check_batch_size(
    value: Any, num_examples: int | None, name: str = "batch_size"
) -> int:
    """Returns a valid batch size or says what is wrong with it.

    Examples:
      >>> check_batch_size(64, 50)
      Traceback (most recent call last):
      ValueError: batch_size is 64, more than the 50 training examples
    """
    size = checks.whole(name, value)
    if num_examples is not None and size > num_examples:
        raise ValueError(
            f"{name} is {size}, more than the {num_examples} training examples"
        )
    return size


def per_example(
    function: PerExample,
    name: str,
    outputs: PyTree,
    labels: PyTree,
    hp: HParams,
    batch: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Calls a loss or metric and checks that it gives one value per example.

    Args:
      function: A loss or metric of a task's `Functions`.
      name: What to call it in errors.
      outputs: The model's outputs.
      labels: Labels, leaves `[B, ...]`.
      hp: The trial's hparams, as bound inside the program.
      batch: `B`.

    Returns:
      The values, `[B]`, and their weights, `[B]` or None.

    Raises:
      ValueError: If the shapes are others.
    """
    result = function(outputs, labels, hp)
    value, weight = result if isinstance(result, tuple) else (result, None)
    for what, array in (("value", value), ("weight", weight)):
        if array is not None and jnp.shape(array) != (batch,):
            shape = jnp.shape(array)
            hint = _shape_hint(shape, outputs, labels, batch)
            raise ValueError(
                f"{name} returned a {what} of shape {shape}; it must return one "
                f"{what} per example, ({batch},) here{hint}"
            )
    return value, weight


def _shape_hint(
    shape: tuple[int, ...], outputs: PyTree, labels: PyTree, batch: int
) -> str:
    """What has most likely given a value of that shape, or nothing."""
    if shape == ():
        return " (drop the mean)"
    if shape == (batch, batch):
        pair = outputs, labels
        if all(isinstance(array, jax.Array) for array in pair):
            return (
                f" (outputs of shape {outputs.shape} met labels of shape "
                f"{labels.shape}: give both the same)"
            )
    if shape[:1] == (batch,):
        return " (take the mean over the other axes)"
    return ""


def mean_parts(
    value: jax.Array, weight: jax.Array | None, mask: jax.Array | np.ndarray | None
) -> tuple[jax.Array, jax.Array]:
    """The numerator and denominator of a batch's weighted mean.

    Args:
      value: `[B]` values.
      weight: `[B]` weights, or None for ones.
      mask: `[B]` bool, false on padding, or None without padding.

    Returns:
      `[]` sum(value * weight) and `[]` sum(weight), over the examples in the mask.
    """
    value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
    if weight is None:
        weight = jnp.ones_like(value)
    else:
        weight = weight.astype(value.dtype)
        value = value * weight
    if mask is not None:
        # A selection, not a product: padding cannot bring in NaN or infinity.
        value = jnp.where(mask, value, 0)
        weight = jnp.where(mask, weight, 0)
    return jnp.sum(value), jnp.sum(weight)


def weighted_mean(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """Their quotient, or 0 where nothing has any weight."""
    return numerator / jnp.where(denominator == 0, 1, denominator)


def _given_hparams(name: str, function: Any) -> PerExample:
    """Returns `f(outputs, labels, hp)`, which passes on the hparams where wanted.

    A third parameter with a default is an option of the function's own, as many
    losses of optax have, and not the hparams.
    """
    checks.function(name, function)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # Not every function of C code has one.
        parameters = {}
    positional = [
        p
        for p in parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if "hp" in [p.name for p in positional[:2]]:
        raise ValueError(
            f"{name} takes {', '.join(parameters)}; its parameters must come in the "
            "order (outputs, labels, hp)"
        )
    if len(positional) > 2 and positional[2].default is inspect.Parameter.empty:
        return function
    if "hp" in parameters:
        return lambda outputs, labels, hp: function(outputs, labels, hp=hp)
    return lambda outputs, labels, hp: function(outputs, labels)


def _class_labels(dataset: Dataset) -> list[np.ndarray] | None:
    """The y of every split, or None where they are no integers of one array."""
    splits = (dataset.train, dataset.validation, dataset.test)
    labels = [split[1] for split in splits if split is not None]
    whole = all(isinstance(y, np.ndarray) and y.dtype.kind == "i" for y in labels)
    return labels if whole else None


def _for_classes(
    loss: PerExample, given: Any, dataset: Dataset, labels: list[np.ndarray] | None
) -> PerExample:
    """The default loss with a check of the model's outputs; any other as it is.

    For a label that has no output it gives NaN, and every trial would fail of that.

    Raises:
      ValueError: If the default loss cannot be meant: the labels are no classes.
    """
    if given is not optax.softmax_cross_entropy_with_integer_labels:
        return loss
    if labels is None:
        y = dataset.train[1]
        what = y.dtype if isinstance(y, np.ndarray) else f"a {type(y).__name__}"
        raise ValueError(
            "loss is the default, softmax cross-entropy of integer labels, but y is "
            f"{what}; give classes as integers from 0, or another loss, such as "
            "loss=jaxpack.metrics.squared_error for a regression"
        )
    highest = max(int(y.max()) for y in labels)

    def checked(outputs: Any, targets: Any, hp: HParams) -> Any:
        shape = jnp.shape(outputs) if isinstance(outputs, jax.Array) else ()
        if shape and shape[:-1] != targets.shape:
            raise ValueError(
                f"the model's outputs have shape {shape} and the labels "
                f"{targets.shape}; the default loss needs [B, ..., C] for labels "
                "[B, ...] (images go into dense layers as x.reshape(len(x), -1))"
            )
        if shape and shape[-1] <= highest:
            raise ValueError(
                f"the model gives {shape[-1]} outputs for each label, but the "
                f"labels go up to {highest}: it needs {highest + 1}, one a class"
            )
        return loss(outputs, targets, hp)

    return checked


def _from_linen(
    model: Callable[[HParams], linen.Module],
) -> tuple[Callable[..., PyTree], Callable[..., tuple[PyTree, PyTree]]]:
    def build(hp: HParams) -> tuple[linen.Module, nn.CallSignature]:
        module = model(hp)
        if not isinstance(module, linen.Module):
            got = type(module).__name__ if not inspect.isclass(module) else module
            raise ValueError(
                f"model(hp) returned {got}; it must return a flax.linen.Module "
                "(for flax.nnx there is jaxpack.Task.from_nnx, for anything else "
                "jaxpack.Task.from_functions)"
            )
        return module, nn.call_signature(module)

    def init(key: jax.Array, hp: HParams, x: PyTree) -> PyTree:
        module, signature = build(hp)
        with nn.intercept():
            variables = dict(module.init(key, x, **signature.arguments(False, None)))
        variables.pop("intermediates", None)
        return {"params": {}} | variables

    def apply(
        variables: PyTree,
        hp: HParams,
        x: PyTree,
        *,
        train: bool,
        key: jax.Array,
        mask: jax.Array | None,
    ) -> tuple[PyTree, PyTree]:
        module, signature = build(hp)
        state = {name: v for name, v in variables.items() if name != "params"}
        arguments = signature.arguments(train, mask)
        with nn.intercept(mask, evaluates=not train):
            # Streams of any name but "dropout" draw from the "params" key.
            rngs = {"dropout": key, "params": jax.random.fold_in(key, 1)}
            if not train:
                return module.apply(variables, x, rngs=rngs, **arguments), state
            outputs, new_state = module.apply(
                variables, x, rngs=rngs, mutable=sorted(state), **arguments
            )
            return outputs, dict(new_state)

    return init, apply
