"""Which ready trials train together: the packing policies of the paper. No jax here.

The policies of section 5 of Liu, Krishnan, Elmore and Franklin (arXiv 2002.02885), to
be compared with each other: `none`, `random`, `equal_batch` and `nearest`. A policy is
a pure function that chooses companions for the first of the ready trials, so that no
trial waits for ever; asked again with the trials left, it makes the next pack. The
first trial also takes the part of the paper's random pivot, having been drawn at
random itself.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpack import checks
from jaxpack.dimensions import Dimension, Integer, Uniform
from jaxpack.space import Space


class Candidate(NamedTuple):
    """A ready trial, as a policy sees it.

    Attributes:
      hparams: Its hparams.
      key: Its pack key: equal for trials of one program.
    """

    hparams: Mapping[str, Any]
    key: Hashable = None


Policy = Callable[[Sequence[Candidate], int], list[int]]
"""Takes the ready trials in their order and the size of a pack, at least 1.

Returns the places of the trials to train together, at most so many: that of the first,
0, and those of its companions.
"""

# Of trials so alike that their distance rounds to 0.
_LEAST = 1e-300

NAMES = ("none", "random", "equal_batch", "nearest")


def none(ready: Sequence[Candidate], size: int) -> list[int]:
    """Trains each trial alone.

    Examples:
      >>> none([Candidate({}), Candidate({})], 2)
      [0]
    """
    del size
    return [0] if ready else []


def random(seed: int) -> Policy:
    """A policy that draws companions at random.

    The draw is a function of the seed and of the trials' hparams: not of the order
    they became ready in, nor of the draws before.

    Args:
      seed: Fixes the draws.

    Examples:
      >>> ready = [Candidate({"width": width}) for width in range(6)]
      >>> random(0)(ready, 3), random(1)(ready, 3)
      ([0, 5, 1], [0, 2, 1])
    """

    def policy(ready: Sequence[Candidate], size: int) -> list[int]:
        first = _digest(seed, ready[0].hparams) if ready else ""
        return _closest(ready, size, lambda other: _digest(first, other.hparams))

    return policy


def equal_batch(ready: Sequence[Candidate], size: int) -> list[int]:
    """Trains trials of one batch size together, and fills up with others in order.

    Trials without a `batch_size` have the same one, that of the task.

    Examples:
      >>> ready = [Candidate({"batch_size": size}) for size in (32, 64, 64, 32, 32)]
      >>> equal_batch(ready, 2), equal_batch(ready, 4)
      ([0, 3], [0, 3, 4, 1])
    """
    first = ready[0].hparams.get("batch_size") if ready else None
    return _closest(ready, size, lambda other: other.hparams.get("batch_size") != first)


def nearest(space: Space) -> Policy:
    """A policy that takes the nearest trials by `distance`, exactly.

    Of trials equally near, those of the first one's program come first.

    Args:
      space: The space that the trials are of.

    Examples:
      >>> from jaxpack.dimensions import log_uniform
      >>> space = Space(rate=log_uniform(1e-5, 1))
      >>> ready = [Candidate({"rate": rate}) for rate in (1e-3, 1, 1e-2, 1e-5, 2e-3)]
      >>> nearest(space)(ready, 3)
      [0, 4, 2]
    """

    def policy(ready: Sequence[Candidate], size: int) -> list[int]:
        def nearness(other: Candidate) -> tuple[float, bool]:
            first = ready[0]
            near = distance(space, first.hparams, other.hparams)
            return near, other.key != first.key

        return _closest(ready, size, nearness)

    return policy


def named(name: str, space: Space, seed: int) -> Policy:
    """The policy of a name.

    Args:
      name: "none", "random", "equal_batch" or "nearest".
      space: The space, for those that measure distances.
      seed: The seed, for those that draw.

    Raises:
      ValueError: If there is no such policy.

    Examples:
      >>> from jaxpack.dimensions import uniform
      >>> named("equal_batch", Space(rate=uniform(0, 1)), seed=0) is equal_batch
      True
    """
    policies = {
        "none": none,
        "random": random(seed),
        "equal_batch": equal_batch,
        "nearest": nearest(space),
    }
    return policies[checks.word("policy", name, NAMES)]


def packs(policy: Policy, ready: Sequence[Candidate], size: int) -> list[list[int]]:
    """Puts all trials into packs, as a policy chooses.

    Args:
      policy: The policy.
      ready: The trials in their order.
      size: The size of a pack, at least 1; the last ones may be smaller.

    Returns:
      The places in `ready` of the trials of each pack; every place is in one.

    Raises:
      ValueError: If `size` is not a whole number from 1, or the policy chooses what it
        may not.

    Examples:
      >>> ready = [Candidate({"batch_size": size}) for size in (32, 64, 64, 32, 32)]
      >>> packs(equal_batch, ready, 2)
      [[0, 3], [1, 2], [4]]
    """
    checks.whole("size", size)
    left = list(range(len(ready)))
    made = []
    while left:
        chosen = policy([ready[i] for i in left], size)
        fits = len(set(chosen)) == len(chosen) <= size and set(chosen) <= set(
            range(len(left))
        )
        if not fits or chosen[:1] != [0]:
            raise ValueError(
                f"the policy chose {chosen!r} of {len(left)} trials for a pack of "
                f"{size}; expected places of unlike trials, 0 first"
            )
        made.append([left[i] for i in chosen])
        left = [i for place, i in enumerate(left) if place not in set(chosen)]
    return made


def distance(space: Space, a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """How far apart two trials of a space are: a metric, from 0 to 1.

    The mean over the dimensions of the difference of two numbers as a part of their
    interval, by ratios where the dimension is logarithmic, and of 0 or 1 for equal
    and unequal choices. Trials of another `model`, or with other dimensions, are as
    far apart as can be, 1.

    Args:
      space: The space.
      a: The hparams of a trial of the space.
      b: Those of another.

    Returns:
      The distance, 0 only between equal hparams.

    Examples:
      >>> from jaxpack.dimensions import choice, log_uniform
      >>> space = Space(rate=log_uniform(1e-4, 1), act=choice("relu", "tanh"))
      >>> relu, tanh = {"rate": 0.01, "act": "relu"}, {"rate": 0.1, "act": "tanh"}
      >>> distance(space, relu, relu), distance(space, relu, tanh)
      (0.0, 0.625)
    """
    if dict(a) == dict(b):
        return 0.0
    dims = space.dims_of(a)
    if dims != space.dims_of(b) or a.get("model") != b.get("model"):
        return 1.0
    apart = [_apart(dim, a[name], b[name]) for name, dim in dims.items()]
    return max(sum(apart) / len(apart), _LEAST)


def _apart(dim: Dimension, a: Any, b: Any) -> float:
    """How far apart two values of a dimension are, from 0 to 1."""
    if not isinstance(dim, Uniform | Integer):
        return float(a != b)
    scale = math.log if dim.log else _half
    whole = scale(dim.hi) - scale(dim.lo)
    return abs(scale(a) - scale(b)) / whole if whole else float(a != b)


def _half(value: float) -> float:
    """Half of it: a difference of the whole may be too large for a float."""
    return value / 2


def _closest(
    ready: Sequence[Candidate], size: int, rank: Callable[[Candidate], Any]
) -> list[int]:
    """The first, and those that rank lowest; of equals, those that are first."""
    others = sorted(range(1, len(ready)), key=lambda i: rank(ready[i]))
    return [0, *others][: min(size, len(ready))]


def _digest(salt: Any, hparams: Mapping[str, Any]) -> str:
    """Chance, in effect, that is the same in every process."""
    text = json.dumps([salt, dict(hparams)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
