"""Schedulers: the plans, by hand and by property, and the state while they run."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpack.schedulers import (
    Assignment,
    Brackets,
    Hyperband,
    RandomSearch,
    SuccessiveHalving,
    promote,
)

NAN, INF = math.nan, math.inf
SCHEDULERS = [
    Hyperband(27),
    Hyperband(16, reduction_factor=2, min_resource=3),
    Hyperband(9, repeats=2, unit="steps"),
    SuccessiveHalving(20, max_resource=30),
    SuccessiveHalving(2, max_resource=81, reduction_factor=4),
    RandomSearch(7, max_resource=5),
]


def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call to be made later, of whatever the types."""
    return functools.partial(function, *args, **kwargs)


def run(state, score, pick=lambda waiting: waiting[0]):
    """Runs a scheduler to its end; `score(trial, rung)` says how a trial did.

    Returns the assignments in the order in which they were carried out.
    """
    waiting, carried_out = state.ready(), []
    while waiting:
        now = pick(waiting)
        waiting.remove(now)
        carried_out.append(now)
        waiting += state.report(now.trial_id, score(now.trial_id, now.rung))
    return carried_out


def draw(trial, rung):
    """A score with no pattern, the same whenever it is asked for."""
    return random.Random(1000 * trial + rung).random()


# The plans.


def test_hyperband_81_is_the_table_of_the_paper():
    assert Hyperband(81).brackets() == (
        ((81, 1), (27, 3), (9, 9), (3, 27), (1, 81)),  # s = 4: ceil(5 * 81 / 5)
        ((34, 3), (11, 9), (3, 27), (1, 81)),  # s = 3: ceil(5 * 27 / 4) = ceil(33.75)
        ((15, 9), (5, 27), (1, 81)),  # s = 2: ceil(5 * 9 / 3)
        ((8, 27), (2, 81)),  # s = 1: ceil(5 * 3 / 2) = ceil(7.5)
        ((5, 81),),  # s = 0: 5
    )


def test_hyperband_8_halves():
    assert Hyperband(8, reduction_factor=2).brackets() == (
        ((8, 1), (4, 2), (2, 4), (1, 8)),  # s = 3: ceil(4 * 8 / 4)
        ((6, 2), (3, 4), (1, 8)),  # s = 2: ceil(4 * 4 / 3) = ceil(5.33)
        ((4, 4), (2, 8)),  # s = 1: ceil(4 * 2 / 2)
        ((4, 8),),  # s = 0: 4
    )


def test_hyperband_with_a_least_resource():
    assert Hyperband(81, min_resource=3).brackets() == (
        ((27, 3), (9, 9), (3, 27), (1, 81)),  # s = 3: 3 * 3**3 <= 81
        ((12, 9), (4, 27), (1, 81)),
        ((6, 27), (2, 81)),
        ((4, 81),),
    )


def test_hyperband_where_no_power_fits():
    assert Hyperband(10).brackets() == (
        ((9, 1), (3, 3), (1, 10)),  # 10 // 9, 30 // 9, 90 // 9
        ((5, 3), (1, 10)),
        ((3, 10),),
    )
    assert Hyperband(1).brackets() == (((1, 1),),)


@pytest.mark.parametrize(
    ("max_resource", "trials", "resource"),
    [(9, 17, 69), (27, 49, 357), (81, 143, 1581), (243, 415, 6831), (729, 1214, 27120)],
)
def test_hyperband_totals(max_resource, trials, resource):
    scheduler = Hyperband(max_resource)
    assert scheduler.num_trials == trials
    assert scheduler.total_resource() == resource


def test_training_afresh_at_every_rung_costs_more():
    # 9*1 + 3*3 + 1*9, 5*3 + 1*9, 3*9
    assert Hyperband(9).total_resource(resume=False) == 27 + 24 + 27
    assert RandomSearch(7, 5).total_resource(resume=False) == 35


