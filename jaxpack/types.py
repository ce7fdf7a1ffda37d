"""Records and aliases that every other module may use.

Shape letters, here and in every docstring of the package: `N` lanes of a pack,
`B` examples of a batch, `C` classes, `S` steps, `E` epochs. `[]` is a scalar.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import jax

PyTree = Any
Scalar = bool | int | float | str | None
"""What an hparam's value may be: a JSON scalar."""

# Words with a meaning of their own. Users may give values to the first three.
SPECIAL = ("batch_size", "seed", "model")
DERIVED = ("total_steps", "steps_per_epoch")

COMPLETE, STOPPED, PAUSED = "COMPLETE", "STOPPED", "PAUSED"
RUNNING, FAILED = "RUNNING", "FAILED"


class HParams(Mapping[str, Any]):
    """The hyper-parameters of one trial: a frozen mapping with attribute access.

    Outside a program the values are JSON scalars. Inside one, a per-lane value is a
    traced scalar or, for a choice between strings, a `TracedChoice`.

    Two more names can be read: `total_steps`, the number of steps in the schedule's
    horizon, and `steps_per_epoch`. They are known to the `model` and `optimizer`
    functions of a task and are not part of the mapping.

    Examples:
      >>> hp = HParams({"learning_rate": 0.1, "width": 64})
      >>> hp.width, hp["learning_rate"], dict(hp)
      (64, 0.1, {'learning_rate': 0.1, 'width': 64})
      >>> hp.learnig_rate
      Traceback (most recent call last):
      AttributeError: no hparam 'learnig_rate'; did you mean 'learning_rate'?
    """

    __slots__ = ("_derived", "_inactive", "_reads", "_values")

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        total_steps: Any = None,
        steps_per_epoch: Any = None,
        inactive: Mapping[str, str] | None = None,
    ):
        derived = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
        object.__setattr__(self, "_values", dict(values))
        object.__setattr__(self, "_derived", derived)
        object.__setattr__(self, "_inactive", dict(inactive or {}))
        object.__setattr__(self, "_reads", {})

    @property
    def reads_(self) -> dict[str, tuple[str, int]]:
        """The names read so far, each with the file and line that read it first."""
        return dict(self._reads)

    @property
    def inactive_(self) -> dict[str, str]:
        """The names that only other trials have, each with what theirs depend on."""
        return dict(self._inactive)

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise KeyError(self._missing(name))
        self._reads.setdefault(name, _caller())
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        if name in HParams.__slots__ or name.startswith("__"):
            raise AttributeError(name)
        if name in self._values:
            return self[name]
        if name in DERIVED:
            if self._derived[name] is None:
                raise AttributeError(
                    f"hp.{name} is known only while a task trains: read it inside "
                    "the task's model or optimizer function"
                )
            self._reads.setdefault(name, _caller())
            return self._derived[name]
        raise AttributeError(self._missing(name))

    def _missing(self, name: str) -> str:
        if name in self._inactive:
            return f"no hparam {name!r} here: it comes with {self._inactive[name]}"
        return f"no hparam {name!r}{near(name, self._values)}"

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"HParams are frozen: cannot set {name!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self._values) == dict(other)

    def __repr__(self) -> str:
        return f"HParams({self._values})"

    def __copy__(self) -> HParams:
        return self

    def __deepcopy__(self, _: Any) -> HParams:
        return self

    def __reduce__(self):
        return HParams, (self._values,)


def check_hparam(name: str, value: Any) -> Scalar:
    """Returns `value` as the JSON scalar it is, or says what is wrong with it.

    Raises:
      ValueError: If the name is not an identifier or is taken by the mapping, or
        the value is not a finite JSON scalar.

    Examples:
      >>> check_hparam("width", 64)
      64
      >>> check_hparam("items", 3)
      Traceback (most recent call last):
      ValueError: 'items' cannot name an hparam: HParams uses it itself
    """
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise ValueError(
            f"{name!r} cannot name an hparam: use a Python name without a leading "
            "underscore"
        )
    if name in DERIVED or hasattr(HParams, name):
        raise ValueError(f"{name!r} cannot name an hparam: HParams uses it itself")
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, Scalar):
        raise ValueError(
            f"hparam {name} has the value {value!r} of type {type(value).__name__}; "
            "values are bool, int, float, str or None"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"hparam {name} has the value {value}, which is not finite")
    return value


