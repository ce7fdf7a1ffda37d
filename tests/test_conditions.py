"""Hparams that only some trials have: drawn, counted, checked, refused."""

from __future__ import annotations

import functools
import json
import pickle
from collections import Counter
from typing import Any

import optax
import pytest

import jaxpack as jp
from jaxpack.types import HParams

ZOO = jp.Space(
    jp.when(model="resnet")(depth=jp.choice(8, 14)),
    jp.when(model=("mlp", "mobilenet"))(width=jp.uniform(0.5, 2.0)),
    jp.when(model="mlp")(depth=jp.integer(1, 3), dropout=jp.uniform(0, 0.5)),
    model=jp.choice("mlp", "resnet", "mobilenet"),
    learning_rate=jp.log_uniform(1e-4, 1e-1),
)
NAMES = {
    "mlp": ["model", "learning_rate", "width", "depth", "dropout"],
    "resnet": ["model", "learning_rate", "depth"],
    "mobilenet": ["model", "learning_rate", "width"],
}
NESTED = jp.Space(
    jp.when(a=(1, 2))(b=jp.choice("x", "y", "z")),
    jp.when(a=3)(b=jp.choice("x", "w")),
    jp.when(a=1, b=("x", "y"))(c=jp.integer(1, 4)),
    jp.when(b="w")(c=True),
    a=jp.integer(0, 9),
    d=jp.choice(0, 1),
)


