from __future__ import annotations

import tensorflow as tf

from training.checkpoint.files import Layout
from training.checkpoint.state import State
from training.optimizer_slots import SlotMap, map_slots

LAYOUT = Layout({"a": "model/a", "b": "model/b"}, ("model/v", "model/w"))
SHAPES = {
    "model/a": [5, 2],
    "model/b": [7, 2],
    "model/v": [3],
    "model/w": [2, 2],
    "optimizers/sparse/accumulators/0": [5, 1],
    "optimizers/sparse/accumulators/1": [7, 1],
    "optimizers/dense/_momentums/0": [3],
    "optimizers/dense/_momentums/1": [2, 2],
    "optimizers/sparse/iterations": [],
    "optimizers/dense/_learning_rate": [],
}


def state(**more: list[int]) -> State:
    return State(
        {
            name: tf.Variable(
                tf.zeros(shape, tf.int64 if name.endswith("iterations") else tf.float32)
            )
            for name, shape in {**SHAPES, **more}.items()
        },
        {},
    )


def test_slots_follow_their_weights_and_counters_come_along() -> None:
    old = Layout({"x": "model/x", "b": "model/b", "a": "model/a"}, ("model/w", "model/v"))
    shapes = {
        **SHAPES,
        "optimizers/sparse/accumulators/2": [4, 1],
    }
    fresh: dict[str, str] = {}
    found = {slot.name: slot for slot in map_slots((state(), LAYOUT), (shapes, old), fresh)}
    sparse, dense = "optimizers/sparse/accumulators", "optimizers/dense/_momentums"
    assert found == {
        f"{sparse}/0": SlotMap(f"{sparse}/0", f"{sparse}/2", "a"),
        f"{sparse}/1": SlotMap(f"{sparse}/1", f"{sparse}/1", "b"),
        f"{dense}/0": SlotMap(f"{dense}/0", f"{dense}/1", None),
        f"{dense}/1": SlotMap(f"{dense}/1", f"{dense}/0", None),
        "optimizers/sparse/iterations": SlotMap(
            "optimizers/sparse/iterations", "optimizers/sparse/iterations", None
        ),
    }
    assert fresh == {}  # the rate is of the new config


def test_slots_of_another_optimizer_are_named() -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if "accumulators" not in name}
    fresh: dict[str, str] = {}
    map_slots((state(), LAYOUT), (shapes, LAYOUT), fresh)
    assert set(fresh) == {f"optimizers/sparse/accumulators/{slot}" for slot in (0, 1)}
    fresh.clear()
    more = state(**{"optimizers/odd": [4]})
    map_slots((more, LAYOUT), (SHAPES, LAYOUT), fresh)
    assert set(fresh) == {"optimizers/odd"}


def test_weights_that_are_new_have_no_earlier_slot() -> None:
    old = Layout({"a": "model/a"}, ("model/v", "model/w"))
    fresh: dict[str, str] = {}
    found = {slot.name for slot in map_slots((state(), LAYOUT), (SHAPES, old), fresh)}
    assert "optimizers/sparse/accumulators/0" in found
    assert "optimizers/sparse/accumulators/1" not in found
    assert fresh == {}
