"""Which trials to pack together: the paper's four policies, and the planner's own way.

Claim: on the paper's Hyperband space, where 11 batch sizes x 4 optimizers x 4
activations leave hardly two trials alike, packing beats training one by one, and
packing trials of one batch size (`equal_batch`) or near each other (`nearest`) beats
packing at random.

    python -m experiments.policies
    python -m experiments.policies --smoke

A pack of unlike trials can be made in three ways here:

- `own`: the trials of one batch size are lanes of one vmapped program, in which
  optimizer and activation are switches; each batch size is a program.
- `fused`: unlike trials side by side in one program, compiled for each choice of them.
- `padded`: all trials are lanes of one vmapped program. They draw as many rows as the
  largest batch has and train on the first of them, as in the paper's prototype.

Policies choose what is fused; in the form `padded` they choose who shares a pack. In
the form `own` only trials of one batch size can share a pack, so `equal_batch` has
nothing to add there, and the planner's order stands for all. Every sweep but that of
`auto`, the planner left free, has one worker, so that the choices are the same each
time. All are timed in turn with everything compiled; medians. `padded` trials train on
fewer examples in an epoch, so what is compared is examples a second, of training and
evaluation.

Expect `padded` or `own` to win on a GPU, by up to the pack size. On a CPU one trial
fills a core: no packing of these models pays, and the planner trains them alone.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jaxpack as jp
from experiments import measure, paper
from jaxpack.policies import NAMES
from jaxpack.report import print_table

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass
class Flags:
    """The flags of this experiment."""

    smoke: bool = False
    """A small MLP on the 8x8 digits and R=3, for a minute on two cores."""
    max_resource: int = 81
    """Epochs that a trial gets which is never stopped, Hyperband's R."""
    size: int = 9
    """Trials of a pack."""
    fused: int = 4
    """Trials of a fused program: each adds its own time to compile."""
    repeats: int = 1
    """How often each way is timed, in turn; the median counts."""
    seed: int = 0
    """Fixes the trials, their weights and the order of the data."""
    dataset: str = "tfds:cifar10"
    """The data."""
    model: str = "densenet"
    """The model: densenet or mlp."""
    batch_sizes: tuple[int, ...] = paper.BATCH_SIZES
    """Batch sizes of the space; each makes a program of its own."""
    ways: tuple[str, ...] = ()
    """Ways to measure beside "own, none", such as "padded, nearest"; all by default."""
    directory: pathlib.Path | None = None
    """Where to write results. By default a folder of the device's in results/."""


class FirstRows(nn.Module):
    """A model that sees the first rows of a batch and takes the rest for padding.

    Attributes:
      model: The model, called with `train` and `mask`.
      count: How many rows are real; may be a lane's.
    """

    model: nn.Module
    count: Any

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        """Returns the logits, with the row's number and `count` as two more columns."""
        rows = jnp.arange(x.shape[0])
        real = rows < self.count
        both = real if mask is None else real & mask
        logits = self.model(x, train=train, mask=both if train else mask)
        real = real.astype(logits.dtype) if train else jnp.ones_like(logits[:, 0])
        return jnp.concatenate([logits, real[:, None]], axis=1)


def first_rows_loss(outputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
    """Cross-entropy of the rows that are real: values and weights, `[B]` each."""
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs[:, :-1], labels)
    return losses, outputs[:, -1]


