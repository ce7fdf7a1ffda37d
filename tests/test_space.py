"""The search space: what is drawn, what is accepted, what is refused."""

from __future__ import annotations

import functools
import json
import math
import operator
import pickle
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpack.dimensions import (
    Choice,
    Constant,
    Integer,
    LogUniform,
    Uniform,
    choice,
    integer,
    log_uniform,
    uniform,
)
from jaxpack.space import Space, when
from jaxpack.types import HParams

DIMENSIONS = [
    uniform(-1, 2),
    uniform(-1.5e308, 1.5e308),
    log_uniform(1e-5, 1e-1),
    integer(-3, 4),
    integer(1, 1000, log=True),
    integer(0, 2**40),
    choice("relu", "tanh"),
    choice(0, 0.25, 0.5),
    choice(True, False, None),
    Constant(7),
]
BOTH = Space(learning_rate=log_uniform(1e-4, 1e-1), width=choice(64, 128))
RATES = [0.0025494849985104474, 0.0012272840850804363, 0.0002607392390821864]
WIDTHS = [64, 64, 128]


def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call to be made later, of whatever the types."""
    return functools.partial(function, *args, **kwargs)


def fixed(u: float) -> Any:
    """A generator whose every draw is `u`."""
    return types.SimpleNamespace(random=lambda: u)


@pytest.mark.parametrize("dim", DIMENSIONS, ids=repr)
def test_draws_are_values_of_the_dimension(dim):
    generator = np.random.default_rng(0)
    ends = [dim.sample(fixed(0.0)), dim.sample(fixed(1 - 2**-53))]
    draws = [*ends, *(dim.sample(generator) for _ in range(200)), dim.typical()]
    assert all(dim.contains(value) for value in draws)
    assert json.loads(json.dumps(draws)) == draws
    if dim.continuous:
        assert dim.values() is None
        assert all(type(value) is float for value in draws)
        assert ends == pytest.approx([dim.lo, dim.hi])
    else:
        values = dim.values()
        assert ends == [values[0], values[-1]]
        assert {type(value) for value in draws} <= {type(v) for v in values[:3]}


@pytest.mark.parametrize(
    ("dim", "typical"),
    [
        (uniform(0, 3), 1.5),
        (log_uniform(1e-4, 1e-2), 1e-3),
        (integer(1, 3), 2),
        (integer(1, 3, log=True), 2),
        (integer(1, 10_000, log=True), 100),
        (choice("tanh", "relu"), "tanh"),
        (Constant(3), 3),
    ],
    ids=repr,
)
def test_typical_value(dim, typical):
    assert dim.typical() == pytest.approx(typical)


def test_all_integers_are_equally_likely():
    generator = np.random.default_rng(0)
    draws = [integer(2, 5).sample(generator) for _ in range(4000)]
    counts = np.bincount(draws, minlength=6)[2:]
    assert counts.sum() == 4000
    assert np.all(np.abs(counts - 1000) < 120)


@pytest.mark.parametrize("dim", [log_uniform(1, 1e4), integer(1, 10_000, log=True)])
def test_a_decade_gets_its_share_with_log(dim):
    generator = np.random.default_rng(0)
    decades = [int(math.log10(dim.sample(generator))) for _ in range(4000)]
    counts = np.bincount(np.minimum(decades, 3), minlength=4)
    assert np.all(counts > 750)


def test_the_ends_of_a_log_integer_get_their_share():
    draws = [integer(1, 3, log=True).sample(fixed(u / 1000)) for u in range(1000)]
    # log(1.5 / 0.5), log(2.5 / 1.5) and log(3.5 / 2.5), of log(3.5 / 0.5)
    shares = np.log([3.0, 5 / 3, 7 / 5]) / np.log(7.0)
    counts = [draws.count(value) for value in (1, 2, 3)]
    assert counts == pytest.approx(1000 * shares, abs=2)


def test_flags():
    assert [dim.continuous for dim in DIMENSIONS] == [True] * 3 + [False] * 7
    assert [dim.log for dim in DIMENSIONS[:5]] == [False, False, True, False, True]
    for static in (None, True, False):
        made = [
            uniform(0, 1, static),
            log_uniform(1, 2, static=static),
            integer(1, 2, static=static),
            choice(1, 2, static=static),
        ]
        assert [dim.static for dim in made] == [static] * 4


def test_choice_takes_a_list_and_gives_numbers_one_type():
    assert choice([1, 2]) == choice((1, 2)) == choice(1, 2)
    assert [type(value) for value in choice(0, 0.5).values()] == [float, float]
    assert choice(np.int64(3), np.float32(0.5)).values() == (3.0, 0.5)
    assert choice(True, 0.5).values()[0] is True


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (call(uniform, 1, 1), "uniform: hi is 1.0; expected more than lo, 1.0"),
        (call(uniform, 2, 1), "hi is 1.0"),
        (call(uniform, 0, math.inf), "hi is inf; expected a finite number"),
        (call(uniform, math.nan, 1), "lo is nan"),
        (call(uniform, "0", 1), "lo is '0'"),
        (call(uniform, False, 1), "lo is False"),
        (call(uniform, 0, 1, static="yes"), "static is 'yes'"),
        (call(log_uniform, 0, 1), "log_uniform: lo is 0.0; expected more than 0"),
        (call(log_uniform, -1, 1), "lo is -1.0"),
        (call(integer, 1, 2.0), "integer: hi is 2.0; expected an int"),
        (call(integer, True, 2), "lo is True"),
        (call(integer, 3, 3), "hi is 3; expected more than lo, 3"),
        (call(integer, 0, 2**53), "hi is 9007199254740992"),
        (call(integer, 0, 9, log=True), "lo is 0; expected at least 1 with log"),
        (call(integer, 1, 9, log=1), "log is 1; expected True or False"),
        (call(choice), r"choice: options is \(\)"),
        (call(choice, []), r"options is \(\)"),
        (call(choice, 1, 2, 1), "no two equal"),
        (call(choice, 1, 1.0), "no two equal"),
        (call(choice, 1, True), "no two equal"),
        (call(choice, 1, {2}), r"value \{2\} of type set"),
        (call(choice, 1, math.nan), "not finite"),
        (call(Space), "no dimensions"),
        (call(Space, width=[64, 128]), r"width is \[64, 128\].*choice\(\[64, 128\]"),
        (call(Space, width=np.ones(2)), "width has the value .* type ndarray"),
        (call(Space, items=uniform(0, 1)), "'items' cannot name an hparam"),
        (call(Space, total_steps=1), "'total_steps' cannot name an hparam"),
        (call(Space, **{"a b": 1}), "'a b' cannot name an hparam"),
        (call(Space, batch_size=choice(0, 8)), "batch_size is .* at least 1"),
        (call(Space, batch_size=uniform(1, 8)), "batch_size is uniform"),
        (call(Space, batch_size=32.0), "batch_size is 32.0; expected ints"),
        (call(Space, batch_size=True), "batch_size is True"),
        (call(Space, batch_size=integer(0, 2**40)), "batch_size is integer"),
        (call(Space, seed=integer(-1, 3)), "seed is integer.* at least 0"),
        (
            call(Space, seed=2**32),
            "seed is 4294967296; expected ints of at most 4294967295",
        ),
        (call(Space, seed=integer(0, 2**32)), "seed is integer.* at most 4294967295"),
        (call(Space, seed=choice(1, 2**32)), "seed is choice.* at most 4294967295"),
    ],
)
def test_refused_at_the_door(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_batch_size_and_seed_accept_their_ints():
    space = Space(batch_size=choice(16, 32), seed=integer(0, 2**31), model="mlp")
    assert list(space.dims) == ["batch_size", "seed", "model"]
    assert space.dims["model"] == Constant("mlp")


def test_dims_are_read_only_and_survive_pickling():
    with pytest.raises(TypeError):
        call(operator.setitem, BOTH.dims, "width", 3)()
    assert pickle.loads(pickle.dumps(BOTH)).sample(3, 1) == BOTH.sample(3, 1)


def test_reads_as_it_is_written():
    space = Space(
        a=uniform(0, 0.5, static=True),
        b=log_uniform(1e-4, 1),
        c=integer(1, 8, log=True),
        d=integer(1, 8, static=False),
        e=choice("x", "y", static=True),
        f=None,
    )
    assert repr(space) == (
        "Space(a=uniform(0.0, 0.5, static=True), b=log_uniform(0.0001, 1.0), "
        "c=integer(1, 8, log=True), d=integer(1, 8, static=False), "
        "e=choice('x', 'y', static=True), f=None)"
    )
    names = {"Space": Space, "uniform": uniform, "log_uniform": log_uniform}
    again = eval(repr(space), names | {"integer": integer, "choice": choice})
    assert dict(again.dims) == dict(space.dims)
    kinds = [Uniform, LogUniform, Integer, Integer, Choice, Constant]
    assert [type(dim) for dim in again.dims.values()] == kinds


def test_a_seed_gives_the_same_trials_everywhere():
    # Written down, so that another process, platform or version has to agree.
    drawn = BOTH.sample(3, seed=7)
    assert [hp["width"] for hp in drawn] == WIDTHS
    assert [hp["learning_rate"] for hp in drawn] == pytest.approx(RATES, rel=1e-12)


@pytest.mark.parametrize(
    "space",
    [
        BOTH,
        Space(width=integer(1, 50)),
        Space(width=integer(1, 1000, log=True), depth=choice(1, 2)),
    ],
    ids=repr,
)
def test_fewer_are_the_first_of_more(space):
    most = space.sample(3000, seed=3)
    for n in (0, 1, 5, 49, 50, 51, 2999):
        assert space.sample(n, seed=3) == most[:n]
    assert space.sample(5, seed=4) != most[:5]
    assert len(set(most)) == len(most) == min(3000, space.size or 3000)


def test_an_exhausted_space_gives_each_assignment_once():
    space = Space(a=choice("x", "y"), b=integer(1, 3), c=5)
    drawn = space.sample(49, seed=0)
    expected = {HParams({"a": a, "b": b, "c": 5}) for a in "xy" for b in (1, 2, 3)}
    assert len(drawn) == space.size == 6
    assert set(drawn) == expected
    assert list(drawn[0]) == ["a", "b", "c"]


def test_a_space_too_small_for_its_floats_ends():
    lo = 1.0
    hi = math.nextafter(lo, 2)
    drawn = Space(a=uniform(lo, hi)).sample(10, seed=0)
    assert sorted(hp.a for hp in drawn) == [lo, hi]


def test_size():
    assert Space(a=choice(1, 2, 3), b=integer(0, 9), c="x").size == 30
    assert Space(a=choice(1, 2, 3), b=uniform(0, 1)).size is None


@pytest.mark.parametrize("n", [-1, 2.0, True])
def test_how_many_is_an_int(n):
    with pytest.raises(ValueError, match=r"n is .* at least 0"):
        BOTH.sample(n, seed=0)


@pytest.mark.parametrize("seed", [-1, 1.5, None, "0"])
def test_the_seed_is_an_int(seed):
    with pytest.raises(ValueError, match=r"seed is .* at least 0"):
        BOTH.sample(1, seed)


def test_check_gives_what_the_space_would_have_drawn():
    space = Space(a=uniform(0, 2), b=choice(0, 0.5), c=integer(1, 9), d="x", e=True)
    given = {"e": True, "d": "x", "c": np.int64(3), "b": 0, "a": 1}
    checked = space.check(given)
    assert list(checked) == ["a", "b", "c", "d", "e"]
    assert dict(checked) == {"a": 1.0, "b": 0.0, "c": 3, "d": "x", "e": True}
    types = [float, float, int, str, bool]
    assert [type(value) for value in checked.values()] == types
    assert all(space.check(hp) == hp for hp in space.sample(20, seed=0))


@pytest.mark.parametrize("given", [None, "ab", [1], {3: 1}])
def test_check_refuses_what_maps_no_names(given):
    with pytest.raises(ValueError, match=r"hparams is |has no hparam 3"):
        BOTH.check(given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"widht": 64}, "no hparam 'widht'; expected 'width'"),
        ({"zzz": 64}, "no hparam 'zzz'; expected one of learning_rate, width"),
        ({"width": 96}, r"width is 96; expected a value of choice\(64, 128\)"),
        ({"width": 64.0}, "width is 64.0"),
        ({"learning_rate": 0.2}, "learning_rate is 0.2; expected a value of log_uni"),
        ({"learning_rate": "0.01"}, "learning_rate is '0.01'"),
        ({"learning_rate": math.nan}, "learning_rate has the value nan"),
        ({"flag": 1}, "flag is 1; expected a value of choice"),
        ({"count": True}, "count is True; expected a value of integer"),
    ],
)
def test_check_refuses(change, words):
    space = Space(**BOTH.dims, flag=choice(True, False), count=integer(0, 3))
    good = {"learning_rate": 0.01, "width": 64, "flag": True, "count": 1}
    assert space.check(good) == good
    with pytest.raises(ValueError, match=words):
        space.check(good | change)


def test_check_names_what_is_missing():
    with pytest.raises(ValueError, match="lack learning_rate, width"):
        BOTH.check({})


# Properties.

SCALARS = st.integers(-3, 3) | st.sampled_from(["a", "b", 0.5, None])


@st.composite
def dimensions(draw: Any) -> Any:
    """A dimension of any kind, small or without end."""
    lo = draw(st.integers(1, 50))
    hi = lo + draw(st.integers(1, 50))
    return draw(
        st.sampled_from(
            [
                uniform(lo, hi),
                log_uniform(lo, hi),
                integer(lo, hi),
                integer(lo, hi, log=True),
                Constant(lo),
            ]
        )
        | st.lists(SCALARS, min_size=1, max_size=4, unique=True).map(choice)
    )


@st.composite
def spaces(draw: Any) -> Space:
    """A space whose dimensions depend on a choice, and these on another."""
    first, second = integer(0, draw(st.integers(1, 3))), integer(0, 1)
    more = {name: draw(dimensions()) for name in draw(st.sets(st.sampled_from("xy")))}
    inner = when(b=1)(c=draw(dimensions()))
    outer = when(a=draw(st.sampled_from([0, 1, (0, 1)])))
    conditions = [outer(b=second, d=draw(dimensions())), inner]
    return Space(*conditions[: draw(st.integers(0, 2))], a=first, **more)


@settings(max_examples=50, deadline=None)
@given(spaces(), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_whatever_the_space_what_is_drawn_is_of_it(space, n, seed):
    drawn = space.sample(n, seed)
    assert len(drawn) == (n if space.size is None else min(n, space.size))
    assert len(set(drawn)) == len(drawn)
    assert space.sample(n, seed) == drawn == space.sample(n + 7, seed)[:n]
    for hp in drawn:
        dims = space.dims_of(hp)
        assert list(dims) == list(hp)
        assert all(dim.contains(hp[name]) for name, dim in dims.items())
        assert space.check(dict(reversed(list(hp.items())))) == hp
        for condition in space.conditions:
            assert condition.holds(hp) == (condition.dims.keys() <= hp.keys())
    assert json.loads(json.dumps(space.describe())) == space.describe()
