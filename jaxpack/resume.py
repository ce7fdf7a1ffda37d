"""What makes a sweep that sweep, and what its journal says of it.

A directory may go on only with what it was begun with. The task is told by what its
traced programs compute, the data by their content: names, comments and paths do not
count. The scheduler may ask for more trials than before.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax

from jaxpack.journal import plain
from jaxpack.ledger import Ledger
from jaxpack.plans import Plan
from jaxpack.schedulers import Brackets, Scheduler
from jaxpack.space import Space
from jaxpack.task import Task
from jaxpack.types import RUNNING, Trial

FORMAT = 1
"""Of the directory. Another number means that its files cannot be understood."""

GROWS = {"Hyperband": "repeats", "RandomSearch": "num_trials"}
"""What may be raised: the trials there were stay as they are, new ones come after."""

LINE_ONLY = (
    "trial_id",
    "score",
    "seconds",
    "reason",
    "first_bad_step",
    "hparams",
    "time",
)
"""Fields of a journal line that are not part of the trial's history."""

_PARTITIONABLE = "jax_threefry_partitionable"
_log = logging.getLogger("jaxpack")


def identity(
    task: Task,
    space: Space,
    scheduler: Scheduler,
    enqueued: Sequence[Trial],
    **more: Any,
) -> dict[str, Any]:
    """What has to be the same for a directory to go on, but for the programs.

    Args:
      task: The task.
      space: The space.
      scheduler: The scheduler.
      enqueued: The trials that are not sampled.
      **more: Other arguments that fix the outcome.
    """
    fields = dataclasses.asdict(scheduler)  # pyrefly: ignore[bad-argument-type]
    return plain(
        {
            "format": FORMAT,
            "dataset": task.dataset.content_hash,
            "space": space.describe(),
            "scheduler": {"kind": type(scheduler).__name__, **fields},
            "enqueue": [dict(trial.hparams) for trial in enqueued],
            "threefry_partitionable": getattr(jax.config, _PARTITIONABLE),
            **more,
        }
    )


def programs(plan: Plan) -> dict[str, dict[str, Any]]:
    """What tells the programs of a plan apart from others, by their static hparams."""
    found = {}
    for pack in plan.packs:
        program = pack.spec.program
        static = ", ".join(f"{name}={value}" for name, value in pack.key)
        found[static or "all"] = plain(
            {
                field.name: getattr(program, field.name)
                for field in dataclasses.fields(program)
                if field.compare
            }
        )
    return found


def versions() -> dict[str, str | None]:
    """The versions of what results depend on."""
    return {n: _version(n) for n in ("jaxpack", "jax", "flax", "optax", "numpy")}


def check_same(
    directory: str | os.PathLike, asked: Mapping[str, Any], new: Mapping[str, Any]
) -> None:
    """Raises ValueError, naming the differences, unless a sweep may go on.

    Args:
      directory: Where it is, for the message.
      asked: What `sweep.json` says.
      new: What is asked for now; of `asked["identity"]`, its keys count.
    """
    old = asked.get("identity", {})
    if old.get("format") != FORMAT:
        raise ValueError(
            f"directory {str(directory)!r} was written by an incompatible version of "
            f"jaxpack: its format is {old.get('format')}, this one's is {FORMAT}; name "
            "another directory, or give overwrite=True, which moves this one aside"
        )
    differences = list(_differences({k: old.get(k) for k in new}, _grown(old, new)))
    if not differences:
        return
    if "programs" in new:
        differences.append("so the task computes something else")
        differences += _differences(asked.get("versions", {}), versions())
    raise ValueError(
        f"directory {str(directory)!r} holds another sweep:\n  "
        + "\n  ".join(differences)
        + "\nname another directory, or give overwrite=True, which moves this one aside"
    )


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """The packs of a plan as `obey` needs them, among other things."""
    return [
        {
            **pack.row(),
            "program": pack.spec.program.fingerprint,
            "apart": list(pack.apart),
            "pack": [pack.spec.engine, pack.spec.num_lanes],
            "fused": [spec.program.fingerprint for spec in pack.fused],
        }
        for pack in plan.packs
    ]


