"""The search space: which hparams a trial has, and how trials are drawn. No jax here.

Some hparams belong to some trials only, as the depth of a network does to networks
that have one: `when` says to which.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxpack.dimensions import Dimension, dimension, plain, value_of
from jaxpack.types import HParams, Scalar, check_hparam

# Draws in a row that bring nothing new before chance is given up.
_PATIENCE = 1000


@dataclasses.dataclass(frozen=True, repr=False)
class Condition:
    """Dimensions of those trials only that have certain values elsewhere.

    Attributes:
      where: Names with values. The dimensions are those of trials that have one of
        the values of each name.
      dims: The dimensions by name.
    """

    where: Mapping[str, tuple[Scalar, ...]]
    dims: Mapping[str, Dimension]

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether a trial with these values has the dimensions."""
        return all(
            name in values and values[name] in options
            for name, options in self.where.items()
        )

    @property
    def text(self) -> str:
        """What has to hold, as the user would write it."""
        options = {
            name: repr(values[0] if len(values) == 1 else values)
            for name, values in self.where.items()
        }
        return ", ".join(f"{name}={value}" for name, value in options.items())

    def __repr__(self) -> str:
        return f"when({self.text})({_named(self.dims)})"


def when(**where: Any) -> Callable[..., Condition]:
    """Dimensions for those trials only that have certain values elsewhere.

    Args:
      **where: The values on which the dimensions depend, by name; a list or tuple for
        any of several. Several names have to hold together.

    Returns:
      A function that takes the dimensions as `Space` does, and gives an entry for it.

    Raises:
      ValueError: If nothing is given, or a value is not a JSON scalar.

    Examples:
      >>> from jaxpack.dimensions import choice
      >>> space = Space(
      ...     when(model="resnet")(depth=choice(8, 14)),
      ...     model=choice("mlp", "resnet"),
      ... )
      >>> [dict(hp) for hp in space.sample(2, seed=0)]
      [{'model': 'mlp'}, {'model': 'resnet', 'depth': 8}]
    """
    if not where:
        raise ValueError("when() names no hparam; expected, say, when(model='resnet')")
    options = {name: _options(name, values) for name, values in where.items()}

    def condition(**dims: Any) -> Condition:
        made = {name: dimension(name, dim) for name, dim in dims.items()}
        if not made:
            text = Condition(options, {}).text
            raise ValueError(f"when({text}) has no dimensions; expected at least one")
        return Condition(options, made)

    return condition


