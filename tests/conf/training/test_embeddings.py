from __future__ import annotations

import pytest

from conf.errors import ConfigError, ExitCode
from conf.load import load_config
from conf.training import DynamicTableConfig, StaticTableConfig, TrainConfig


def load(*overrides: str) -> TrainConfig:
    return load_config(TrainConfig, "training", None, ("dataset=d", "name=n", *overrides))


@pytest.mark.parametrize("model", ["dssm", "mf"])
def test_tables_are_static_unless_said_otherwise(model: str) -> None:
    assert load(f"model.name={model}").model.embeddings == {}
    assert load("model.embeddings.a=static").model.embeddings == {"a": StaticTableConfig()}


def test_a_kind_may_stand_alone_and_keys_without_one_are_those_of_a_dynamic_table() -> None:
    found = load("model.embeddings.a=dynamic", "model.embeddings.b.max_rows=7").model.embeddings
    assert found == {"a": DynamicTableConfig(), "b": DynamicTableConfig(max_rows=7)}
    again = TrainConfig.model_validate(load("model.embeddings.a=dynamic").resolved())
    assert again.model.embeddings == {"a": DynamicTableConfig()}


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("model.embedings.a=dynamic", "embeddings"),
        ("model.embeddings.a.max_row=7", "max_rows"),
        ("model.embeddings.a.max_rows=0", "max_rows"),
        ("model.embeddings.a.max_rows=18446744073709551616", "less than or equal"),
        ("model.embeddings.a.capacity=9223372036854775807", "less than or equal"),
        ("model.embeddings.a=dinamic", "dynamic"),
        ("model.embeddings.a.features=[]", "features"),
    ],
)
def test_what_is_misspelt_is_refused_with_what_is_near(override: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        load(override)


@pytest.mark.parametrize("strategy", ["multi_worker", "parameter_server"])
def test_several_processes_are_refused_with_what_works(strategy: str) -> None:
    with pytest.raises(ConfigError, match="auto, none or mirrored") as caught:
        load("model.embeddings.a=dynamic", f"devices.strategy={strategy}")
    assert caught.value.exit_code == ExitCode.CONFIG
    load("model.embeddings.a=static", f"devices.strategy={strategy}")