@pytest.mark.parametrize(
    ("max_resource", "eta", "brackets"),
    # A floating logarithm loses a bracket in both.
    [(243, 3, 6), (242, 3, 5), (1000, 10, 4), (999, 10, 3)],
)
def test_number_of_brackets(max_resource, eta, brackets):
    assert len(Hyperband(max_resource, reduction_factor=eta).brackets()) == brackets


@pytest.mark.parametrize("eta", range(2, 11))
def test_every_hyperband_is_sound(eta):
    for max_resource in range(1, 1001):
        brackets = Hyperband(max_resource, reduction_factor=eta).brackets()
        s_max = len(brackets) - 1
        assert eta**s_max <= max_resource < eta ** (s_max + 1)
        for s, bracket in zip(range(s_max, -1, -1), brackets, strict=True):
            trials, resources = zip(*bracket, strict=True)
            assert len(bracket) == s + 1
            assert trials[0] * (s + 1) >= (s_max + 1) * eta**s
            assert (trials[0] - 1) * (s + 1) < (s_max + 1) * eta**s
            for more, fewer in itertools.pairwise(trials):
                assert fewer == more // eta >= 1
            assert resources[0] >= 1
            assert all(a < b for a, b in itertools.pairwise(resources))
            assert resources[-1] == max_resource


@pytest.mark.parametrize("least", [2, 3, 7, 10])
@pytest.mark.parametrize("eta", [2, 3, 10])
def test_no_rung_is_below_the_least_resource(eta, least):
    for max_resource in range(least, 300):
        brackets = Hyperband(max_resource, eta, least).brackets()
        s_max = len(brackets) - 1
        assert least * eta**s_max <= max_resource < least * eta ** (s_max + 1)
        assert all(least <= bracket[0][1] for bracket in brackets)
        assert all(bracket[-1][1] == max_resource for bracket in brackets)


def test_repeats_add_brackets_at_the_end():
    once, twice = Hyperband(9), Hyperband(9, repeats=2)
    assert twice.brackets() == once.brackets() * 2
    assert (twice.num_trials, twice.total_resource()) == (34, 138)


def test_successive_halving():
    assert SuccessiveHalving(20, max_resource=30).brackets() == (
        ((20, 1), (6, 3), (2, 10), (1, 30)),  # 30 // 27, 90 // 27, 270 // 27
    )
    assert SuccessiveHalving(5, 81, min_resource=9).brackets() == (
        ((5, 9), (1, 27), (1, 81)),
    )
    assert SuccessiveHalving(20, max_resource=9).total_resource() == 20 + 12 + 12


def test_random_search():
    scheduler = RandomSearch(7, max_resource=5)
    assert scheduler.brackets() == (((7, 5),),)
    assert scheduler.total_resource() == 35