class Space:
    """Named dimensions, from which the trials of a sweep are drawn.

    Args:
      *conditions: Dimensions that some trials have, made with `when`. What they
        depend on is a choice, an integer or a constant of the space, or of a
        condition before. A name may be in several of which no two hold together.
      **dims: A dimension for each hparam, or the value it always has. `batch_size`
        takes ints from 1, `seed` ints from 0.

    Raises:
      ValueError: If there are no dimensions, a name or a value cannot be used, or a
        condition depends on what there is not, never holds, or brings an hparam that
        the trial has already.

    Examples:
      >>> from jaxpack.dimensions import choice, log_uniform
      >>> space = Space(learning_rate=log_uniform(1e-4, 0.1), width=choice(64, 128))
      >>> space
      Space(learning_rate=log_uniform(0.0001, 0.1), width=choice(64, 128))
      >>> [hp.width for hp in space.sample(4, seed=1)]
      [64, 128, 64, 64]
    """

    def __init__(self, /, *conditions: Condition, **dims: Any):
        if not dims:
            raise ValueError("Space() has no dimensions; expected at least one")
        self._dims = {name: dimension(name, dim) for name, dim in dims.items()}
        self._conditions = _checked(self._dims, conditions)
        # What every trial has is what depends on nothing.
        self._groups = (Condition({}, self._dims), *self._conditions)
        self._size = _size(self._groups)

    @property
    def dims(self) -> Mapping[str, Dimension]:
        """The dimensions that every trial has, in the order given; read-only."""
        return MappingProxyType(self._dims)

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The dimensions that some trials have, in the order given."""
        return self._conditions

    @property
    def every_dim(self) -> dict[str, Dimension]:
        """All dimensions by name, those of conditions too.

        Of several that share a name, in conditions that exclude one another, the last.
        """
        return {name: dim for g in self._groups for name, dim in g.dims.items()}

    @property
    def size(self) -> int | None:
        """How many assignments there are; None if a dimension is continuous."""
        return self._size

    def dims_of(self, hparams: Mapping[str, Any]) -> dict[str, Dimension]:
        """The dimensions that a trial with these hparams has.

        Args:
          hparams: An assignment of the space.

        Examples:
          >>> from jaxpack.dimensions import choice
          >>> space = Space(when(a=1)(b=choice(3, 4)), a=choice(0, 1))
          >>> space.dims_of({"a": 0}), space.dims_of({"a": 1, "b": 3})
          ({'a': choice(0, 1)}, {'a': choice(0, 1), 'b': choice(3, 4)})
        """
        values = dict(hparams)
        held = [group.dims for group in self._groups if group.holds(values)]
        return {name: dim for dims in held for name, dim in dims.items()}

    def sample(self, n: int, seed: int) -> list[HParams]:
        """Draws `n` distinct assignments, or all there are if they are fewer.

        A call for fewer gives the first of these. An assignment has only those
        hparams whose conditions hold.

        Args:
          n: How many, at least 0.
          seed: Of the generator, at least 0.

        Raises:
          ValueError: If `n` or `seed` is not such an int.

        Examples:
          >>> from jaxpack.dimensions import integer
          >>> [hp.width for hp in Space(width=integer(1, 3)).sample(9, seed=1)]
          [1, 3, 2]
        """
        n, seed = plain(n), plain(seed)
        for name, value in (("n", n), ("seed", seed)):
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} is {value!r}; expected an int of at least 0")
        drawn = itertools.islice(self._distinct(seed), n)
        return [self._hparams(values) for values in drawn]

    def check(self, hparams: Mapping[str, Any]) -> HParams:
        """Returns an assignment as the space itself would have drawn it.

        Args:
          hparams: A value for each dimension that such a trial has.

        Raises:
          ValueError: If a name is unknown, missing or not such a trial's, or a value
            outside of its dimension.

        Examples:
          >>> from jaxpack.dimensions import uniform
          >>> Space(dropout=uniform(0, 0.5)).check({"dropout": 0})
          HParams({'dropout': 0.0})
        """
        if not isinstance(hparams, Mapping):
            raise ValueError(
                f"hparams is {hparams!r}; expected a mapping of names to values"
            )
        names = dict.fromkeys(name for group in self._groups for name in group.dims)
        for name in hparams:
            if name not in names:
                raise ValueError(
                    f"the space has no hparam {name!r}{_near(name, names)}"
                )
        values: dict[str, Scalar] = {}
        for group in self._groups:
            if not group.holds(values):
                continue
            missing = [name for name in group.dims if name not in hparams]
            if missing:
                where = f" with {group.text}" if group.where else ""
                raise ValueError(
                    f"hparams {dict(hparams)} lack {', '.join(missing)}; expected a "
                    f"value for every dimension of the space{where}"
                )
            values |= {n: value_of(n, dim, hparams[n]) for n, dim in group.dims.items()}
        for name in hparams:
            if name not in values:
                raise ValueError(
                    f"hparams {dict(hparams)} have {name}, which only trials with "
                    f"{self._origin(name)} have"
                )
        return self._hparams(values)

    def describe(self) -> dict[str, Any]:
        """The space in words, as JSON can hold it.

        Examples:
          >>> from jaxpack.dimensions import choice
          >>> Space(when(a=1)(b=choice(3, 4)), a=choice(0, 1)).describe()
          {'a': 'choice(0, 1)', 'when(a=1)': {'b': 'choice(3, 4)'}}
        """
        described: dict[str, Any] = {n: repr(dim) for n, dim in self._dims.items()}
        for condition in self._conditions:
            more = {name: repr(dim) for name, dim in condition.dims.items()}
            described.setdefault(f"when({condition.text})", {}).update(more)
        return described

    def _hparams(self, values: Mapping[str, Scalar]) -> HParams:
        others = [name for group in self._conditions for name in group.dims]
        inactive = {n: self._origin(n) for n in others if n not in values}
        return HParams(values, inactive=inactive)

    def _origin(self, name: str) -> str:
        """On what an hparam depends."""
        return " or ".join(c.text for c in self._conditions if name in c.dims)

    def _distinct(self, seed: int) -> Iterator[dict[str, Scalar]]:
        """Yields all assignments that differ, first by chance, then in order."""
        generator = np.random.Generator(np.random.Philox(seed))
        seen: set[tuple[tuple[str, Scalar], ...]] = set()
        repeats = 0
        while repeats < _PATIENCE:
            values = self._draw(generator)
            drawn = tuple(values.items())
            repeats = repeats + 1 if drawn in seen else 0
            if not repeats:
                seen.add(drawn)
                yield values
        for values in _assignments({}, self._groups):
            if tuple(values.items()) not in seen:
                yield values

    def _draw(self, generator: np.random.Generator) -> dict[str, Scalar]:
        values: dict[str, Scalar] = {}
        for group in self._groups:
            # Drawn even if not wanted, so that no trial's values depend on what the
            # trials before it were.
            drawn = {name: dim.sample(generator) for name, dim in group.dims.items()}
            if group.holds(values):
                values |= drawn
        return values

    def __repr__(self) -> str:
        entries = [*map(repr, self._conditions), _named(self._dims)]
        return f"Space({', '.join(entries)})"


class _Family(NamedTuple):
    """Assignments of one set of dimensions.

    Attributes:
      names: Of the dimensions.
      settled: The values on which conditions depend; `_OTHER` for one that none
        mentions.
      count: How many assignments; None if there is no end of them.
    """

    names: frozenset[str]
    settled: dict[str, Any]
    count: int | None


_OTHER = object()


def _size(groups: Sequence[Condition]) -> int | None:
    """How many assignments there are.

    Raises:
      ValueError: If a condition never holds, or a name would be there twice.
    """
    mentioned: dict[str, dict[Scalar, None]] = {}
    for group in groups:
        for name, options in group.where.items():
            mentioned.setdefault(name, {}).update(dict.fromkeys(options))
    families = [_Family(frozenset(), {}, 1)]
    for group in groups:
        with_it = [group.holds(family.settled) for family in families]
        if not any(with_it):
            raise ValueError(f"{group!r} never holds: no trial would have it")
        families = [
            grown
            for family, has_it in zip(families, with_it, strict=True)
            for grown in (_grow(family, group, mentioned) if has_it else [family])
        ]
    counts = [family.count for family in families]
    finite = [count for count in counts if count is not None]
    return sum(finite) if len(finite) == len(counts) else None


def _grow(
    family: _Family, group: Condition, mentioned: Mapping[str, Iterable[Scalar]]
) -> list[_Family]:
    """The families that one becomes with more dimensions."""
    for name in group.dims:
        if name in family.names:
            raise ValueError(
                f"{group!r} gives {name} to trials that have it already; expected "
                "conditions of which no two hold together"
            )
    families = [family._replace(names=family.names | set(group.dims))]
    for name, dim in group.dims.items():
        values = dim.values()
        rest = None if values is None else len(values)
        parts: list[tuple[Any, int | None]] = []
        if name in mentioned and rest is not None:
            parts = [(value, 1) for value in mentioned[name] if dim.contains(value)]
            rest -= len(parts)
        parts += [(_OTHER, rest)] if rest != 0 else []
        families = [
            _Family(
                old.names,
                old.settled | {name: value},
                None if old.count is None or count is None else old.count * count,
            )
            for old in families
            for value, count in parts
        ]
    return families


def _assignments(
    values: dict[str, Scalar], groups: Sequence[Condition]
) -> Iterator[dict[str, Scalar]]:
    """Yields what `values` can be completed to, leaving out continuous dimensions."""
    if not groups:
        yield values
    elif not groups[0].holds(values):
        yield from _assignments(values, groups[1:])
    else:
        dims = groups[0].dims
        for more in itertools.product(*(dim.values() or () for dim in dims.values())):
            added = values | dict(zip(dims, more, strict=True))
            yield from _assignments(added, groups[1:])


def _checked(
    dims: Mapping[str, Dimension], conditions: Sequence[Any]
) -> tuple[Condition, ...]:
    """Conditions whose values are those of the dimensions they depend on."""
    known = {name: [dim] for name, dim in dims.items()}
    checked = []
    for condition in conditions:
        if not isinstance(condition, Condition):
            raise ValueError(
                f"Space() has the entry {condition!r}; expected dimensions by name, "
                "and when(name=value)(...) for those that depend on others"
            )
        where = {
            name: tuple(_depended_on(condition, name, value, known) for value in values)
            for name, values in condition.where.items()
        }
        checked.append(Condition(where, condition.dims))
        for name, dim in condition.dims.items():
            known.setdefault(name, []).append(dim)
    return tuple(checked)


def _depended_on(
    condition: Condition, name: str, value: Any, known: Mapping[str, list[Dimension]]
) -> Scalar:
    """The value of a dimension known so far that a condition means."""
    if name not in known:
        near = _near(name, known)
        raise ValueError(
            f"when({condition.text}): the space has no hparam {name!r} before{near}"
        )
    for dim in known[name]:
        if dim.values() is None:
            raise ValueError(
                f"when({condition.text}): {name} is {dim!r}; expected a choice, an "
                "integer or a constant"
            )
        if dim.contains(value):
            return value_of(name, dim, value)
    dims = " or ".join(map(repr, known[name]))
    raise ValueError(
        f"when({condition.text}): {name} is never {value!r}; expected a value of {dims}"
    )


def _options(name: str, values: Any) -> tuple[Scalar, ...]:
    """The values that a condition names, one or several."""
    if not isinstance(values, list | tuple):
        values = (values,)
    if not values:
        raise ValueError(f"when({name}=()) has no value; expected at least one")
    return tuple(check_hparam(name, value) for value in values)


def _near(name: str, names: Iterable[str]) -> str:
    names = list(names)
    near = difflib.get_close_matches(f"{name}", names, 1)
    return (
        f"; expected {near[0]!r}" if near else f"; expected one of {', '.join(names)}"
    )


def _named(dims: Mapping[str, Dimension]) -> str:
    return ", ".join(f"{name}={dim!r}" for name, dim in dims.items())