def first_rows_accuracy(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Whether each example's largest logit is its label's, `[B]`."""
    return (outputs[:, :-1].argmax(-1) == labels).astype(jnp.float32)


def padded_task(problem: paper.Problem) -> jp.Task:
    """The paper's way with unlike batch sizes: all draw as many rows as the largest.

    The hparam `rows` takes the place of `batch_size`.
    """

    def model(hp: jp.HParams) -> nn.Module:
        return FirstRows(paper.make_model(problem, hp), hp.rows)

    return jp.Task(
        model,
        paper.make_optimizer,
        jp.data.load(problem.dataset),
        loss=first_rows_loss,
        metrics={"accuracy": first_rows_accuracy},
        batch_size=max(problem.batch_sizes),
    )


def padded_space(problem: paper.Problem) -> jp.Space:
    """The paper's space with `rows` for `batch_size`."""
    dims = dict(problem.space.dims)
    return jp.Space(rows=dims.pop("batch_size"), **dims)


class Row(NamedTuple):
    """A way of packing, measured.

    Attributes:
      seconds: Of a sweep with everything compiled.
      examples: Examples trained on a second in it.
      compile_seconds: Spent on compiling in the first sweep.
      compiles: Programs compiled in it, those known from rows before left out.
      best: The best accuracy.
    """

    seconds: float
    examples: float
    compile_seconds: float
    compiles: int
    best: float


def ways(flags: Flags) -> dict[str, dict[str, Any]]:
    """The options of `jp.sweep` for each way, by "form, policy".

    Raises:
      ValueError: If the flags name a way that there is not.
    """
    own = {"workers": 1, "max_lanes": flags.size, "engine": "packed"}
    fused = {"workers": 1, "max_lanes": flags.fused, "engine": "fused"}
    options: dict[str, dict[str, Any]] = {
        "own, none": {"workers": 1, "engine": "solo", "policy": "none"},
        "own, planner": own,
        "auto": {},
    }
    for policy in ("planner", *NAMES[1:]):
        chosen = {} if policy == "planner" else {"policy": policy}
        options[f"fused, {policy}"] = fused | chosen
    for policy in ("planner", *NAMES[1:]):
        chosen = {} if policy == "planner" else {"policy": policy}
        options[f"padded, {policy}"] = own | chosen
    for way in flags.ways:
        if way not in options:
            raise ValueError(f"ways has {way!r}; it may have {'; '.join(options)}")
    kept = {"own, none", *(flags.ways or options)}
    return {way: each for way, each in options.items() if way in kept}


def examples_trained(problem: paper.Problem, result: jp.SweepResult) -> int:
    """Examples that all trials of a sweep have trained on together."""
    count, total = jp.data.load(problem.dataset).num_train, 0
    for trial in result.trials:
        hp = dict(trial.hparams)
        drawn = hp.get("batch_size", max(problem.batch_sizes))
        whole, rest = divmod(count, drawn)
        rows = hp.get("rows", drawn)
        epochs, steps = divmod(trial.steps, whole + (rest > 0))
        total += epochs * (whole * rows + min(rest, rows)) + steps * rows
    return total


def sweeps(
    problem: paper.Problem, flags: Flags
) -> dict[str, Callable[[], jp.SweepResult]]:
    """A sweep for each way."""
    scheduler = jp.Hyperband(flags.max_resource)
    own = functools.partial(jp.sweep, problem.task, problem.space, scheduler)
    padded = functools.partial(
        jp.sweep, padded_task(problem), padded_space(problem), scheduler
    )
    return {
        way: functools.partial(
            padded if way.startswith("padded") else own,
            seed=flags.seed,
            progress=False,
            **options,
        )
        for way, options in ways(flags).items()
    }


def run(flags: Flags) -> dict[str, Any]:
    """Measures every way, and returns the headline figures."""
    sizes = flags.batch_sizes
    problem = paper.Problem(flags.model, flags.dataset, batch_sizes=sizes)
    if flags.smoke:
        problem = dataclasses.replace(paper.SMOKE, width=64)
        small = {"max_resource": 9, "size": 4, "fused": 2, "repeats": 3}
        flags = dataclasses.replace(flags, **small)
    calls = sweeps(problem, flags)
    first = {way: call() for way, call in calls.items()}
    clocks = {
        way: functools.partial(lambda call: call().stats.wall_seconds, call)
        for way, call in calls.items()
    }
    seconds = measure.interleave(clocks, flags.repeats)
    rows = {
        way: Row(
            seconds[way],
            examples_trained(problem, result) / seconds[way],
            result.stats.compile_seconds,
            result.stats.compiles,
            result.best_score,
        )
        for way, result in first.items()
    }
    figures = headline(rows)
    print_table(table(rows))
    print("compiling, programs: of those that no row above has compiled")
    directory = measure.results_directory(flags.directory, flags.smoke)
    if directory is not None:
        details = {way: row._asdict() for way, row in rows.items()}
        path = measure.save(
            directory, "policies", figures, rows=details, problem=repr(problem)
        )
        plot(rows, path.with_suffix(".png"))
        print(f"results: {path}")
    return figures


def headline(rows: dict[str, Row]) -> dict[str, Any]:
    """The improvement of each way over training one by one.

    That of the paper, `(T_alone - T_packed) / T_alone`, for the time of an example:
    0.5 is twice as fast, and below 0 packing loses.
    """
    alone = rows["own, none"]
    improvement = {
        way: round(1 - alone.examples / row.examples, 3) for way, row in rows.items()
    }
    packs = {
        way: i for way, i in improvement.items() if way not in ("own, none", "auto")
    }
    return {
        "best_packing": max(packs, key=lambda way: packs[way], default=None),
        "improvement": improvement,
        "seconds": {way: round(row.seconds, 3) for way, row in rows.items()},
        "compiles": {way: row.compiles for way, row in rows.items()},
    }


def table(rows: dict[str, Row]) -> Table:
    """A row a way."""
    from rich.table import Table

    result = Table(title="packing policies", title_justify="left")
    result.add_column("form, policy")
    for column in ("s", "examples/s", "x alone", "compiling s", "programs", "best"):
        result.add_column(column, justify="right")
    alone = rows["own, none"].examples
    for way, row in rows.items():
        result.add_row(
            way,
            f"{row.seconds:.2f}",
            f"{row.examples:,.0f}",
            f"{row.examples / alone:.2f}",
            f"{row.compile_seconds:.1f}",
            str(row.compiles),
            f"{row.best:.3f}",
        )
    return result


def plot(rows: dict[str, Row], path: pathlib.Path) -> None:
    """Draws the examples a second of each way."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(5.5, 3.5), layout="constrained")
    axes = picture.subplots()
    axes.barh(list(rows), [row.examples for row in rows.values()])
    axes.axvline(rows["own, none"].examples, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("examples a second")
    axes.set_title("Packing policies")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=150)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the experiment that the command line asks for."""
    import tyro

    program = "python -m experiments.policies"
    flags = tyro.cli(Flags, prog=program, args=args, description=__doc__)
    try:
        figures = run(flags)
    except ValueError as error:
        sys.exit(f"{program}: {error}")
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