def test_the_plan_can_be_read():
    assert str(Hyperband(9)) == (
        "Hyperband: 17 trials, 69 epochs in 3 brackets\n"
        "rung  bracket 0  bracket 1  bracket 2\n"
        "   0      9 x 1      5 x 3      3 x 9\n"
        "   1      3 x 3      1 x 9\n"
        "   2      1 x 9"
    )
    assert "in 9 brackets (these, 3 times)\n" in str(Hyperband(9, repeats=3))
    assert str(RandomSearch(700000, 200000, unit="steps")) == (
        "RandomSearch: 700000 trials, 140000000000 steps in 1 bracket\n"
        "rung        bracket 0\n"
        "   0  700000 x 200000"
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (call(Hyperband, 0), "max_resource is 0; expected an int of at least 1"),
        (call(Hyperband, 27.0), "max_resource is 27.0"),
        (call(Hyperband, "27"), "max_resource is '27'"),
        (call(Hyperband, True), "max_resource is True"),
        (call(Hyperband, 8, min_resource=9), "max_resource is 8; .* at least 9"),
        (call(Hyperband, 8, min_resource=0), "min_resource is 0"),
        (call(Hyperband, 8, reduction_factor=1), "reduction_factor is 1"),
        (call(Hyperband, 8, reduction_factor=2.5), "reduction_factor is 2.5"),
        (call(Hyperband, 8, repeats=0), "repeats is 0"),
        (call(Hyperband, 8, unit="hours"), "unit is 'hours'; .* 'epochs' or 'steps'"),
        (call(SuccessiveHalving, 0, 8), "num_trials is 0"),
        (call(SuccessiveHalving, 8, 2, min_resource=3), "max_resource is 2"),
        (call(SuccessiveHalving, 8, 2, reduction_factor=1), "reduction_factor is 1"),
        (call(SuccessiveHalving, 8, 2, min_resource=0), "min_resource is 0"),
        (call(SuccessiveHalving, 8, 2, unit=None), "unit is None"),
        (call(RandomSearch, 0, 8), "num_trials is 0"),
        (call(RandomSearch, 8, 1.5), "max_resource is 1.5"),
        (call(RandomSearch, 8, 1, unit="epoch"), "unit is 'epoch'"),
        (call(Hyperband(9).start, "minimum"), "mode is 'minimum'; .*'min' or 'max'"),
        (call(Hyperband(9).start, "min", 0), "num_trials is 0"),
        (call(Hyperband(9).start, "min", 18), "num_trials is 18; .* at most 17"),
    ],
)
def test_refused_at_the_door(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# Promotion.


@pytest.mark.parametrize(
    ("scores", "k", "mode", "expected"),
    [
        ([0.3, 0.1, 0.5, 0.2], 2, "min", [1, 3]),
        ([0.3, 0.1, 0.5, 0.2], 2, "max", [2, 0]),
        ([0.3, NAN, 0.5, 0.1], 2, "min", [3, 0]),
        ([0.3, NAN, 0.5, 0.1], 2, "max", [2, 0]),
        ([INF, -INF, 0.5, NAN], 3, "min", [2]),
        ([INF, -INF, 0.5, NAN], 3, "max", [2]),
        ([NAN, INF, -INF], 2, "max", []),
        ([0.2, 0.1, 0.2, 0.2], 3, "min", [1, 0, 2]),
        ([0.2, 0.1, 0.2, 0.2], 2, "max", [0, 2]),
        ([0.0, -0.0, -1.0], 2, "max", [0, 1]),
        ([0.1, 0.2], 5, "max", [1, 0]),
        ([0.1, 0.2], 0, "max", []),
        ([], 3, "max", []),
        ([np.float32(0.1), np.array(0.3), 1], 2, "min", [0, 1]),
    ],
)
def test_promote(scores, k, mode, expected):
    # The order of the mapping is not that of the ids: ties must not follow it.
    mapping = dict(reversed(list(enumerate(scores))))
    assert promote(mapping, k, mode) == expected


@pytest.mark.parametrize(
    ("scores", "k", "mode", "words"),
    [
        ({0: 1.0}, -1, "min", "k is -1"),
        ({0: 1.0}, 1.0, "min", "k is 1.0"),
        ({0: 1.0}, 1, "best", "mode is 'best'"),
        ({0: 1.0, 4: None}, 1, "min", "score of trial 4 is None"),
        ({0: "good"}, 1, "min", "score of trial 0 is 'good'"),
        ({0: [1.0, 2.0]}, 1, "min", "score of trial 0 is"),
    ],
)
def test_promote_refuses(scores, k, mode, words):
    with pytest.raises(ValueError, match=words):
        promote(scores, k, mode)


# The state while it runs.


def test_a_bracket_from_start_to_end():
    state = Brackets((((4, 1), (2, 3), (1, 9)),), "max")
    assert state.ready() == [Assignment(i, 0, 0, 1, 9) for i in range(4)]
    assert state.report(2, 0.4) == state.report(0, 0.1) == state.report(3, 0.2) == []
    assert state.statuses == {0: "PAUSED", 1: "RUNNING", 2: "PAUSED", 3: "PAUSED"}
    assert state.report(1, 0.3) == [
        Assignment(2, 0, 1, 3, 8),
        Assignment(1, 0, 1, 3, 8),
    ]
    assert state.statuses == {0: "STOPPED", 1: "RUNNING", 2: "RUNNING", 3: "STOPPED"}
    assert state.report(2, 0.5) == []
    assert state.report(1, 0.6) == [Assignment(1, 0, 2, 9, 6)]
    assert not state.done
    assert state.report(1, 0.0) == []
    assert state.done
    assert state.statuses == {0: "STOPPED", 1: "COMPLETE", 2: "STOPPED", 3: "STOPPED"}
    assert [state.rung_of(trial) for trial in range(4)] == [0, 2, 1, 0]


def test_ids_are_in_order_and_distinct_across_brackets():
    state = Hyperband(9, repeats=2).start("min")
    ready = state.ready()
    assert [now.trial_id for now in ready] == list(range(34))
    sizes = [9, 5, 3, 9, 5, 3]
    brackets = [index for index, size in enumerate(sizes) for _ in range(size)]
    assert [now.bracket for now in ready] == brackets
    assert [state.bracket_of(trial) for trial in range(34)] == brackets


def test_a_bracket_does_not_wait_for_the_others():
    state = Brackets((((2, 1), (1, 2)), ((2, 1), (1, 2))), "min")
    assert state.report(2, 0.5) == []
    assert [now.trial_id for now in state.report(3, 0.1)] == [3]
    assert state.report(3, 0.1) == []
    assert not state.done
    assert [now.trial_id for now in state.ready()] == [0, 1]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=repr)
