"""Trials that are given rather than sampled: a list of them, or a grid. No jax here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpack.dimensions import Choice, Constant, Dimension, dimension
from jaxpack.space import Space
from jaxpack.types import HParams, Scalar, check_hparam


def grid(**values: Any) -> list[dict[str, Scalar]]:
    """Every combination of some values, as trials for `train` or `sweep`.

    Args:
      **values: For each hparam a list or tuple of values, or one value for all.

    Returns:
      The hparams of each trial; those of the last name change fastest.

    Raises:
      ValueError: If a name or a value cannot be used, or a list is empty.

    Examples:
      >>> grid(learning_rate=[0.1, 0.01], width=64)
      [{'learning_rate': 0.1, 'width': 64}, {'learning_rate': 0.01, 'width': 64}]
      >>> len(grid(learning_rate=[0.1, 0.01], seed=list(range(5))))
      10
    """
    options = {}
    for name, given in values.items():
        given = list(given) if isinstance(given, list | tuple | range) else [given]
        if not given:
            raise ValueError(f"{name} is an empty list; expected at least one value")
        options[name] = [check_hparam(name, value) for value in given]
    if not options:
        raise ValueError("grid() has no hparams; expected at least one")
    return [
        dict(zip(options, combination, strict=True))
        for combination in itertools.product(*options.values())
    ]


class Fixed(Space):
    """A space that has the given trials, in their order, and no others.

    Args:
      trials: The hparams of each trial. They need not have the same names, and two
        may be equal: they differ in their random keys.

    Raises:
      ValueError: If there are none, or a name or a value cannot be used.

    Examples:
      >>> space = Fixed([{"width": 64}, {"width": 128}])
      >>> space
      Fixed(2 trials of width)
      >>> [hp.width for hp in space.sample(2, seed=0)]
      [64, 128]
    """

    def __init__(self, trials: Sequence[Mapping[str, Any]]):
        if not trials:
            raise ValueError("space is an empty list; expected the hparams of trials")
        values: dict[str, dict[Any, None]] = {}
        checked = []
        for i, trial in enumerate(trials):
            if not isinstance(trial, Mapping):
                raise ValueError(
                    f"space[{i}] is {trial!r}; it must map hparams to values"
                )
            checked.append({name: check_hparam(name, v) for name, v in trial.items()})
            for name, value in checked[-1].items():
                values.setdefault(name, {})[value] = None
        super().__init__(
            **{name: _dimension(name, tuple(v)) for name, v in values.items()}
        )
        self._trials = [HParams(trial) for trial in checked]

    @property
    def size(self) -> int:
        """How many trials there are."""
        return len(self._trials)

    def dims_of(self, hparams: Mapping[str, Any]) -> dict[str, Dimension]:
        """The dimensions that a trial with these hparams has: its values, listed."""
        return {name: self.dims[name] for name in hparams}

    def sample(self, n: int, seed: int) -> list[HParams]:
        """The first `n` trials, whatever the seed."""
        return self._trials[:n]

    def check(self, hparams: Mapping[str, Any]) -> HParams:
        """Returns the trial with these hparams.

        Raises:
          ValueError: If there is none.
        """
        for trial in self._trials:
            if trial == hparams:
                return trial
        raise ValueError(f"hparams {dict(hparams)} are none of the given trials'")

    def describe(self) -> dict[str, Any]:
        """The trials, as JSON can hold them."""
        return {"trials": [dict(trial) for trial in self._trials]}

    def __repr__(self) -> str:
        return f"Fixed({self.size} trials of {', '.join(self.dims)})"


def as_space(space: Any) -> Any:
    """`space`, or where it is a list of trials the space that has just those."""
    if isinstance(space, Sequence) and not isinstance(space, str):
        return Fixed(space)
    return space


def _dimension(name: str, options: tuple[Scalar, ...]) -> Dimension:
    dim = Constant(options[0]) if len(options) == 1 else Choice(options)
    return dimension(name, dim)
