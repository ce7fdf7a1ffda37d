"""The dimensions of a search space: what values an hparam may take. No jax here.

Every dimension has the same members, and these flags:

- `static`: the user's word on whether the hparam fixes the program (True), differs
  between the lanes of one program (False), or is to be found out (None);
- `continuous`: whether the values are too many to have a program each;
- `log`: whether ratios between values matter, rather than differences.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn, TypeGuard

import numpy as np

from jaxpack.types import Scalar, check_hparam


class _Finite:
    """What the dimensions do that can list their values."""

    continuous: ClassVar[bool] = False

    def values(self) -> Sequence[Scalar]:
        """All the values."""
        raise NotImplementedError

    def sample(self, generator: np.random.Generator) -> Scalar:
        """Draws a value."""
        values = self.values()
        return values[_index(len(values), generator)]

    def contains(self, value: Any) -> bool:
        """Whether `value` is one of the values; an int does for a float."""
        return any(_same(option, value) for option in self.values())

    def typical(self) -> Scalar:
        """The first value."""
        return self.values()[0]


@dataclasses.dataclass(frozen=True, repr=False)
class Uniform:
    """A float from `lo` to `hi`, every value equally likely."""

    lo: float
    hi: float
    static: bool | None = None
    kind: ClassVar[str] = "uniform"
    continuous: ClassVar[bool] = True
    log: ClassVar[bool] = False

    def __post_init__(self):
        for name in ("lo", "hi"):
            value = plain(getattr(self, name))
            if not _is_number(value) or not math.isfinite(value):
                _refuse(self, name, "a finite number")
            _set(self, **{name: float(value)})
        if self.lo >= self.hi:
            _refuse(self, "hi", f"more than lo, {self.lo}")

    def sample(self, generator: np.random.Generator) -> float:
        """Draws a value."""
        return _between(self.lo, self.hi, generator)

    def contains(self, value: Any) -> bool:
        """Whether `value` is a number from `lo` to `hi`."""
        return _is_number(value) and self.lo <= value <= self.hi

    def typical(self) -> float:
        """The middle."""
        return self.lo / 2 + self.hi / 2

    def values(self) -> None:
        """None: there is no end of them."""

    def __repr__(self) -> str:
        return _call(self, self.lo, self.hi)


@dataclasses.dataclass(frozen=True, repr=False)
class LogUniform(Uniform):
    """A float from `lo` to `hi`, every ratio equally likely."""

    kind: ClassVar[str] = "log_uniform"
    log: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.lo <= 0:
            _refuse(self, "lo", "more than 0")

    def sample(self, generator: np.random.Generator) -> float:
        """Draws a value."""
        log = _between(math.log(self.lo), math.log(self.hi), generator)
        return min(max(math.exp(log), self.lo), self.hi)

    def typical(self) -> float:
        """The geometric middle."""
        return math.sqrt(self.lo) * math.sqrt(self.hi)


@dataclasses.dataclass(frozen=True, repr=False)
class Integer(_Finite):
    """An int from `lo` to `hi`, both included."""

    lo: int
    hi: int
    log: bool = False
    static: bool | None = None
    kind: ClassVar[str] = "integer"

    def __post_init__(self):
        _set(self, lo=plain(self.lo), hi=plain(self.hi))
        for name in ("lo", "hi"):
            if type(getattr(self, name)) is not int:
                _refuse(self, name, "an int")
        if not isinstance(self.log, bool):
            _refuse(self, "log", "True or False")
        # A draw has 53 bits.
        if not 0 < self.hi - self.lo < 2**53:
            _refuse(self, "hi", f"more than lo, {self.lo}, by less than 2**53")
        if self.log and self.lo < 1:
            _refuse(self, "lo", "at least 1 with log")

    def sample(self, generator: np.random.Generator) -> int:
        """Draws a value."""
        if not self.log:
            return self.lo + _index(len(self.values()), generator)
        # Half a step more on both sides, or the ends would get half their share.
        lo, hi = math.log(self.lo - 0.5), math.log(self.hi + 0.5)
        value = round(math.exp(_between(lo, hi, generator)))
        return min(max(value, self.lo), self.hi)

    def contains(self, value: Any) -> bool:
        """Whether `value` is an int from `lo` to `hi`."""
        return type(value) is int and self.lo <= value <= self.hi

    def typical(self) -> int:
        """The middle; with `log`, the geometric middle."""
        if self.log:
            return round(math.sqrt(self.lo) * math.sqrt(self.hi))
        return (self.lo + self.hi) // 2

    def values(self) -> range:
        """All of them, as a range: there may be many."""
        return range(self.lo, self.hi + 1)

    def __repr__(self) -> str:
        return _call(self, self.lo, self.hi, **({"log": True} if self.log else {}))


@dataclasses.dataclass(frozen=True, repr=False)
class Choice(_Finite):
    """One of the `options`, each equally likely."""

    options: tuple[Scalar, ...]
    static: bool | None = None
    kind: ClassVar[str] = "choice"
    log: ClassVar[bool] = False

    def __post_init__(self):
        options = tuple(check_hparam(self.kind, option) for option in self.options)
        if not options or len(set(options)) < len(options):
            _refuse(self, "options", "at least one value, and no two equal")
        # choice(0, 0.5) means floats: lanes of one program need values of one type.
        numbers = [option for option in options if _is_number(option)]
        if len(numbers) == len(options) and float in map(type, options):
            options = tuple(map(float, numbers))
        _set(self, options=options)

    def values(self) -> tuple[Scalar, ...]:
        """The options."""
        return self.options

    def __repr__(self) -> str:
        return _call(self, *self.options)


@dataclasses.dataclass(frozen=True, repr=False)
class Constant(_Finite):
    """The same `value` for every trial."""

    value: Scalar
    static: bool | None = None
    kind: ClassVar[str] = "constant"
    log: ClassVar[bool] = False

    def __post_init__(self):
        _set(self, value=check_hparam(self.kind, self.value))

    def values(self) -> tuple[Scalar, ...]:
        """The value alone."""
        return (self.value,)

    def __repr__(self) -> str:
        return repr(self.value)


Dimension = Uniform | LogUniform | Integer | Choice | Constant

_WHOLE = {"batch_size": (1, None), "seed": (0, 2**32 - 1)}
"""The least and the most that hparams may be that have a meaning of their own."""


def uniform(lo: float, hi: float, static: bool | None = None) -> Uniform:
    """A float from `lo` to `hi`, every value equally likely.

    Args:
      lo: The lower end.
      hi: The upper end.
      static: True makes each value a program of its own; None finds out.

    Raises:
      ValueError: Unless the ends are finite numbers with `lo < hi`.

    Examples:
      >>> uniform(0, 0.5).typical()
      0.25
    """
    return Uniform(lo, hi, static)


def log_uniform(lo: float, hi: float, static: bool | None = None) -> LogUniform:
    """A float from `lo` to `hi`, every ratio equally likely.

    Args:
      lo: The lower end.
      hi: The upper end.
      static: True makes each value a program of its own; None finds out.

    Raises:
      ValueError: Unless the ends are finite numbers with `0 < lo < hi`.

    Examples:
      >>> log_uniform(1e-4, 1e-2).typical()
      0.001
    """
    return LogUniform(lo, hi, static)


def integer(lo: int, hi: int, log: bool = False, static: bool | None = None) -> Integer:
    """An int from `lo` to `hi`, both included.

    Args:
      lo: The lower end.
      hi: The upper end.
      log: Whether every ratio is equally likely, rather than every value.
      static: True makes each value a program of its own; None finds out.

    Raises:
      ValueError: Unless the ends are ints with `lo < hi`, and `lo >= 1` with `log`.

    Examples:
      >>> list(integer(1, 3).values())
      [1, 2, 3]
    """
    return Integer(lo, hi, log, static)


def choice(*values: Any, static: bool | None = None) -> Choice:
    """One of the values given, each equally likely.

    Numbers of which some are floats all become floats.

    Args:
      *values: JSON scalars; or one list or tuple of them.
      static: True makes each value a program of its own; None finds out.

    Raises:
      ValueError: If there is no value, two are equal, or one is not a JSON scalar.

    Examples:
      >>> choice("relu", "tanh") == choice(["relu", "tanh"])
      True
      >>> choice(0, 0.5)
      choice(0.0, 0.5)
    """
    if len(values) == 1 and isinstance(values[0], list | tuple):
        (values,) = values
    return Choice(tuple(values), static)


def dimension(name: str, dim: Any) -> Dimension:
    """The dimension that a user means: a plain value is a constant.

    Raises:
      ValueError: If the name or a value cannot be used.
    """
    if isinstance(dim, list | tuple):
        raise ValueError(f"{name} is {dim!r}; expected one value or choice({dim!r})")
    if not isinstance(dim, Dimension):
        dim = Constant(check_hparam(name, dim))
    check_hparam(name, dim.typical())
    if name in _WHOLE:
        least, most = _WHOLE[name]
        # The ends of an Integer stand for all of it.
        values = (dim.lo, dim.hi) if isinstance(dim, Integer) else dim.values()
        ints = [value for value in values or () if type(value) is int]
        if not values or len(ints) < len(values) or min(ints) < least:
            raise ValueError(f"{name} is {dim!r}; expected ints of at least {least}")
        if most is not None and max(ints) > most:
            raise ValueError(f"{name} is {dim!r}; expected ints of at most {most}")
    return dim


def value_of(name: str, dim: Dimension, value: Any) -> Scalar:
    """The value of the dimension that `value` stands for.

    Raises:
      ValueError: If it is none of its values.
    """
    given: Any = check_hparam(name, value)
    if not dim.contains(given):
        raise ValueError(f"hparam {name} is {given!r}; expected a value of {dim!r}")
    if isinstance(dim, Uniform):
        return float(given)
    return dim.values()[dim.values().index(given)]


def _set(dim: Dimension, **values: Any) -> None:
    """Gives fields their checked values; a frozen dataclass needs a way round."""
    if dim.static is not None and not isinstance(dim.static, bool):
        _refuse(dim, "static", "True, False or None")
    for name, value in values.items():
        object.__setattr__(dim, name, value)


def _refuse(dim: Dimension, name: str, expected: str) -> NoReturn:
    value = getattr(dim, name)
    raise ValueError(f"{dim.kind}: {name} is {value!r}; expected {expected}")


def _between(lo: float, hi: float, generator: np.random.Generator) -> float:
    """Draws a float from `lo` to `hi`, whose difference may be too large for one."""
    u = generator.random()
    return min(max(lo * (1 - u) + hi * u, lo), hi)


def _index(count: int, generator: np.random.Generator) -> int:
    return math.floor(generator.random() * count)


def plain(value: Any) -> Any:
    """A numpy scalar as the Python one, anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(option: Scalar, value: Any) -> bool:
    """Whether a value is an option: True is not 1, but 1 does for 1.0."""
    alike = isinstance(option, float) and _is_number(value)
    return (alike or type(option) is type(value)) and option == value


def _call(dim: Dimension, *args: Any, **options: Any) -> str:
    """Writes a dimension as the user would."""
    if dim.static is not None:
        options["static"] = dim.static
    words = [*map(repr, args), *(f"{k}={v!r}" for k, v in options.items())]
    return f"{dim.kind}({', '.join(words)})"
