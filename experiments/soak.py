"""Kills sweeps at any moment, goes on with them, and looks for a difference.

Claim: whenever a sweep is killed, the same call ends with the same table to the bit,
keeps every reading that was on disk, and trains nothing that a checkpoint had.

    python -m experiments.soak --kills 100
    python -m experiments.soak --sweeps 40

Small sweeps over the digits run in processes of their own, by both engines, and are
killed with SIGKILL: after a random time, or inside a write of the journal, of a
checkpoint or of `sweep.json`. Some directories are moved before the sweep goes on. The
second form looks at memory instead, over many sweeps in one process. The last line is
JSON; expect no number in it but the first to be above 0, after some ten minutes on two
CPU cores for 100 kills.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import logging
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import tyro

import jaxpack as jp
from jaxpack import bundle, checkpoints, driver, journal, store

SCHEDULER = jp.Hyperband(9)
SPACE = jp.Space(
    learning_rate=jp.log_uniform(1e-3, 1e3), dropout=jp.uniform(0.0, 0.5)
)  # The highest rates fail.
ENGINES = ("packed", "solo")
KEEP = 2
LONGEST = 60.0
"""Seconds after which a process has hung."""


@dataclasses.dataclass
class Flags:
    """The flags of this experiment."""

    kills: int = 100
    """Kills in all."""
    sweeps: int = 0
    """Sweeps in one process to see whether memory grows, in place of the kills."""
    seed: int = 0
    """Of the moments."""
    processes: int = 2
    """Sweeps at a time."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a process dies.

    Attributes:
      place: A name of `PLACES`.
      count: The how-manieth time it comes there.
      seconds: How long after that.
    """

    place: str
    count: int = 1
    seconds: float = 0.0


class Outcome(NamedTuple):
    """What a number of kills came to.

    Attributes:
      kills: Processes killed.
      different: Sweeps that ended with another table or other weights.
      lost: Readings that were on disk and are not any more.
      retrained_beyond_checkpoint: Steps trained though a checkpoint had them.
    """

    kills: int = 0
    different: int = 0
    lost: int = 0
    retrained_beyond_checkpoint: int = 0


def make_task() -> jp.Task:
    """64-8-10 with dropout, by SGD with momentum."""
    return jp.Task(
        model=lambda hp: jp.models.MLP(8, depth=1, dropout=hp.dropout),
        optimizer=lambda hp: optax.sgd(hp.learning_rate, momentum=0.9),
        dataset=jp.data.load("digits"),
    )


def run_sweep(directory: pathlib.Path | None, engine: str, seed: int = 0) -> Any:
    """The sweep that is killed."""
    return jp.sweep(
        make_task(),
        SPACE,
        SCHEDULER,
        seed=seed,
        directory=directory,
        engine=engine,
        max_lanes=4,
        workers=2,
        keep=KEEP,
        checkpoint_seconds=0.1,
        progress=False,
    )


def table(result: jp.SweepResult) -> list[Any]:
    """All that must not differ, as text: NaN is not equal to itself."""
    rows: list[Any] = [
        [t.trial_id, t.status, t.score, t.bracket, t.rung, t.steps, t.reason, t.history]
        for t in result.trials
    ]
    for trial in result.incumbents:
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves((trial.params, trial.model_state, trial.opt_state)):
            digest.update(np.asarray(leaf).tobytes())
        rows.append([trial.trial_id, trial.score, trial.steps, digest.hexdigest()])
    return [repr(row) for row in rows]


# In the process that is killed.


def child(directory: str, engine: str, moment: Moment | None, answer: str) -> None:
    """Runs the sweep, or goes on with it, and dies at the moment given."""
    logging.disable()
    # Short segments and many checkpoints, spread over a second or two.
    real = bundle.Bundle.advance

    def advance(some: bundle.Bundle) -> None:
        time.sleep(0.02)
        real(some)

    patches = {"advance": advance, "_longest_segment": lambda some: 12}
    for name, patch in patches.items():
        setattr(bundle.Bundle, name, patch)
    vars(driver).update(EARLY_SECONDS=0.05, EARLY_SHARE=1e9, TICK_SECONDS=0.02)
    if moment is not None:
        arm(moment)
    result = run_sweep(pathlib.Path(directory), engine)
    answered = {
        "table": table(result),
        "steps": [trial.steps for trial in result.trials],
        "lane_steps": result.stats.lane_steps,
    }
    pathlib.Path(answer).write_text(json.dumps(answered))


def die() -> None:
    """Ends this process as nothing else would."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(moment: Moment) -> None:
    """Lets this process die at a moment."""
    owner, name, fatal = PLACES[moment.place]
    real, calls = getattr(owner, name), 0

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == moment.count:
            return fatal(real, moment.seconds, *args, **kwargs)
        return real(*args, **kwargs)

    setattr(owner, name, patched)


