"""Which hparams are per lane and which are static is found out by tracing."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import difference, train_alone
from tiny import MLP

import jaxpack as jp
from jaxpack import detect, jaxprs, probe

CONTINUOUS = jp.uniform(0.1, 0.9)


def lanes(dataset, model, space, optimizer=None):
    """Maps each hparam to whether it may differ between lanes."""
    plan = jp.explain(
        jp.Task(
            model, optimizer or (lambda hp: optax.sgd(0.1)), dataset, batch_size=16
        ),
        jp.Space(**space),
        jp.RandomSearch(8, 1),
    )
    return {finding.name: finding for finding in plan.findings}


def found(dataset, model, optimizer=None, **space):
    findings = lanes(dataset, model, space, optimizer)
    return {name: finding.per_lane for name, finding in findings.items()}


class Deep(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(4)(x)


class Scaled(nn.Module):
    """Multiplies its output by a number."""

    scale: float = 1.0
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x):
        dtype = jnp.dtype(self.dtype)
        return self.scale * nn.Dense(4, dtype=dtype, param_dtype=dtype)(x.astype(dtype))


def test_sizes_are_static_and_rates_are_per_lane(tiny_dataset):
    assert found(
        tiny_dataset,
        lambda hp: MLP(width=hp.width, rate=hp.rate),
        lambda hp: optax.adamw(hp.lr, b1=hp.b1, weight_decay=hp.decay),
        width=jp.choice(8, 16),
        rate=jp.uniform(0, 0.5),
        lr=jp.log_uniform(1e-4, 1e-1),
        b1=jp.uniform(0.8, 0.95),
        decay=jp.log_uniform(1e-6, 1e-2),
    ) == {
        "width": False,
        "rate": True,
        "lr": True,
        "b1": True,
        "decay": True,
    }


def test_depth_is_static(tiny_dataset):
    model = lambda hp: Deep(hp.depth)  # noqa: E731
    assert found(tiny_dataset, model, depth=jp.integer(1, 2)) == {"depth": False}


def test_the_users_line_is_named(tiny_dataset):
    def model(hp):
        return MLP(width=hp.width)

    finding = lanes(tiny_dataset, model, {"width": jp.choice(8, 16)})["width"]
    assert "test_detect.py" in finding.line
    assert "return MLP(width=hp.width)" in finding.line


def test_strings(tiny_dataset):
    options = {"relu": nn.relu, "tanh": nn.tanh}

    class Net(nn.Module):
        activation: object

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(self.activation(nn.Dense(8)(x)))

    activation = {"activation": jp.choice("relu", "tanh")}
    ways = {
        "switch": (lambda hp: Net(jp.switch(hp.activation, options)), True),
        "index": (lambda hp: Net(options[hp.activation]), False),
        "getattr": (lambda hp: Net(getattr(nn, hp.activation)), False),
        "equal": (
            lambda hp: Net(nn.relu if hp.activation == "relu" else nn.tanh),
            False,
        ),
        "format": (lambda hp: Net(options[f"{hp.activation}"]), False),
        "upper": (lambda hp: Net(options[hp.activation.lower()]), False),
    }
    for name, (model, per_lane) in ways.items():
        assert found(tiny_dataset, model, **activation) == {"activation": per_lane}, (
            name
        )


@pytest.mark.slow
def test_optimizers(tiny_dataset):
    def switched(hp):
        branches = {"sgd": optax.sgd(hp.lr), "adam": optax.adam(hp.lr)}
        return jp.optimizers.switch(hp.kind, branches)

    def chosen(hp):
        return {"sgd": optax.sgd, "adam": optax.adam}[hp.kind](hp.lr)

    space = {"lr": jp.log_uniform(1e-3, 1e-1), "kind": jp.choice("sgd", "adam")}
    for optimizer, per_lane in ((switched, True), (chosen, False)):
        assert found(tiny_dataset, lambda hp: MLP(), optimizer, **space) == {
            "lr": True,
            "kind": per_lane,
        }
    trials = [{"lr": 0.01, "kind": name} for name in ("sgd", "adam")]
    tasks = [jp.Task(lambda hp: MLP(), tx, tiny_dataset) for tx in (switched, chosen)]
    together, alone = (
        jp.train(task, trials, epochs=3, engine=engine, workers=1)
        for task, engine in zip(tasks, ("packed", "solo"), strict=True)
    )
    for a, b in zip(together, alone, strict=True):
        assert difference(a.params, b.params) < 1e-6


def test_warm_up_peaks_need_our_schedules(tiny_dataset):
    space = {"peak": jp.log_uniform(1e-4, 1e-1)}

    def ours(hp):
        return optax.adam(jp.schedules.warmup_cosine(0.0, hp.peak, 2, hp.total_steps))

    def stock(hp):
        schedule = optax.warmup_cosine_decay_schedule(0.0, hp.peak, 2, hp.total_steps)
        return optax.adam(schedule)

    assert found(tiny_dataset, lambda hp: MLP(), ours, **space) == {"peak": True}
    with pytest.raises(ValueError, match=r"hparam peak .*jaxpack\.schedules"):
        found(tiny_dataset, lambda hp: MLP(), stock, **space)


def test_a_python_condition_on_a_continuous_hparam_is_an_error(tiny_dataset):
    def model(hp):
        return MLP(width=8 if hp.x > 0.5 else 16)

    with pytest.raises(ValueError, match=r"hparam x is continuous.*hp\.x > 0\.5"):
        found(tiny_dataset, model, x=CONTINUOUS)
    with pytest.warns(UserWarning, match="8 trials need 8 programs"):
        static = found(tiny_dataset, model, x=jp.uniform(0.1, 0.9, static=True))
    assert static == {"x": False}


def test_numpy_on_a_continuous_hparam_is_an_error(tiny_dataset):
    def optimizer(hp):
        return optax.sgd(np.exp(np.log(hp.x)))

    with pytest.raises(ValueError, match=r"np\.exp.*jnp\.log for np\.log"):
        found(tiny_dataset, lambda hp: MLP(), optimizer, x=CONTINUOUS)
    assert found(
        tiny_dataset,
        lambda hp: MLP(),
        lambda hp: optax.sgd(jnp.log(hp.x)),
        x=CONTINUOUS,
    ) == {"x": True}


@pytest.mark.parametrize("use", ["isinstance", "swallowed"])
def test_code_that_looks_at_the_type_is_found_out(tiny_dataset, use):
    def model(hp):
        if use == "isinstance":
            return Scaled(hp.x if isinstance(hp.x, float) else 0.123)
        try:
            return Scaled(float(hp.x))
        except Exception:
            return Scaled(0.123)

    with pytest.raises(ValueError, match="differs from the one that its Python value"):
        found(tiny_dataset, model, x=CONTINUOUS)
    assert found(tiny_dataset, model, x=jp.choice(0.2, 0.4)) == {"x": False}


def test_a_name_made_of_a_value_is_found_out(tiny_dataset):
    class Named(nn.Module):
        x: float

        @nn.compact
        def __call__(self, inputs):
            return nn.Dense(4, name=f"layer_{self.x}".replace(".", "_"))(inputs)

    model = lambda hp: Named(hp.x)  # noqa: E731
    assert found(tiny_dataset, model, x=jp.choice(0.25, 0.5)) == {"x": False}


def test_unused_hparams_are_warned_about(tiny_dataset):
    for model in (
        lambda hp: MLP(),
        lambda hp: MLP(rate=0.0 * 0 if hp.x is None else 0),
    ):
        with pytest.warns(UserWarning, match="hparam x is never used"):
            found(tiny_dataset, model, x=CONTINUOUS)


def test_numbers_of_all_kinds_are_per_lane_as_numbers(tiny_dataset):
    def model(hp):
        return Scaled(hp.k * jnp.where(hp.flag, 1.0, 0.5))

    space = {"k": jp.integer(1, 5), "flag": jp.choice(True, False)}
    assert found(tiny_dataset, model, **space) == {"k": True, "flag": True}


def test_a_bool_that_python_needs_is_static(tiny_dataset):
    def optimizer(hp):
        return optax.sgd(0.1, momentum=0.9, nesterov=hp.nesterov)

    nesterov = jp.choice(True, False)
    assert found(tiny_dataset, lambda hp: MLP(), optimizer, nesterov=nesterov) == {
        "nesterov": False
    }


def test_a_bfloat16_model_stays_one(tiny_dataset):
    task = jp.Task(
        lambda hp: Scaled(hp.scale, "bfloat16"),
        lambda hp: optax.sgd(hp.lr, momentum=hp.momentum),
        tiny_dataset,
        loss=lambda o, y: optax.softmax_cross_entropy_with_integer_labels(
            o.astype(jnp.float32), y
        ),
    )
    trials = [{"scale": 0.5, "lr": 0.1, "momentum": 0.9}] * 2
    for engine in ("packed", "solo"):
        result, _ = jp.train(task, trials, epochs=2, engine=engine)
        assert result.params["Dense_0"]["kernel"].dtype == jnp.bfloat16


def test_declared_per_lane_but_static_is_an_error(tiny_dataset):
    with pytest.raises(ValueError, match="hparam width is declared static=False"):
        found(
            tiny_dataset,
            lambda hp: MLP(width=hp.width),
            width=jp.choice(8, 16, static=False),
        )


def test_declared_static_stays_static(tiny_dataset):
    assert found(
        tiny_dataset, lambda hp: Scaled(hp.x), x=jp.choice(0.5, 1.5, static=True)
    ) == {"x": False}


def test_what_no_trial_of_a_family_reads_splits_no_program(tiny_dataset):
    def model(hp):
        return Deep(hp.depth) if hp.family == "deep" else MLP(width=hp.width)

    task = jp.Task(model, lambda hp: optax.sgd(0.1), tiny_dataset)
    space = jp.Space(
        family=jp.choice("deep", "mlp"), depth=jp.choice(1, 2), width=jp.choice(8, 16)
    )
    plan = jp.explain(task, space, jp.RandomSearch(8, 1), seed=2)
    keys = {pack.key for pack in plan.packs}
    assert keys == {
        (("family", "deep"), ("depth", 1)),
        (("family", "deep"), ("depth", 2)),
        (("family", "mlp"), ("width", 8)),
        (("family", "mlp"), ("width", 16)),
    }


def test_the_users_own_error_is_raised_as_it_is(tiny_dataset):
    def model(hp):
        return MLP(width=hp.widht)

    with pytest.raises(AttributeError, match="did you mean 'width'") as raised:
        found(tiny_dataset, model, width=jp.choice(8, 16))
    assert any(entry.name == "model" for entry in raised.traceback)


@pytest.mark.slow
def test_the_horizon_can_be_traced_or_static(tiny_dataset):
    def cosine(hp):
        return optax.sgd(jp.schedules.cosine(hp.lr, hp.total_steps))

    def stock(hp):
        return optax.sgd(optax.cosine_decay_schedule(hp.lr, hp.total_steps))

    trials = [{"lr": 0.1}, {"lr": 0.1}]
    for optimizer in (cosine, stock):
        task = jp.Task(lambda hp: MLP(), optimizer, tiny_dataset, batch_size=16)
        results = jp.train(task, trials, epochs=2, horizon=[2, 6])
        for i, (result, horizon) in enumerate(zip(results, (2, 6), strict=True)):
            params, _, _ = train_alone(
                MLP(),
                optax.sgd(optax.cosine_decay_schedule(0.1, horizon * 4)),
                tiny_dataset.train,
                steps=8,
                batch_size=16,
                trial=i,
                train_flag="train",
            )
            assert difference(result.params, params) < 1e-5


class Contrastive(nn.Module):
    """Looks at the whole batch, as no mask can prevent."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        return x - x.mean(0, keepdims=True)