def _caller() -> tuple[str, int]:
    """The file and line of the nearest frame outside this mapping."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename in _MAPPING_FILES:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


_MAPPING_FILES = (__file__, Mapping.get.__code__.co_filename)


def near(name: str, names: Mapping[str, Any]) -> str:
    """The end of an error: the name that was meant, most likely, or all there are."""
    found = difflib.get_close_matches(name, names, 1)
    if found:
        return f"; did you mean {found[0]!r}?"
    return f"; there are {', '.join(names)}" if names else "; there are none"


class TracedChoice(str):
    """A lane's choice between strings inside a traced program.

    Only `jaxpack.switch` and `jaxpack.optimizers.switch` can take it. Whatever would
    need the string itself (comparing, hashing, formatting, indexing with it) raises
    a `TypeError`, by which jaxpack finds out that the hparam has to be static. It is
    a `str` so that code which asks for its type goes the way of a string, and it
    remembers that it has refused, should the code have caught the error.

    Attributes:
      name: The hparam.
      index: `[]` int32, the place of the lane's string in `options`.
      options: The strings the hparam may take.
      refused: Whether its string has been asked for.
    """

    name: str
    index: jax.Array  # pyrefly: ignore[bad-override]
    options: tuple[str, ...]
    refused: bool

    def __new__(
        cls, name: str, index: jax.Array, options: tuple[str, ...]
    ) -> TracedChoice:
        """Makes one whose text, should C code get at it, is no name of anything."""
        self = super().__new__(cls, f"\0traced {name}")
        self.name, self.index, self.options = name, index, options
        self.refused = False
        return self

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raises the error that says what can take a traced choice."""
        self.refused = True
        raise TypeError(
            f"hparam {self.name} is a choice between {', '.join(self.options)} that "
            "differs between lanes; take it with jaxpack.switch, or it is static"
        )

    def __repr__(self) -> str:
        return f"TracedChoice({self.name})"


def _guard(cls: type) -> None:
    """Lets every method of `str` refuse, but for those that Python itself needs."""
    kept = {"__class__", "__new__", "__init__", "__repr__", "__getattribute__"}
    kept |= {"__init_subclass__", "__subclasshook__", "__doc__", "__setattr__"}
    kept |= {"__delattr__", "__sizeof__", "__dir__", "__getstate__", "__reduce__"}
    kept |= {"__reduce_ex__"}
    for name in {*dir(str), "__bool__", "__index__", "__radd__", "__float__"} - kept:
        setattr(cls, name, cls.refuse)


_guard(TracedChoice)


class LaneState(NamedTuple):
    """Everything that changes while one trial trains.

    A pack's states are one `LaneState` whose every leaf has a leading axis `N`.

    Attributes:
      params: The weights.
      model_state: The model's other variables (BatchNorm statistics, ...).
      opt_state: The optimizer's state.
      key: `[2]` uint32, the trial's threefry key.
      step: `[]` int32, steps taken.
      target_step: `[]` int32, where the trial stops; an empty lane has 0.
      first_bad_step: `[]` int32, the first step whose loss was not finite, or -1.
      epoch_loss: `[]` float32, training loss summed over this epoch's examples, each
        with its weight.
      epoch_weight: `[]` float32, the sum of those weights.
    """

    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    key: Any
    step: Any
    target_step: Any
    first_bad_step: Any
    epoch_loss: Any
    epoch_weight: Any


@dataclasses.dataclass(frozen=True)
class Trial:
    """One assignment of hyper-parameters, numbered within its sweep."""

    trial_id: int
    hparams: HParams


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """What became of one trial.

    Attributes:
      trial_id: The trial's number, from 0 in the order sampled or given.
      hparams: Its hyper-parameters.
      status: COMPLETE, STOPPED, PAUSED, RUNNING or FAILED.
      score: The chosen metric at the last evaluation; None if there was none.
      history: A row an evaluation: `epochs`, `steps`, `train_loss` and every metric.
      params: The weights as numpy arrays; None where they were not kept.
      model_state: The model's other variables; None where not kept.
      opt_state: The optimizer's state; None where not kept.
      steps: Training steps taken.
      first_bad_step: The first step whose loss was not finite, or None.
      reason: Why the trial FAILED, or None.
      bracket: The bracket the trial belongs to, or None outside a sweep.
      rung: The last rung the trial reached in its bracket, or None.
      seconds: The trial's share of the time its pack trained.
      key: `[2]` uint32, the trial's random key; None where no state was kept.
      seed: The seed of the call that trained it.
    """

    trial_id: int
    hparams: HParams
    status: str
    score: float | None = None
    history: tuple[dict[str, float], ...] = ()
    params: PyTree = None
    model_state: PyTree = None
    opt_state: PyTree = None
    steps: int = 0
    first_bad_step: int | None = None
    reason: str | None = None
    bracket: int | None = None
    rung: int | None = None
    seconds: float = 0.0
    key: Any = None
    seed: int = 0

    def __getattr__(self, name: str) -> NoReturn:
        ours = {
            "config": "hparams",
            "hyperparameters": "hparams",
            "value": "score",
            "values": "score",
            "number": "trial_id",
            "state": "status (and the weights are params and model_state)",
            "metrics": "history[-1]",
            "intermediate_values": "history",
            "best_score": "score",
        }
        hint = f"; it is {ours[name]} here" if name in ours else ""
        raise AttributeError(f"TrialResult has no attribute {name!r}{hint}")

    def __repr__(self) -> str:
        score = "None" if self.score is None else f"{self.score:.4g}"
        return (
            f"TrialResult(trial_id={self.trial_id}, status={self.status}, "
            f"score={score}, steps={self.steps}, hparams={dict(self.hparams)})"
        )
