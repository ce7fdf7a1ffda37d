"""A sweep as an Optuna study."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpack import report
from jaxpack.dimensions import Choice, Constant, Dimension, Integer
from jaxpack.exports.source import Source, require, result_of, times_of
from jaxpack.records import dims_of
from jaxpack.sweep import SweepResult
from jaxpack.types import COMPLETE, FAILED, STOPPED, TrialResult

# Optional, and slow to import.
if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, TrialState

_ID = "trial_id"


def to_optuna(
    source: Source, storage: Any, study_name: str | None = None
) -> optuna.Study:
    """Adds a sweep's trials to a study, which Optuna's tools can then show.

    COMPLETE trials stay that; STOPPED ones are PRUNED, FAILED ones FAIL, and others
    RUNNING, or WAITING before their first reading. Every reading is an intermediate
    value at its resource. User attributes: `trial_id`, `status`, `bracket`, `rung`,
    `steps`, `seconds`, `pack`, `engine`, and the `reason` of a failure. Added again,
    a trial is brought up to date; none is added twice.

    Args:
      source: A sweep's result, or its directory, which is read anew.
      storage: A storage of Optuna, or its URL, such as `"sqlite:///sweep.db"`.
      study_name: The study, made if need be; None takes the directory's name.

    Returns:
      The study.

    Raises:
      ImportError: If optuna is not installed.
      ValueError: If the study has other trials or the other direction, or there is
        no name for it.
    """
    optuna = require("optuna", "optuna")
    result = result_of(source)
    if study_name is None:
        if result.directory is None:
            raise ValueError("study_name is None, and the sweep has no directory")
        study_name = result.directory.resolve().name
    store = optuna.storages.get_storage(storage)
    direction = "maximize" if result.mode == "max" else "minimize"
    study = optuna.create_study(
        storage=store, study_name=study_name, direction=direction, load_if_exists=True
    )
    known = _known(study, study_name, direction, result)
    dims = dims_of([trial.hparams for trial in result.trials], result.dims)
    times, unit = times_of(result), _unit(result)
    if study.user_attrs.get("metric") is None:
        study.set_user_attr("metric", result.metric)
        study.set_user_attr("unit", unit)
    for trial in result.trials:
        made = _frozen(trial, result, dims, unit, times)
        old = known.get(trial.trial_id)
        if old is None:
            study.add_trial(made)
        elif not old.state.is_finished():
            study_id = store.get_study_id_from_name(study_name)
            trial_id = store.get_trial_id_from_study_id_trial_number(
                study_id, old.number
            )
            _update(store, trial_id, old, made)
    return study


def _known(
    study: optuna.Study, name: str, direction: str, result: SweepResult
) -> dict[int, FrozenTrial]:
    """The trials of the sweep that the study has, once it is sure to be this sweep."""
    if study.direction.name.lower() != direction:
        raise ValueError(
            f"study_name is {name!r}, a study to {study.direction.name.lower()}, while "
            f"the sweep's mode is {result.mode!r}; give another name"
        )
    known = {}
    for trial in study.get_trials(deepcopy=False):
        i = trial.user_attrs.get(_ID)
        ours = isinstance(i, int) and 0 <= i < len(result.trials)
        if not ours or trial.params != dict(result.trials[i].hparams):
            raise ValueError(
                f"study_name is {name!r}, a study whose trial {trial.number} is not "
                "of this sweep; give another name"
            )
        known[i] = trial
    return known


def _unit(result: SweepResult) -> str:
    """What intermediate values are counted by: Optuna has whole numbers only."""
    rows = [row for row in result.history if result.metric in row]
    whole = all(float(row[result.unit]).is_integer() for row in rows)
    return result.unit if whole else "steps"


def _frozen(
    trial: TrialResult,
    result: SweepResult,
    dims: Mapping[str, Dimension],
    unit: str,
    times: Mapping[tuple[int, int], float],
) -> FrozenTrial:
    """A trial as one of Optuna's."""
    import optuna

    rows = report.scored(trial, result.metric)
    values = {int(row[unit]): row[result.metric] for row in rows}
    state = _state(trial)
    scored = state in (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    read = [times.get((trial.trial_id, int(row["steps"]))) for row in trial.history]
    start, end = _from_to([when for when in read if when is not None], trial)
    waiting = state == optuna.trial.TrialState.WAITING
    return optuna.trial.FrozenTrial(
        number=-1,  # The study numbers its trials.
        trial_id=-1,
        state=state,
        value=values[max(values)] if scored and values else None,
        datetime_start=None if waiting else start,
        datetime_complete=end if state.is_finished() else None,
        params=dict(trial.hparams),
        distributions={name: _distribution(dims[name]) for name in trial.hparams},
        user_attrs=_attributes(trial, result.stats.packs),
        system_attrs={},
        intermediate_values=values,
    )


def _state(trial: TrialResult) -> TrialState:
    from optuna.trial import TrialState

    states = {
        COMPLETE: TrialState.COMPLETE,
        STOPPED: TrialState.PRUNED,
        FAILED: TrialState.FAIL,
    }
    unfinished = TrialState.RUNNING if trial.history else TrialState.WAITING
    return states.get(trial.status, unfinished)


def _from_to(
    read: Sequence[float], trial: TrialResult
) -> tuple[datetime.datetime, datetime.datetime]:
    """When a trial began and ended, as near as its readings tell."""
    now = datetime.datetime.now()
    if not read:
        return now, now
    # Paused in between, it trained for less than the time from start to end.
    first = trial.seconds * trial.history[0]["steps"] / max(trial.steps, 1)
    start = datetime.datetime.fromtimestamp(read[0] - first)
    return start, datetime.datetime.fromtimestamp(read[-1])


def _distribution(dim: Dimension) -> BaseDistribution:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if isinstance(dim, Constant):
        return CategoricalDistribution((dim.value,))
    if isinstance(dim, Choice):
        return CategoricalDistribution(dim.options)
    if isinstance(dim, Integer):
        return IntDistribution(dim.lo, dim.hi, log=dim.log)
    return FloatDistribution(dim.lo, dim.hi, log=dim.log)


def _attributes(
    trial: TrialResult, packs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        _ID: trial.trial_id,
        "status": trial.status,
        "bracket": trial.bracket,
        "rung": trial.rung,
        "steps": trial.steps,
        "seconds": trial.seconds,
    }
    for number, pack in enumerate(packs):
        static = pack.get("static", {})
        if all(trial.hparams.get(name) == value for name, value in static.items()):
            attributes |= {"pack": number, "engine": pack.get("engine")}
    if trial.reason is not None:
        attributes["reason"] = trial.reason
    return attributes


def _update(
    store: optuna.storages.BaseStorage,
    trial_id: int,
    old: FrozenTrial,
    new: FrozenTrial,
) -> None:
    """Brings a trial that the study has, and that was not finished, up to date."""
    from optuna.trial import TrialState

    if new.state == TrialState.WAITING:
        return
    if old.state == TrialState.WAITING:
        store.set_trial_state_values(trial_id, TrialState.RUNNING)
    for step, value in new.intermediate_values.items():
        if step not in old.intermediate_values:
            store.set_trial_intermediate_value(trial_id, step, value)
    for name, value in new.user_attrs.items():
        if old.user_attrs.get(name) != value:
            store.set_trial_user_attr(trial_id, name, value)
    if new.state.is_finished():
        values = None if new.value is None else [new.value]
        store.set_trial_state_values(trial_id, new.state, values)
