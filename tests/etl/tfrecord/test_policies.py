"""Policies as users give them: option names, values, JSON, and what is refused."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from conf.errors import ConfigError
from etl.tfrecord.policies import (
    LOWERING_OPTIONS,
    ColumnPolicy,
    LoweringOptions,
    option_name,
    parse_lowering_options,
)


def test_nothing_given_is_the_default_and_other_options_are_ignored() -> None:
    assert parse_lowering_options({}) == LoweringOptions()
    assert parse_lowering_options({"path": "/x", "recordtype": "Example"}) == LoweringOptions()


def test_parses_every_option() -> None:
    options = parse_lowering_options(
        {
            "float64": "CLIP", "integers": "clip", "nulls": "default", "nullelements": "drop",
            "default": "-1", "dates": "iso", "timestamps": "ms", "maps": "keys",
            "mapkeys": '["a", "b"]', "vectors": "sparse", "structseparator": "/",
            "namecollisions": "rename", "layout": "packed",
            "columns": '{"price": {"float64": "cast", "nullElements": "default", "default": 2.5}}',
        }
    )  # fmt: skip
    everywhere = ColumnPolicy(
        "clip", "clip", "default", "drop", "-1", "iso", "ms", "keys", ("a", "b"), "sparse"
    )
    assert options.default == everywhere
    assert (options.struct_separator, options.name_collisions, options.layout) == (
        "/", "rename", "packed"
    )  # fmt: skip
    price = options.columns["price"]
    assert (price.float64, price.null_elements, price.default) == ("cast", "default", 2.5)
    assert price.dates == "iso"  # what a column does not say is as for all columns


def test_every_option_name_reaches_the_parser_in_lower_case() -> None:
    bad = {"mapKeys": "1", "columns": "[]", "structSeparator": ""}
    for name in set(LOWERING_OPTIONS) - {"default"}:
        with pytest.raises(ConfigError, match=name):
            parse_lowering_options({name.lower(): bad.get(name, "nonsense")})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"float64": "clipp"}, "did you mean 'clip'"),
        ({"columns": '{"x": {"float46": "cast"}}'}, r"(?s)column 'x'.*did you mean 'float64'"),
        ({"columns": '{"x": {"float64": "cats"}}'}, r"(?s)column 'x'.*did you mean 'cast'"),
        ({"columns": '{"x": {"float64": 1}}'}, "allowed:  error, exact, cast, clip"),
        ({"columns": '{"x": "cast"}'}, "object of objects"),
        ({"columns": '{"x": '}, r'(?s)not JSON: .*allowed:  JSON such as {"price"'),
        ({"columns": '{"x": {"default": [1]}}'}, "number or text"),
        ({"columns": '{"x": {"default": true}}'}, "number or text"),
        ({"mapkeys": "a,b"}, r"(?s)'mapKeys' is not JSON: .*received: a,b.*allowed:  a JSON list"),
        ({"mapkeys": '["a", "a"]'}, "different keys"),
        ({"mapkeys": '["a", 1]'}, "mapKeys"),
    ],
)
def test_bad_values_say_what_is_allowed(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_lowering_options(given)


def test_fields_go_by_the_nearest_struct_around_them() -> None:
    inner, outer = ColumnPolicy(nulls="error"), ColumnPolicy(nulls="default")
    options = LoweringOptions(columns={"a.b": inner, "a": outer})
    assert options.policy("a.b.c") is inner
    assert options.policy("a.c") is outer
    assert options.policy("b") is options.default
    assert options.policy_name("a.b.c") == "a.b"
    assert options.policy_name("ab") is None


def test_options_can_be_pickled_and_hashed() -> None:
    options = parse_lowering_options({"columns": '{"x": {"nulls": "error"}}'})
    assert pickle.loads(pickle.dumps(options)) == options
    assert len({options, parse_lowering_options({})}) <= 2


def test_option_names_of_fields() -> None:
    assert option_name("null_elements") == "nullElements"


def test_needs_the_standard_library_alone() -> None:
    code = (
        "import sys, etl.tfrecord.policies; "
        "sys.exit(bool({'numpy', 'pyarrow', 'pyspark', 'numba'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