def test_a_run_takes_exactly_what_was_planned(scheduler, mode):
    state = scheduler.start(mode)
    picker = random.Random(0)
    trained = dict.fromkeys(range(scheduler.num_trials), 0)
    restarted = 0
    counts = {}
    for now in run(state, draw, pick=picker.choice):
        bracket = scheduler.brackets()[now.bracket]
        assert now.resource == bracket[now.rung][1] > trained[now.trial_id]
        assert now.remaining == scheduler.max_resource - trained[now.trial_id]
        trained[now.trial_id] = now.resource
        restarted += now.resource
        counts[now.bracket, now.rung] = counts.get((now.bracket, now.rung), 0) + 1
    assert sum(trained.values()) == scheduler.total_resource()
    assert restarted == scheduler.total_resource(resume=False)
    assert counts == {
        (index, rung): trials
        for index, bracket in enumerate(scheduler.brackets())
        for rung, (trials, _) in enumerate(bracket)
    }
    assert state.done
    statuses = state.statuses
    assert set(statuses.values()) <= {"COMPLETE", "STOPPED"}
    finished = [t for t, resource in trained.items() if statuses[t] == "COMPLETE"]
    assert finished == [t for t, r in trained.items() if r == scheduler.max_resource]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_who_is_promoted_does_not_depend_on_the_order_of_reports(mode):
    def score(trial, rung):
        value = round(draw(trial, rung), 1)  # so that there are ties
        return NAN if value == 0.3 else value

    outcomes = []
    for seed in range(5):
        state = Hyperband(27).start(mode)
        done = run(state, score, pick=random.Random(seed).choice)
        outcomes.append((sorted(done), dict(state.statuses)))
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_failed_trial_is_never_promoted(mode, bad):
    state = Hyperband(9).start(mode)
    done = run(state, lambda trial, _: bad if trial < 8 else float(trial))
    # Of the nine of bracket 0 one is left, although three are wanted.
    assert [now for now in done if now.trial_id < 8 and now.rung] == []
    assert [now.rung for now in done if now.trial_id == 8] == [0, 1, 2]
    assert [state.statuses[trial] for trial in range(8)] == ["FAILED"] * 8
    assert state.statuses[8] == "COMPLETE"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_bracket_that_fails_altogether_ends(mode):
    state = Hyperband(9).start(mode)
    done = run(state, lambda trial, _: NAN if trial < 9 else float(trial))
    assert state.done
    assert len([now for now in done if now.bracket == 0]) == 9
    statuses = [state.statuses[trial] for trial in range(17)]
    assert statuses[:9] == ["FAILED"] * 9
    assert statuses.count("COMPLETE") == 4

    everyone = Hyperband(9).start(mode)
    assert len(run(everyone, lambda *_: NAN)) == 17
    assert everyone.done
    assert everyone.ready() == []