def _before(real: Callable[..., Any], seconds: float, *args: Any, **kw: Any) -> None:
    die()


def _soon(real: Callable[..., Any], seconds: float, *args: Any, **kw: Any) -> Any:
    threading.Timer(seconds, die).start()
    return real(*args, **kw)


def _within(real: Callable[..., Any], seconds: float, *args: Any, **kw: Any) -> Any:
    threading.Timer(seconds, die).start()
    result = real(*args, **kw)
    time.sleep(seconds)
    return result


def _after(real: Callable[..., Any], seconds: float, *args: Any, **kw: Any) -> None:
    real(*args, **kw)
    die()


def _half_a_line(
    real: Callable[..., Any], seconds: float, book: journal.Journal, record: Any
) -> None:
    line = journal.encode(record).encode()
    os.write(book._file, line[: int(len(line) * min(1.0, 20 * seconds))])
    die()


def _half_deleted(
    real: Callable[..., Any], seconds: float, path: Any, **_: Any
) -> None:
    files = sorted(p for p in pathlib.Path(path).rglob("*") if p.is_file())
    for file in files[: len(files) // 2]:
        file.unlink()
    die()


PLACES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "any time": (bundle.Bundle, "advance", _soon),
    "half a journal line": (journal.Journal, "append", _half_a_line),
    "after a journal line": (journal.Journal, "append", _after),
    "before a checkpoint": (checkpoints, "write", _before),
    "within a checkpoint": (checkpoints, "write", _within),
    "after a checkpoint": (checkpoints, "write", _after),
    "deleting a checkpoint": (shutil, "rmtree", _half_deleted),
    "within sweep.json": (os, "replace", _before),
    "at the very end": (store.Store, "finish", _before),
}


# In the process that kills.


def draw_moment(generator: random.Random) -> Moment:
    """A random moment; half of them at no particular place."""
    if generator.random() < 0.5:
        return Moment("any time", seconds=generator.uniform(0, 1.5))
    place = generator.choice(list(PLACES)[1:])
    once = place in ("within sweep.json", "at the very end")
    most = 20 if "line" in place else 6
    count = 1 if once else generator.randint(1, most)
    return Moment(place, count, generator.uniform(0, 0.05))


def soak(kills: int, seed: int, processes: int, where: pathlib.Path) -> Outcome:
    """Kills sweeps, and compares them with those that nothing interrupted.

    Args:
      kills: How many kills.
      seed: Of the moments.
      processes: Sweeps at a time.
      where: An empty directory.
    """
    whole = {name: launch(where / f"whole-{name}", name, None) for name in ENGINES}

    def share(number: int) -> Outcome:
        generator = random.Random(f"{seed} {number}")
        wanted = kills // processes + (number < kills % processes)
        outcome = Outcome()
        while outcome.kills < wanted:
            engine = generator.choice(ENGINES)
            most = min(generator.randint(1, 4), wanted - outcome.kills)
            directory = where / f"{engine}-{number}"
            one = kill(directory, engine, most, generator, whole[engine])
            outcome = add(outcome, one)
            print(f"{number}: {outcome}", flush=True)
        return outcome

    with ThreadPoolExecutor(processes) as threads:
        return add(*threads.map(share, range(processes)))


def add(*outcomes: Outcome) -> Outcome:
    """The sum of outcomes."""
    return Outcome(*(sum(numbers) for numbers in zip(*outcomes, strict=True)))


def kill(
    directory: pathlib.Path,
    engine: str,
    most: int,
    generator: random.Random,
    whole: Mapping[str, Any],
) -> Outcome:
    """Runs one sweep, killed and gone on with up to `most` times, then to its end."""
    kills, lost, before = 0, 0, []
    while kills < most:
        moment = draw_moment(generator)
        if launch(directory, engine, moment) is not None:
            break  # It was done before.
        kills += 1
        lines = on_disk(directory)
        lost += lines[: len(before)] != before
        before = lines
        if generator.random() < 0.2:
            moved = directory.with_name(f"{directory.name}-{kills}")
            directory = pathlib.Path(shutil.move(directory, moved))
    missing = steps_missing(directory, whole["steps"])
    answer = launch(directory, engine, None)
    assert answer is not None
    lost += on_disk(directory)[: len(before)] != before
    shutil.rmtree(directory)
    different = answer["table"] != whole["table"]
    return Outcome(kills, different, lost, max(0, answer["lane_steps"] - missing))