def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call to be made later, of whatever the types."""
    return functools.partial(function, *args, **kwargs)


def space(*entries: Any, **dims: Any) -> Any:
    """A space to be made later, of a choice, an interval and what is given."""
    more = {"a": jp.choice(0, 1), "r": jp.uniform(0, 1)} | dims
    return functools.partial(jp.Space, *entries, **more)


def test_a_trial_has_only_what_is_active():
    trials = ZOO.sample(200, seed=0)
    assert all(list(hp) == NAMES[hp.model] for hp in trials)
    depths = {
        model: {hp.depth for hp in trials if hp.model == model}
        for model in ("mlp", "resnet")
    }
    assert depths == {"mlp": {1, 2, 3}, "resnet": {8, 14}}
    for hp in trials:
        assert ZOO.check(hp) == hp
        assert all(dim.contains(hp[n]) for n, dim in ZOO.dims_of(hp).items())
        assert list(ZOO.dims_of(hp)) == list(hp)
    assert ZOO.sample(50, seed=0) == trials[:50]
    # Each model is as likely, however much depends on it.
    counts = Counter(hp.model for hp in ZOO.sample(3000, seed=1))
    assert all(abs(count - 1000) < 120 for count in counts.values())


def test_what_every_trial_has_is_drawn_as_without_conditions():
    plain = jp.Space(**ZOO.dims)
    assert [hp.model for hp in plain.sample(1, 5)] == [ZOO.sample(1, 5)[0].model]
    more = jp.Space(
        *ZOO.conditions[:2],
        jp.when(model="mlp")(depth=jp.integer(1, 9), dropout=jp.choice(0.1, 0.2)),
        **ZOO.dims,
    )
    shared = [
        [(hp.model, hp.learning_rate) for hp in s.sample(40, 3)] for s in (ZOO, more)
    ]
    assert shared[0] == shared[1]


def test_duplicates_are_told_by_what_is_active():
    finite = jp.Space(
        jp.when(a=1)(b=jp.integer(1, 3)), a=jp.choice(0, 1), seed=jp.choice(5, 6)
    )
    trials = finite.sample(100, seed=0)
    assert len(set(trials)) == len(trials) == finite.size == 8
    assert sum("b" in hp for hp in trials) == 6


def test_an_end_to_one_branch_is_not_the_end_of_all():
    half = jp.Space(jp.when(a=1)(b=jp.uniform(0, 1)), a=jp.choice(0, 1))
    assert half.size is None
    trials = half.sample(50, seed=0)
    assert len(trials) == 50 and [len(hp) for hp in trials].count(1) == 1


def test_conditions_on_conditional_hparams():
    trials = NESTED.sample(1000, seed=0)
    expected = [
        {"a": a, "d": d}
        | ({} if b is None else {"b": b})
        | ({} if c is None else {"c": c})
        for d in (0, 1)
        for a in range(10)
        for b in {1: "xyz", 2: "xyz", 3: "xw"}.get(a, [None])
        for c in (
            [1, 2, 3, 4]
            if a == 1 and b in ("x", "y")
            else [True]
            if b == "w"
            else [None]
        )
    ]
    assert len(trials) == NESTED.size == len(expected)
    assert set(trials) == {HParams(values) for values in expected}


def test_an_inactive_hparam_is_an_unknown_one_and_says_why():
    hp = next(hp for hp in ZOO.sample(50, seed=0) if hp.model == "mobilenet")
    message = "no hparam 'depth' here: it comes with model='resnet' or model='mlp'"
    with pytest.raises(AttributeError, match=message):
        _ = hp.depth
    with pytest.raises(KeyError, match="it comes with model='mlp'"):
        _ = hp["dropout"]
    assert hp.get("depth", 3) == getattr(hp, "depth", 3) == 3
    assert "depth" not in hp
    with pytest.raises(AttributeError, match="did you mean 'width'"):
        _ = hp.widht
    assert ZOO.check(dict(hp)).inactive_ == hp.inactive_


def test_the_users_model_is_told_why(tiny_dataset):
    def model(hp):
        return jp.models.MLP(width=8, depth=hp.depth)

    task = jp.Task(model, lambda hp: optax.sgd(0.1), tiny_dataset)
    one = jp.Space(jp.when(a=1)(depth=jp.choice(1, 2)), a=jp.choice(0, 1))
    with pytest.raises(AttributeError, match="it comes with a=1"):
        jp.explain(task, one, jp.RandomSearch(3, 1))


def test_reads_as_it_is_written():
    for each in (ZOO, NESTED):
        names = {name: getattr(jp, name) for name in jp.__all__}
        again = eval(repr(each), names)
        assert repr(again) == repr(each)
        assert again.conditions == each.conditions
        assert again.sample(20, 1) == pickle.loads(pickle.dumps(each)).sample(20, 1)
    assert repr(ZOO).startswith("Space(when(model='resnet')(depth=choice(8, 14)), ")


def test_described_for_files():
    described = json.loads(json.dumps(ZOO.describe()))
    assert described == {
        "model": "choice('mlp', 'resnet', 'mobilenet')",
        "learning_rate": "log_uniform(0.0001, 0.1)",
        "when(model='resnet')": {"depth": "choice(8, 14)"},
        "when(model=('mlp', 'mobilenet'))": {"width": "uniform(0.5, 2.0)"},
        "when(model='mlp')": {"depth": "integer(1, 3)", "dropout": "uniform(0.0, 0.5)"},
    }


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (call(jp.when), r"when\(\) names no hparam"),
        (call(jp.when, a=()), r"when\(a=\(\)\) has no value"),
        (call(jp.when, a={1}), r"value \{1\} of type set"),
        (call(jp.when(a=1)), r"when\(a=1\) has no dimensions"),
        (call(jp.when(a=1), b=[1, 2]), r"b is \[1, 2\].*choice\(\[1, 2\]"),
        (call(jp.when(a=1), batch_size=0.5), "batch_size is 0.5; expected ints"),
        (space(jp.when(a=1)), "has the entry <function.*expected dimensions by name"),
        (space({"b": 1}), "has the entry {'b': 1}"),
        (call(jp.Space, jp.when(a=1)(b=2)), r"Space\(\) has no dimensions"),
        (
            space(jp.when(aa=1)(b=2)),
            r"when\(aa=1\).* no hparam 'aa' before; expected 'a'",
        ),
        (space(jp.when(z=1)(b=2)), "expected one of a, r"),
        (space(jp.when(a=2)(b=2)), r"when\(a=2\): a is never 2; .* choice\(0, 1\)"),
        (space(jp.when(a=True)(b=2)), "a is never True"),
        (space(jp.when(r=0.5)(b=2)), r"r is uniform\(0.0, 1.0\); expected a choice"),
        (space(jp.when(a=1)(a=2)), r"when\(a=1\)\(a=2\) gives a to trials that have"),
        (
            space(jp.when(a=(0, 1))(b=2), jp.when(a=1)(b=3)),
            r"when\(a=1\)\(b=3\) gives b to trials that have it already",
        ),
        (
            space(jp.when(a=1)(b=2), jp.when(c=5)(b=3), c=jp.choice(5, 6)),
            "gives b to trials that have it already",
        ),
        (
            space(jp.when(b=2)(c=3), jp.when(a=1)(b=2)),
            "no hparam 'b' before; expected one of a, r",
        ),
        (
            space(jp.when(a=1)(b=2), jp.when(a=0, b=2)(c=3)),
            r"when\(a=0, b=2\)\(c=3\) never holds",
        ),
    ],
)
def test_refused_at_the_door(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a": 1, "r": 0.5}, r"lack b; .* of the space with a=1"),
        ({"a": 0, "r": 0.5, "b": 3}, "have b, which only trials with a=1 have"),
        ({"a": 1, "r": 0.5, "b": 4}, r"b is 4; expected a value of choice\(2, 3\)"),
        ({"a": 0, "r": 0.5, "bb": 3}, "no hparam 'bb'; expected 'b'"),
        ({"r": 0.5, "b": 3}, "lack a;"),
    ],
)
def test_check_refuses(given, words):
    with pytest.raises(ValueError, match=words):
        space(jp.when(a=1)(b=jp.choice(2, 3)))().check(given)


def test_check_gives_what_the_space_would_have_drawn():
    made = space(jp.when(a=1)(b=jp.choice(2.0, 3.5)))()
    checked = made.check({"b": 2, "r": 1, "a": 1})
    assert list(checked) == ["a", "r", "b"]
    assert [type(value) for value in checked.values()] == [int, float, float]
