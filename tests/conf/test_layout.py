from __future__ import annotations

import json
from dataclasses import replace

import pytest

from conf.errors import ConfigError, InputDataError
from conf.layout import PackedSlot, dump_slots, packed_lengths, parse_slots, plan_slots
from conf.manifest import Manifest
from conf.schema import FeatureSchema, FeatureSpec
from etl.tfrecord.features import WireFeature
from etl.tfrecord.lowering.packing import PACKED_PREFIX, packed_kind
from tests.conf.manifests import build_manifest

SCHEMA = FeatureSchema(
    (
        FeatureSpec("a", "int64", "user"),
        FeatureSpec("x", "float32", "item"),
        FeatureSpec("lists", "int64", "user", (None,)),
        FeatureSpec("pair", "float32", "user", (2,)),
        FeatureSpec("b", "int64", "label"),
        FeatureSpec("text", "bytes", "id"),
    )
)


def test_scalars_get_slots_type_by_type_and_lists_none():
    slots = plan_slots(SCHEMA)
    assert slots == (
        PackedSlot("a", "packed.int64", 0),
        PackedSlot("b", "packed.int64", 1),
        PackedSlot("x", "packed.float", 0),
        PackedSlot("text", "packed.bytes", 0),
    )
    assert packed_lengths(slots) == {"packed.int64": 2, "packed.float": 1, "packed.bytes": 1}


def test_names_are_those_of_the_data_source():
    for spec in SCHEMA.features:
        kind = packed_kind(WireFeature(spec.name, spec.dtype).arrow_type)
        slot = next((slot for slot in plan_slots(SCHEMA) if slot.feature == spec.name), None)
        assert slot is None or slot.packed == f"{PACKED_PREFIX}{kind}"


def test_a_manifest_keeps_its_slots():
    manifest = replace(build_manifest("1"), slots=plan_slots(SCHEMA))
    again = Manifest.loads(manifest.dumps())
    assert again.slots == manifest.slots
    assert again.layout == "packed"
    data = json.loads(manifest.dumps())
    data["slots"] = [{"feature": "a"}]
    with pytest.raises(InputDataError, match="not complete"):
        Manifest.loads(json.dumps(data))


def test_slots_pass_through_an_option():
    slots = plan_slots(SCHEMA)
    assert parse_slots(dump_slots(slots)) == slots
    for text in ("{", "[1]", '[{"name": "a"}]', "7"):
        with pytest.raises(ConfigError, match="packedSlots"):
            parse_slots(text)