def test_failing_at_a_later_rung():
    state = Brackets((((3, 1), (2, 3), (1, 9)),), "min")
    done = run(state, lambda trial, rung: NAN if rung else float(trial))
    assert [(now.trial_id, now.rung) for now in done][3:] == [(0, 1), (1, 1)]
    assert state.statuses == {0: "FAILED", 1: "FAILED", 2: "STOPPED"}
    last = Brackets((((1, 9),),), "min")
    assert last.report(0, NAN) == []
    assert last.statuses == {0: "FAILED"}


def test_each_trial_reports_once_a_rung():
    state = Brackets((((3, 1), (1, 3)),), "min")
    state.report(0, 0.1)
    for trial, words in ((0, "0, which is PAUSED"), (3, "3, which is unknown")):
        with pytest.raises(ValueError, match=f"trial_id is {words}"):
            state.report(trial, 0.5)
    with pytest.raises(ValueError, match="score of trial 1 is None"):
        call(state.report, 1, None)()
    state.report(1, NAN)  # what was refused has left no trace
    assert [now.trial_id for now in state.report(2, 0.2)] == [0]
    state.report(0, 0.3)
    for trial, status in enumerate(("COMPLETE", "FAILED", "STOPPED")):
        with pytest.raises(ValueError, match=f"which is {status}"):
            state.report(trial, 0.5)


def test_ready_after_some_reports_is_what_is_left():
    state = Hyperband(9).start("min")
    waiting = state.ready()
    for _ in range(14):
        now = waiting.pop(0)
        waiting += state.report(now.trial_id, draw(now.trial_id, now.rung))
        assert state.ready() == sorted(waiting)


def test_statuses_cannot_be_changed_from_outside():
    with pytest.raises(TypeError):
        call(operator.setitem, Hyperband(9).start("min").statuses, 0, "COMPLETE")()


@pytest.mark.parametrize(
    ("num_trials", "plan"),
    [
        (17, (((9, 1), (3, 3), (1, 9)), ((5, 3), (1, 9)), ((3, 9),))),
        (15, (((9, 1), (3, 3), (1, 9)), ((5, 3), (1, 9)), ((1, 9),))),
        (14, (((9, 1), (3, 3), (1, 9)), ((5, 3), (1, 9)))),
        (10, (((9, 1), (3, 3), (1, 9)), ((1, 3), (1, 9)))),
        (2, (((2, 1), (2, 3), (1, 9)),)),
        (1, (((1, 1), (1, 3), (1, 9)),)),
    ],
)
def test_fewer_trials_than_planned(num_trials, plan):
    state = Hyperband(9).start("max", num_trials)
    assert state.plan == plan
    done = run(state, draw)
    assert state.done
    assert {now.trial_id for now in done} == set(range(num_trials))
    assert len(done) == sum(trials for bracket in plan for trials, _ in bracket)


def test_rungs_left_short_by_failures_are_counted_as_they_are():
    state = Hyperband(9).start("max")
    scores = {trial: (0.5 if trial < 2 else math.nan) for trial in range(9)}
    for trial, score in scores.items():
        state.report(trial, score)
    first = [rung for rung in state.rungs() if rung.bracket == 0]
    assert [(r.num_trials, r.num_done, r.step) for r in first] == [
        (9, 9, 1),
        (2, 0, 2),  # Three were planned.
        (1, 0, 6),
    ]
    while not state.done:
        for now in state.ready():
            state.report(now.trial_id, 0.5)
    assert all(rung.num_trials == rung.num_done for rung in state.rungs())