def obey(plan: Plan, asked: Mapping[str, Any]) -> Plan:
    """The plan with the engines and widths on record, which scores depend on."""
    recorded = {row["program"]: row for row in asked.get("plan", ())}
    specs = {}
    for pack in plan.packs:
        name, spec = pack.spec.program.fingerprint, pack.spec
        if name in recorded:
            engine, lanes = recorded[name]["pack"]
            spec = dataclasses.replace(spec, engine=engine, num_lanes=lanes)
        specs[name] = spec
    packs = []
    for pack in plan.packs:
        name = pack.spec.program.fingerprint
        if name in recorded:
            row, tail = recorded[name], None
            fused = tuple(specs[member] for member in row["fused"])
            if row.get("tail"):
                steps, engine, lanes = row["tail"]
                narrow = {"engine": engine, "num_lanes": lanes}
                tail = steps, dataclasses.replace(pack.spec, **narrow)
            pack = dataclasses.replace(
                pack, spec=specs[name], fused=fused, tail=tail, reason=row["reason"]
            )
        elif set(pack.fused) - {pack.spec}:  # Others may be fused otherwise.
            pack = dataclasses.replace(pack, fused=())
        packs.append(pack)
    for change in changes(asked, plan):
        _log.warning("since the sweep began, %s: scores may differ a little", change)
    return dataclasses.replace(plan, packs=tuple(packs))


def changes(asked: Mapping[str, Any], plan: Plan) -> list[str]:
    """What has changed since a sweep began that scores may depend on."""
    then = {"device": asked.get("device"), **asked.get("versions", {})}
    now = {"device": plan.workers[0].device_kind, **versions()}
    return list(_differences(then, now))


def engine_on_record(asked: Mapping[str, Any], engine: str) -> str:
    """The one engine on record, so that none need be measured; else `engine`."""
    engines = {row["engine"] for row in asked.get("plan", ())}
    return engines.pop() if len(engines) == 1 else engine


def padding_on_record(asked: Mapping[str, Any]) -> bool | None:
    """Whether batches are padded to share programs; None if nothing is on record."""
    rows = asked.get("plan")
    return None if rows is None else any(row.get("padded", False) for row in rows)


def replay(
    records: Sequence[Mapping[str, Any]], brackets: Brackets, ledger: Ledger
) -> list[dict[str, Any]]:
    """Books what a journal says, and lets the scheduler decide again.

    Returns:
      The rows of the sweep's history.

    Raises:
      ValueError: If a line does not follow from those before it.
    """
    history = []
    for number, record in enumerate(records, 1):
        trial_id = record["trial_id"]
        known = ledger.records.get(trial_id)
        if known is None or dict(known.trial.hparams) != record["hparams"]:
            raise ValueError(
                f"reading {number} of the journal is of trial {trial_id} with hparams "
                f"{record['hparams']}, which this sweep has not"
            )
        status = brackets.statuses[trial_id]
        if status != RUNNING or brackets.rung_of(trial_id) != record["rung"]:
            raise ValueError(
                f"reading {number} of the journal is of trial {trial_id} at rung "
                f"{record['rung']}, where it cannot be after the readings before: it "
                f"is {status} at rung {brackets.rung_of(trial_id)}"
            )
        row = {name: v for name, v in record.items() if name not in LINE_ONLY}
        kept = ("score", "seconds", "first_bad_step", "reason")
        ledger.replay(trial_id, row, **{name: record[name] for name in kept})
        if "steps" in row:
            history.append({"trial_id": trial_id, **row})
        brackets.report(trial_id, record["score"])
    return history


def summary(directory: os.PathLike, ledger: Ledger) -> str:
    """What a sweep goes on from, in a line."""
    records = ledger.records.values()
    readings = sum(len(record.rows) for record in records)
    states = sum(record.state is not None for record in records)
    return (
        f"{str(directory)!r} has {readings} readings of {len(records)} trials, and "
        f"states of {states} to go on from"
    )


def _grown(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`new` without what it has more of than `old`, as far as that is allowed."""
    fitted, before = dict(new), old.get("scheduler", {})
    scheduler = fitted.get("scheduler", {})
    name = GROWS.get(scheduler.get("kind"), "")
    if name in scheduler and name in before and scheduler[name] >= before[name]:
        fitted["scheduler"] = {**scheduler, name: before[name]}
    if "programs" in fitted and "programs" in old:
        shared = old["programs"].keys() & fitted["programs"].keys()
        fitted["programs"] = {label: fitted["programs"][label] for label in shared}
    return fitted


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys((*old, *new)):
            where = f"{path}.{name}" if path else name
            yield from _differences(old.get(name), new.get(name), where)
    elif old != new:
        yield f"{path} was {old!r}, is {new!r}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # Imported from a checkout.
        return None