@pytest.mark.parametrize("engine", ["packed", "solo"])
def test_a_model_that_mixes_examples_gets_its_short_batches_whole(tiny_dataset, engine):
    task = jp.Task(
        lambda hp: Contrastive(),
        lambda hp: optax.sgd(hp.lr),
        tiny_dataset,
        batch_size=16,
    )
    (result, _) = jp.train(task, [{"lr": 0.1}, {"lr": 0.2}], epochs=2, engine=engine)
    params, _, _ = train_alone(
        Contrastive(), optax.sgd(0.1), tiny_dataset.train, steps=8, batch_size=16
    )
    assert difference(result.params, params) < 1e-5


def test_a_rate_of_zero_is_compared_without_running_a_step(tiny_dataset, monkeypatch):
    def run(*_):
        raise AssertionError("a step was compiled and run")

    monkeypatch.setattr(probe, "_difference", run)
    model = lambda hp: MLP(rate=hp.rate)  # noqa: E731
    assert found(tiny_dataset, model, rate=jp.choice(0.0, 0.5)) == {"rate": True}


def test_what_an_error_names_is_not_searched_for(tiny_dataset, monkeypatch):
    monkeypatch.setattr(detect, "_one_by_one", None)
    model = lambda hp: MLP(width=hp.width, rate=hp.rate)  # noqa: E731
    space = {"width": jp.choice(8, 16), "rate": jp.uniform(0, 0.5)}
    assert found(tiny_dataset, model, **space) == {"width": False, "rate": True}


def test_texts_of_parameters_tell_strings_from_numbers():
    assert jaxprs._shown(("1", 1)) == "('1', 1)"