def launch(directory: pathlib.Path, engine: str, moment: Moment | None) -> Any:
    """Runs a child; what it has to say, or None if it was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jaxpack", "orbax.checkpoint", "tyro"])
    answer = directory.with_suffix(".json")
    answer.unlink(missing_ok=True)
    process = context.Process(
        target=child, args=(str(directory), engine, moment, str(answer))
    )
    process.start()
    process.join(LONGEST)
    if process.exitcode is None:
        process.kill()
        raise RuntimeError(f"{directory.name} hangs, {moment}")
    if process.exitcode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{directory.name} failed, {moment}")
    return json.loads(answer.read_text()) if answer.exists() else None


def on_disk(directory: pathlib.Path) -> list[str]:
    """The readings that a journal has, as text."""
    path = directory / "journal.jsonl"
    return [repr(line) for line in journal.read(path)] if path.exists() else []


def steps_missing(directory: pathlib.Path, final: Sequence[int]) -> int:
    """The steps that have yet to be trained, by what is on disk.

    Those are all steps that lead from a trial's newest state on disk to its end, and
    those that lead to the weights of the best so far, where they are not on disk.

    Args:
      directory: The sweep's directory.
      final: The steps that each trial has had in the end.
    """
    brackets = SCHEDULER.start("max")
    scores: dict[int, tuple[float, int]] = {}  # The best by trial, and its steps.
    if not (path := directory / "journal.jsonl").exists():
        return sum(final)
    for line in journal.read(path):
        i, score = line["trial_id"], line["score"]
        brackets.report(i, score)
        new = score, line["steps"]
        if np.isfinite(score):
            scores[i] = max(scores.get(i, new), new)
    on_disk = states_on_disk(directory)
    live = {i for i, s in brackets.statuses.items() if s in ("RUNNING", "PAUSED")}
    missing = sum(final[i] - max(on_disk[i], default=0) for i in live)
    best = sorted(scores, key=lambda i: (-scores[i][0], -scores[i][1], i))[:KEEP]
    for i in best:
        steps = scores[i][1]
        newest = max(on_disk[i], default=0)
        if steps in on_disk[i]:
            continue
        if i not in live:
            missing += steps - max((s for s in on_disk[i] if s < steps), default=0)
        elif newest > steps:
            missing += steps
    return missing


def states_on_disk(directory: pathlib.Path) -> dict[int, set[int]]:
    """The steps of each trial's states that are on disk."""
    found: dict[int, set[int]] = defaultdict(set)
    for name in ("checkpoints", "best"):
        kept = checkpoints.Checkpoints(directory / name).load()
        for part in kept.values():
            for i, step in zip(
                np.atleast_1d(part["trial_id"]),
                np.atleast_1d(part["state"]["step"]),
                strict=True,
            ):
                found[int(i)].add(int(step))
    return found


def memory(sweeps: int, where: pathlib.Path) -> dict[str, int]:
    """How much more memory is in use after many sweeps than after a quarter of them.

    Args:
      sweeps: How many sweeps, of unlike trials, all with checkpoints.
      where: An empty directory.
    """
    host, device = [], []
    for number in range(sweeps):
        directory = where / str(number)
        run_sweep(directory, ENGINES[number % len(ENGINES)], seed=number)
        shutil.rmtree(directory)
        gc.collect()
        device.append(sum(array.nbytes for array in jax.live_arrays()))
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        host.append(pages * os.sysconf("SC_PAGE_SIZE"))
    early, late = slice(sweeps // 4, sweeps // 2), slice(-(sweeps // 4), None)
    return {
        "sweeps": sweeps,
        "device_bytes_more": max(device[late]) - max(device[early]),
        "host_bytes_more": max(host[late]) - max(host[early]),
    }


def main(args: Sequence[str] | None = None) -> None:
    """Does what the command line asks for."""
    program = "python -m experiments.soak"
    flags = tyro.cli(Flags, prog=program, args=args, description=__doc__)
    logging.disable()  # Journals are cut off on purpose.
    with tempfile.TemporaryDirectory() as where:
        if flags.sweeps:
            print(json.dumps(memory(flags.sweeps, pathlib.Path(where))))
            return
        start = time.perf_counter()
        found = soak(flags.kills, flags.seed, flags.processes, pathlib.Path(where))
        print(f"{time.perf_counter() - start:.0f} seconds")
        print(json.dumps(found._asdict()))
    if any(found[1:]):
        sys.exit(1)


if __name__ == "__main__":
    main()
