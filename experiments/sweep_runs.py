"""Whole Hyperband sweeps, run and timed one way or another.

A sweep is a model, a data set and Hyperband's `R`. `time_baseline` trains its trials
one at a time, `time_library` with jaxpack: across brackets, as `jp.sweep` does, or
within rungs, with a barrier after each.
"""

from __future__ import annotations

import collections
import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import jaxpack as jp
from experiments import baselines, models
from jaxpack import executables
from jaxpack.explain import draw, plan_sweep
from jaxpack.schedulers import Scheduler
from jaxpack.train import make_ready
from jaxpack.worker import Pool

SPACE = jp.Space(
    learning_rate=jp.log_uniform(1e-3, 3e-2),
    momentum=jp.uniform(0.5, 0.95),
    weight_decay=jp.log_uniform(1e-6, 1e-2),
    dropout=jp.uniform(0.0, 0.5),
)


class Sweep(NamedTuple):
    """A sweep to time.

    Attributes:
      model: `model(hp)`.
      max_resource: Hyperband's `R`, in epochs.
      dataset: Name of the data set.
    """

    model: Callable[[Any], Any]
    max_resource: int
    dataset: str = "mnist5k"

    def problem(self) -> models.Problem:
        """What it trains, on as many examples as fill whole batches of 32."""
        data = jp.data.load(self.dataset)
        x, y = data.train
        whole = len(x) // 32 * 32
        dataset = jp.data.Dataset.from_arrays(
            (x[:whole], y[:whole]), data.validation, name=data.name
        )
        return models.Problem(self.model, optimizer, dataset)


def mlp(hp: Any) -> models.MLP:
    """784-128-128-10."""
    return models.MLP((128, 128), hp.dropout)


def small_mlp(hp: Any) -> models.MLP:
    """64-128-64-10, for the 8x8 digits."""
    return models.MLP((128, 64), hp.dropout)


def cnn(hp: Any) -> models.CNN:
    """Convolutions of 8 and 16 channels and a dense layer of 32."""
    return models.CNN((8, 16), 32, hp.dropout)


def optimizer(hp: Any) -> optax.GradientTransformation:
    """SGD with momentum and weight decay."""
    return optax.chain(
        optax.add_decayed_weights(hp.weight_decay),
        optax.sgd(hp.learning_rate, momentum=hp.momentum),
    )


SWEEPS = {
    "mlp_R27": Sweep(mlp, 27),
    "mlp_R81": Sweep(mlp, 81),
    "cnn_R27": Sweep(cnn, 27),
    "cnn_R81": Sweep(cnn, 81),
    "digits_R3": Sweep(small_mlp, 3, "digits"),
    "digits_R81": Sweep(small_mlp, 81, "digits"),
}


class Outcome(NamedTuple):
    """What a row took, in seconds.

    Attributes:
      all: Everything.
      steady: Training and evaluation with everything compiled; None for the baseline
        that compiles every trial.
      compile_seconds: Compilation, summed over the workers.
      compiles: Programs compiled, or None where they are not counted.
      share: Share of the lane-steps that were run; what is less is scaled.
      best: Best validation accuracy of the first run.
      late: Compilations after the first reading of a steady sweep.
      occupancy: Share of the lane-steps computed that trained a trial.
    """

    all: float
    steady: float | None
    compile_seconds: float
    compiles: int | None = None
    share: float = 1.0
    best: float | None = None
    late: int | None = None
    occupancy: float | None = None


