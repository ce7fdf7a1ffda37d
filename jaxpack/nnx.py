"""Models of `flax.nnx` as pure functions of one trial.

The model is built anew in every trace, from the trial's hparams, and the trial's
variables are put into it: so hparams that differ between lanes reach every layer, and
no variable of one trace is seen in another.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax.interpreters.partial_eval import dce_jaxpr

from jaxpack import nn
from jaxpack.types import HParams, PyTree

_STATE = "state"
_mask: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar(
    "mask", default=None
)


def pure(
    model: Callable[[HParams, nnx.Rngs], nnx.Module],
) -> tuple[Callable[..., PyTree], Callable[..., tuple[PyTree, PyTree]]]:
    """The `init` and `apply` of a task, from a function that builds a module.

    Variables are nested dicts of arrays, by the names of attributes and by the places
    in lists: `nnx.Param`s under `"params"`, every other variable, counts and keys of
    random streams among them, under `"state"`.

    Args:
      model: `model(hp, rngs)`, which builds the module from `nnx.Rngs(key)`.
    """

    def build(hp: HParams, key: jax.Array) -> nnx.Module:
        module = model(hp, nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise ValueError(
                f"model(hp, rngs) returned a {type(module).__name__}; it must return "
                "a flax.nnx.Module (for flax.linen there is jaxpack.Task)"
            )
        for _, part in nnx.iter_graph(module):
            if type(part) in _OURS:
                object.__setattr__(part, "__class__", _OURS[type(part)])
        return module

    def init(key: jax.Array, hp: HParams, x: PyTree) -> PyTree:
        return _variables(build(hp, key))

    def apply(
        variables: PyTree,
        hp: HParams,
        x: PyTree,
        *,
        train: bool,
        key: jax.Array,
        mask: jax.Array | None,
    ) -> tuple[PyTree, PyTree]:
        def run(variables: PyTree, x: PyTree, mask: Any) -> tuple[PyTree, PyTree]:
            # Any key: what it initialises is replaced.
            module = build(hp, key)
            params, state = _states(module)
            _put(module, params, variables["params"])
            _put(module, state, variables[_STATE])
            (module.train if train else module.eval)()
            with _masking(mask):
                arguments = nn.call_signature(module).arguments(train, mask)
                outputs = module(x, **arguments)
            return outputs, _variables(module)[_STATE] if train else {}

        outputs, state = _pruned(run)(variables, x, mask)
        return outputs, {_STATE: state if train else variables[_STATE]}

    return init, apply


def _pruned(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The same function without what does not reach its results.

    XLA would drop the initialisation of a model, too, but only after every program
    that holds it has been traced, differentiated and lowered with it.
    """

    def pruned(*args: PyTree) -> PyTree:
        closed, out = jax.make_jaxpr(fun, return_shape=True)(*args)
        wanted = [True] * len(closed.jaxpr.outvars)
        jaxpr, _ = dce_jaxpr(closed.jaxpr, wanted, instantiate=True)
        results = jax.core.eval_jaxpr(jaxpr, closed.consts, *jax.tree.leaves(args))
        types, structure = jax.tree.flatten(out)
        arrays = [
            jnp.asarray(result, aval.dtype)
            for result, aval in zip(results, types, strict=True)
        ]
        return jax.tree.unflatten(structure, arrays)

    return pruned


def _variables(module: nnx.Module) -> dict[str, PyTree]:
    params, state = map(_arrays, _states(module))
    return {"params": params, _STATE: state}


def _states(module: nnx.Module) -> tuple[nnx.State, nnx.State]:
    """The weights, and the other variables but for what the model sowed."""
    others = nnx.All(nnx.Variable, nnx.Not(nnx.Param), nnx.Not(nnx.Intermediate))
    return nnx.state(module, nnx.Param), nnx.state(module, others)


def _arrays(state: nnx.State) -> PyTree:
    """The values of a state, with random keys as what they are made of."""
    return traverse_util.unflatten_dict(
        {
            tuple(map(str, path)): jax.random.key_data(leaf) if _is_key(leaf) else leaf
            for path, leaf in _flat(state).items()
        }
    )


def _put(module: nnx.Module, state: nnx.State, arrays: PyTree) -> None:
    """Gives a module's variables the values that `_arrays` took from others."""
    given: dict[Any, Any] = traverse_util.flatten_dict(arrays)
    values = {}
    for path, leaf in _flat(state).items():
        value = given[tuple(map(str, path))]
        if _is_key(leaf):
            value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf))
        values[path] = value
    nnx.replace_by_pure_dict(state, traverse_util.unflatten_dict(values))
    nnx.update(module, state)


def _flat(state: nnx.State) -> dict[tuple[Any, ...], Any]:
    return traverse_util.flatten_dict(nnx.to_pure_dict(state))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@contextlib.contextmanager
def _masking(mask: jax.Array | None) -> Generator[None]:
    token = _mask.set(mask)
    try:
        yield
    finally:
        _mask.reset(token)


class _Dropout(nnx.Dropout):
    """The stock layer, and the same with a traced rate."""

    def __call__(
        self, inputs: jax.Array, *, deterministic: Any = None, rngs: Any = None
    ) -> jax.Array:
        """Applies dropout."""
        asked = self.deterministic if deterministic is None else deterministic
        if asked is None or not nn.takes(self.rate):
            return super().__call__(inputs, deterministic=deterministic, rngs=rngs)
        if asked:
            return inputs
        source: Any = self.rngs if rngs is None else rngs
        if isinstance(source, nnx.Rngs):
            source = source[self.rng_collection]
        if isinstance(source, nnx.RngStream):
            source = self._draw(source)
        return nn.drop(inputs, self.rate, source, self.broadcast_dims)

    def _draw(self, stream: nnx.RngStream) -> jax.Array:
        """A key; as in the stock layer, none is used up at rates of 0 and 1."""
        count = stream.count[...]
        key = stream()
        unused = (self.rate == 0) | (self.rate == 1)
        stream.count[...] = jnp.where(unused, count, stream.count[...])
        return key


class _BatchNorm(nnx.BatchNorm):
    """The stock layer, which leaves the padding of a batch out."""

    def __call__(
        self, x: jax.Array, use_running_average: Any = None, *, mask: Any = None
    ) -> jax.Array:
        """Normalises."""
        padding = _mask.get()
        if mask is None and padding is not None:
            mask = nn.mask_for(padding, x, self.axis)
        return super().__call__(x, use_running_average, mask=mask)


_OURS: dict[type, type] = {nnx.Dropout: _Dropout, nnx.BatchNorm: _BatchNorm}
