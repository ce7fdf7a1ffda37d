"""Which trials train together: each policy, and the metric of the nearest."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jaxpack as jp
from jaxpack import policies
from jaxpack.dimensions import Integer, Uniform
from jaxpack.policies import Candidate, distance, packs

SPACE = jp.Space(
    jp.when(model="mlp")(width=jp.choice(16, 64), depth=jp.integer(1, 9)),
    jp.when(model="resnet")(depth=jp.choice(8, 14), size=jp.integer(1, 64, log=True)),
    model=jp.choice("mlp", "resnet", "linear", "lenet"),
    rate=jp.log_uniform(1e-6, 1e-1),
    batch_size=jp.integer(20, 70),
    decay=jp.uniform(-1.0, 3.0),
    seed=3,
)


@st.composite
def trials(draw):
    """Trials of `SPACE`, extreme and close ones among them."""
    values = {name: draw(_values(dim)) for name, dim in SPACE.dims.items()}
    for name, dim in SPACE.dims_of(values).items():
        if name not in values:
            values[name] = draw(_values(dim))
    return SPACE.check(values)


def _values(dim):
    if isinstance(dim, Uniform):
        return st.floats(dim.lo, dim.hi)
    if isinstance(dim, Integer):
        return st.integers(dim.lo, dim.hi)
    return st.sampled_from(dim.values())


def ready(n=60, seed=0):
    return [Candidate(hp, hp.model) for hp in SPACE.sample(n, seed)]


@settings(deadline=None)
@given(trials(), trials(), trials())
def test_distance_is_a_metric(a, b, c):
    assert distance(SPACE, a, a) == 0
    assert (distance(SPACE, a, b) == 0) == (a == b)
    assert distance(SPACE, a, b) == distance(SPACE, b, a)
    assert 0 <= distance(SPACE, a, b) <= 1 + 1e-12
    through = distance(SPACE, a, b) + distance(SPACE, b, c)
    assert distance(SPACE, a, c) <= through + 1e-12


@settings(deadline=None)
@given(trials(), trials())
def test_unlike_families_are_as_far_apart_as_can_be(a, b):
    if a.model != b.model:
        assert distance(SPACE, a, b) == 1
    else:
        assert distance(SPACE, a, b) < 1


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(0, 1))
@example(0.0, 5e-324)
@example(1.0, math.nextafter(1.0, 0))
def test_close_numbers_are_not_equal(a, b):
    space = jp.Space(a=jp.uniform(0, 1), b=jp.choice(1, 2))
    apart = distance(space, {"a": a, "b": 1}, {"a": b, "b": 1})
    assert apart == pytest.approx(abs(a - b) / 2, abs=1e-15)
    assert (apart == 0) == (a == b)


@pytest.mark.parametrize(
    ("dim", "a", "b", "apart"),
    [
        (jp.uniform(0, 10), 2, 7, 0.5),
        (jp.uniform(-1.5e308, 1.5e308), -1.5e308, 1.5e308, 1.0),
        (jp.log_uniform(1e-4, 1), 1e-3, 1e-1, 0.5),
        (jp.log_uniform(1e300, math.nextafter(1e300, math.inf)), 1e300, 1e300, 0.0),
        (jp.integer(0, 10), 9, 4, 0.5),
        (jp.integer(1, 10_000, log=True), 10, 1000, 0.5),
        (jp.choice(1, 2, 1000), 1, 2, 1.0),
        (jp.choice("relu", "tanh"), "relu", "relu", 0.0),
    ],
    ids=repr,
)
def test_distances_by_hand(dim, a, b, apart):
    space = jp.Space(x=dim)
    assert distance(space, {"x": a}, {"x": b}) == pytest.approx(apart)


def test_one_name_of_unlike_dimensions_is_unlike():
    space = jp.Space(
        jp.when(a=0)(x=jp.integer(1, 5)),
        jp.when(a=1)(x=jp.integer(1, 9)),
        a=jp.choice(0, 1),
    )
    assert distance(space, {"a": 0, "x": 2}, {"a": 1, "x": 2}) == 1


@pytest.mark.parametrize("name", policies.NAMES)
@pytest.mark.parametrize("size", [1, 4, 9, 100])
def test_every_trial_is_in_one_pack_and_the_first_in_the_first(name, size):
    candidates = ready()
    made = packs(policies.named(name, SPACE, seed=0), candidates, size)
    assert sorted(i for pack in made for i in pack) == list(range(60))
    assert all(len(pack) <= size for pack in made)
    firsts = [pack[0] for pack in made]
    assert firsts[0] == 0 and firsts == sorted(firsts)
    if name != "none":
        assert all(len(pack) == size for pack in made[:-1])
    assert packs(policies.named(name, SPACE, seed=0), [], size) == []


def test_nearest_are_the_nearest():
    candidates = ready(80)
    chosen = policies.nearest(SPACE)(candidates, 9)
    first = candidates[0].hparams
    apart = np.array([distance(SPACE, first, c.hparams) for c in candidates])
    assert sorted(apart[chosen]) == sorted(apart)[:9]
    assert {candidates[i].hparams.model for i in chosen} == {first.model}


def test_of_equally_near_trials_those_of_the_program_come_first():
    space = jp.Space(x=jp.choice(1, 2, 3))
    candidates = [Candidate({"x": x}, key) for x, key in ((1, "a"), (2, "b"), (3, "a"))]
    assert policies.nearest(space)(candidates, 2) == [0, 2]


def test_random_draws_all_alike_and_by_the_seed():
    candidates = ready(40)
    counts = np.zeros(40)
    for seed in range(400):
        chosen = policies.random(seed)(candidates, 5)
        assert chosen == policies.random(seed)(candidates, 5)
        counts[chosen] += 1
    assert counts[0] == 400
    assert np.all(np.abs(counts[1:] - 400 * 4 / 39) < 30)
    # Another order, another first trial: the same companions, another pack.
    turned = [candidates[0], *candidates[:0:-1]]
    again = {turned[i].hparams for i in policies.random(3)(turned, 5)}
    assert again == {candidates[i].hparams for i in policies.random(3)(candidates, 5)}
    packed = packs(policies.random(3), candidates, 5)
    assert len({tuple(np.diff(sorted(pack))) for pack in packed}) > 4


def test_random_is_the_same_in_every_process():
    # Written down, so that another process, platform or version has to agree.
    candidates = [Candidate({"x": i, "y": "a"}) for i in range(20)]
    assert policies.random(5)(candidates, 6) == [0, 15, 13, 3, 5, 12]
    turned = [Candidate({"y": "a", "x": i}) for i in range(20)]
    assert policies.random(5)(turned, 6) == policies.random(5)(candidates, 6)


def test_equal_batches_are_those_of_the_task_where_none_is_given():
    candidates = [Candidate(hp) for hp in ({}, {"batch_size": 32}, {"lr": 1}, {})]
    assert policies.equal_batch(candidates, 3) == [0, 2, 3]


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="policy is 'knn'; it must be 'none' or 'ran"):
        policies.named("knn", SPACE, seed=0)
    for size in (0, 1.5, True):
        with pytest.raises(ValueError, match=r"size is .* whole number >= 1"):
            packs(policies.none, ready(3), size)
    for chosen in ([], [1], [0, 0], [0, 7], [0, 1, 2]):
        with pytest.raises(ValueError, match="the policy chose"):
            packs(lambda _, __, chosen=chosen: chosen, ready(3), 2)