# Properties.


@st.composite
def schedulers(draw: Any) -> Any:
    """A scheduler of any kind that has not too many trials."""
    least = draw(st.integers(1, 3))
    eta = draw(st.integers(2, 5))
    most = draw(st.integers(least, 30))
    trials, unit = draw(st.integers(1, 20)), draw(st.sampled_from(["epochs", "steps"]))
    return draw(
        st.sampled_from(
            [
                Hyperband(most, eta, least, unit, repeats=draw(st.integers(1, 2))),
                SuccessiveHalving(trials, most, eta, least, unit),
                RandomSearch(trials, most, unit),
            ]
        )
    )


SCORES = st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0, NAN, INF, -INF])


@settings(max_examples=50, deadline=None)
@given(schedulers(), st.sampled_from(["min", "max"]), st.randoms(), st.data())
def test_whatever_the_scores_and_their_order(scheduler, mode, chance, data):
    most = data.draw(st.integers(1, scheduler.num_trials))
    scores = {}

    def score(trial, rung):
        if (trial, rung) not in scores:
            scores[trial, rung] = data.draw(SCORES)
        return scores[trial, rung]

    state = scheduler.start(mode, most)
    done = run(state, score, pick=chance.choice)
    other = scheduler.start(mode, most)
    assert sorted(run(other, score, pick=chance.choice)) == sorted(done)
    assert dict(other.statuses) == dict(state.statuses)
    # Replayed from the start, any part of it leaves what was left then.
    part = data.draw(st.integers(0, len(done)))
    again = scheduler.start(mode, most)
    for now in done[:part]:
        again.report(now.trial_id, scores[now.trial_id, now.rung])
    assert {(x.trial_id, x.rung) for x in again.ready()} <= {
        (x.trial_id, x.rung) for x in done[part:]
    }
    assert again.done == (part == len(done))

    trained, trial_had = 0, dict.fromkeys(range(most), 0)
    for now in sorted(done, key=lambda x: x.rung):
        assert type(now.resource) is type(now.remaining) is int
        assert now.resource > trial_had[now.trial_id]
        trained += now.resource - trial_had[now.trial_id]
        trial_had[now.trial_id] = now.resource
    assert state.done and trained <= scheduler.total_resource()
    if most == scheduler.num_trials and all(map(math.isfinite, scores.values())):
        assert trained == scheduler.total_resource()
    for trial, status in state.statuses.items():
        last = scores[trial, state.rung_of(trial)]
        assert (status == "FAILED") == (not math.isfinite(last))
        reached = trial_had[trial] == scheduler.max_resource
        assert (status == "COMPLETE") == (reached and status != "FAILED")
    for index, bracket in enumerate(state.plan):
        for rung in range(1, len(bracket)):
            before = {t: s for (t, r), s in scores.items() if r == rung - 1}
            mine = {t: s for t, s in before.items() if state.bracket_of(t) == index}
            went_on = {x.trial_id for x in done if x[1:3] == (index, rung)}
            assert went_on == set(promote(mine, bracket[rung][0], mode))


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 10**18), st.integers(2, 10**6), st.integers(1, 10**9), st.booleans()
)
def test_whatever_the_size_the_numbers_are_whole_and_exact(most, eta, least, shrink):
    most = max(most, least)
    if shrink:  # To a power, where a logarithm of floats goes wrong.
        most = least * eta ** max(0, int(math.log(most / least, eta)))
    brackets = Hyperband(most, eta, least).brackets()
    s_max = len(brackets) - 1
    assert least * eta**s_max <= most < least * eta ** (s_max + 1)
    for s, bracket in zip(range(s_max, -1, -1), brackets, strict=True):
        assert {type(number) for rung in bracket for number in rung} == {int}
        assert bracket[0][0] == -(-(s_max + 1) * eta**s // (s + 1))
        assert bracket[0][1] >= least and bracket[-1][1] == most