class Clock:
    """Seconds and counts of the parts of a baseline's sweep."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.counts: collections.Counter[str] = collections.Counter()

    def time(self, part: str, count: int, function: Callable, *args: Any) -> Any:
        """Calls a function, waits for its result, and books the time."""
        start = time.perf_counter()
        result = jax.block_until_ready(function(*args))
        self.seconds[part] += time.perf_counter() - start
        self.counts[part] += count
        return result

    def scaled(self, part: str, total: int) -> float:
        """The time that `total` of a part would take."""
        done = self.counts[part]
        return self.seconds[part] * total / done if done else 0.0


def time_baseline(
    name: str, problem: models.Problem, scheduler: Scheduler, limit: float
) -> Outcome:
    """Runs a sweep one trial at a time, or as much of it as `limit` seconds allow.

    Args:
      name: One of the baselines.
      problem: What is trained.
      scheduler: Decides which trial trains to which epoch.
      limit: Seconds after which it is cut.
    """
    forget()
    clock, best = Clock(), 0.0
    trials = draw(SPACE, scheduler.num_trials, 0)
    brackets = scheduler.start("max", len(trials))
    data = baselines.put(problem)
    orders = baselines.batches(problem, 0, scheduler.max_resource)
    built: dict[int | None, baselines.Baseline] = {}
    states: dict[int, Any] = {}
    start = time.perf_counter()
    waiting = collections.deque(brackets.ready())
    while waiting and (not states or time.perf_counter() - start < limit):
        given = waiting.popleft()
        i, hparams = given.trial_id, dict(trials[given.trial_id].hparams)
        values = baselines.on_device(hparams)
        # Initialisation does not depend on the constants: it is compiled once.
        init = next(iter(built.values())).init if built else None
        key, constants = (i, hparams) if name == "one_recompile" else (None, None)
        if key not in built:
            made = baselines.make(name, problem, data, constants)
            built[key] = made._replace(init=init or made.init)
            clock.time("compile", 1, _warm, built[key], values, orders[0])
        baseline = built[key]
        if i not in states:
            seeds = np.uint32(0), np.uint32(i)
            states[i] = clock.time("init", 1, baseline.init, values, *seeds)
        todo = orders[int(states[i].step) // problem.steps_per_epoch : given.resource]
        more = baseline, states[i], values, todo
        states[i] = clock.time("train", len(todo), baselines.train, *more)
        score = clock.time("evaluate", 1, baseline.evaluate, states[i], values)
        best = max(best, float(score))
        waiting.extend(brackets.report(i, float(score)))
    return _scaled(name, clock, scheduler, best)


def time_library(
    problem: models.Problem,
    scheduler: Scheduler,
    engine: str,
    repeats: int,
    run: Callable[..., _Run],
    limit: float | None = None,
) -> Outcome:
    """Runs a sweep with jaxpack: once from nothing, then again compiled.

    Args:
      problem: What is trained.
      scheduler: Decides which trial trains to which epoch.
      engine: The engine, or "auto".
      repeats: How often the compiled sweep is run.
      run: How a sweep is run.
      limit: Seconds after which each is cut, and the rest scaled.
    """
    forget()
    total = scheduler.total_resource() * problem.steps_per_epoch
    start = time.perf_counter()
    first = run(problem, scheduler, engine, 0, limit)
    everything = time.perf_counter() - start
    steady = [
        run(problem, scheduler, engine, seed, limit) for seed in range(1, repeats + 1)
    ]
    # At least one step, for a machine so slow that the limit came before the first.
    shares = [max(each.stats.lane_steps, 1) / total for each in (first, *steady)]
    # Compilation is over once a sweep is cut: only the rest is scaled.
    ahead = (1 / shares[0] - 1) * (everything - first.stats.compile_seconds)
    times = [
        each.stats.wall_seconds / share
        for each, share in zip(steady, shares[1:], strict=True)
    ]
    return Outcome(
        all=everything + ahead,
        steady=float(np.median(times)),
        compile_seconds=first.stats.compile_seconds,
        compiles=first.stats.compiles,
        share=min(shares),
        best=first.best if shares[0] == 1 else None,
        late=sum(each.late for each in steady),
        occupancy=float(np.median([each.stats.occupancy for each in steady])),
    )


class _Run(NamedTuple):
    """One sweep of jaxpack: its statistics, best score, and compilations too late."""

    stats: Any
    best: float
    late: int


def across_brackets(
    problem: models.Problem,
    scheduler: Scheduler,
    engine: str,
    seed: int,
    limit: float | None,
) -> _Run:
    """`jp.sweep`: all brackets at once."""
    before: list[int] = []

    def on_record(_: Mapping[str, Any]) -> None:
        if not before:
            before.append(_compilations["count"])

    result = jp.sweep(
        problem.task(),
        SPACE,
        scheduler,
        seed=seed,
        engine=engine,
        max_seconds=limit,
        progress=False,
        on_record=on_record,
    )
    late = _compilations["count"] - before[0] if before else 0
    best = result.best_score if result.incumbents else 0.0
    return _Run(result.stats, best, late)


@executables.disk_cache()
def within_rungs(
    problem: models.Problem,
    scheduler: Scheduler,
    engine: str,
    seed: int,
    limit: float | None,
) -> _Run:
    """The same trials with a barrier after every rung, one bracket after the other."""
    task, spe = problem.task(), problem.steps_per_epoch
    trials = draw(SPACE, scheduler.num_trials, seed)
    brackets = scheduler.start("max", len(trials))
    horizon = scheduler.max_resource * spe
    made = plan_sweep(task, SPACE, scheduler, trials, engine, None, None)
    states: dict[int, Any] = {}
    best, late, before = 0.0, 0, None
    start = time.perf_counter()
    with Pool(task.dataset, seed, scheduler.max_resource, made.workers) as pool:
        for index in range(len(brackets.plan)):
            rung = [given for given in brackets.ready() if given.bracket == index]
            while rung and time.perf_counter() - start < (limit or math.inf):
                ready = [
                    make_ready(
                        trials[given.trial_id],
                        made,
                        order=(given.trial_id,),
                        stops=(given.resource * spe,),
                        total_steps=horizon,
                        state=states.get(given.trial_id),
                    )
                    for given in rung
                ]
                pool.submit(ready)
                rung = []
                for _ in ready:
                    reading = pool.get()
                    assert reading is not None
                    before = _compilations["count"] if before is None else before
                    states[reading.trial_id] = reading.state
                    score = reading.metrics.get("accuracy", math.nan)
                    best = max(best, score)
                    rung += brackets.report(reading.trial_id, score)
        stats = pool.stats()
    late = _compilations["count"] - (before or 0)
    return _Run(stats, best, late)


def bound(scheduler: Scheduler, *, within: bool = False) -> float:
    """What free packing could gain over one trial at a time.

    Across brackets the longest chain is the resource of one trial that is never
    stopped; within rungs it is that for each bracket.

    Examples:
      >>> [round(bound(jp.Hyperband(81), within=w), 1) for w in (True, False)]
      [3.9, 19.5]
    """
    longest = [bracket[-1][1] for bracket in scheduler.brackets()]
    return scheduler.total_resource() / (sum(longest) if within else max(longest))


def forget() -> None:
    """Drops every compiled program of this process, so that the next row compiles."""
    executables.clear()
    jax.clear_caches()
    gc.collect()


def _warm(baseline: baselines.Baseline, values: Any, order: jax.Array) -> jax.Array:
    """Compiles a baseline by a call of each of its programs."""
    state = baseline.init(values, np.uint32(0), np.uint32(0))
    state = baseline.advance(state, values, baseline.data, order)
    return baseline.evaluate(state, values)


def _scaled(name: str, clock: Clock, scheduler: Scheduler, best: float) -> Outcome:
    """What the whole sweep would have taken, by what was run of it."""
    readings = sum(n for bracket in scheduler.brackets() for n, _ in bracket)
    totals = {
        "init": scheduler.num_trials,
        "train": scheduler.total_resource(),
        "evaluate": readings,
    }
    steady = sum(clock.scaled(part, total) for part, total in totals.items())
    each = name == "one_recompile"
    compiling = clock.scaled("compile", scheduler.num_trials if each else 1)
    share = clock.counts["train"] / totals["train"]
    return Outcome(
        all=compiling + steady,
        steady=None if each else steady,
        compile_seconds=compiling,
        share=min(1.0, share),
        best=best if share == 1 else None,
    )


_compilations: collections.Counter[str] = collections.Counter()


def _on_duration(event: str, duration_secs: float, **_: str | int | float) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compilations["count"] += 1


jax.monitoring.register_event_duration_secs_listener(_on_duration)
