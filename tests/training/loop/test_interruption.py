from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from conf.artefacts.run import read_json, resolve_run
from conf.errors import TrainingCancelledError, TrainingInterruptedError
from conf.training.train import TrainConfig
from tests.training.killed_run import CONFIG, ActsAfter
from training import fit as fit_module
from training.checkpoint.checkpoint_files import Position, list_checkpoints
from training.checkpoint.restore import load_run
from training.fit import fit_run
from training.loop.epochs import StopNowError, StopRequest, stop_on_signals
from training.monitoring.progress import NoProgress
from training.monitoring.run_logs import read_steps

KINDS = {
    signal.SIGTERM: (TrainingInterruptedError, 143),
    signal.SIGINT: (TrainingCancelledError, 130),
}


@pytest.mark.parametrize("number", KINDS)
def test_the_first_signal_is_a_request_and_the_second_is_as_before(number: int) -> None:
    calls: list[int] = []
    before = signal.signal(number, lambda received, frame: calls.append(received))
    try:
        with stop_on_signals() as stop:
            assert not stop.requested
            os.kill(os.getpid(), number)
            assert stop.requested
            assert calls == []
            os.kill(os.getpid(), number)
            assert calls == [number]
        error = stop.build_error("after step 3 of epoch 1")
        assert (type(error), error.exit_code) == KINDS[number]
        assert "--resume" in str(error)
    finally:
        signal.signal(number, before)


def test_work_that_changes_nothing_ends_at_once() -> None:
    stop = StopRequest()
    with stop.immediate():
        pass
    reached = []
    with pytest.raises(StopNowError), stop.immediate():
        reached.append(stop.request(signal.SIGTERM))
    with pytest.raises(StopNowError), stop.immediate():
        reached.append("too far")
    assert reached == []
    stop.request(signal.SIGTERM)  # elsewhere it is taken note of


def configure(version: Path, root: Path) -> TrainConfig:
    return CONFIG.model_copy(update={"dataset": str(version), "root": str(root)})


@pytest.fixture(scope="module")
def whole(tiny_version: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit_run(configure(tiny_version, tmp_path_factory.mktemp("whole")), NoProgress())


def weights(run: Path) -> list[np.ndarray]:
    return [variable.numpy() for variable in load_run(run, "last").model.trainable_variables]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "after", "saved"),
    [(signal.SIGTERM, 7, Position(0, 9)), (signal.SIGINT, 24, Position(1, 12))],
)
def test_a_signal_saves_and_ends_the_run(
    number: int, after: int, saved: Position, whole: Path, tiny_version: Path, tmp_path: Path
) -> None:
    config = configure(tiny_version, tmp_path)
    kind, code = KINDS[signal.Signals(number)]
    with pytest.raises(kind) as caught:
        fit_run(config, ActsAfter(after, lambda: os.kill(os.getpid(), number)))
    assert caught.value.exit_code == code
    (run,) = (tmp_path / "t" / "runs").iterdir()
    assert list_checkpoints(run / "checkpoints" / "last")[-1].position == saved
    card = read_json(run / "run_card.json")
    assert card["status"] == "interrupted"
    spent = card["timing"]["train_seconds"]
    assert spent > 0
    assert not (tmp_path / "t" / "CURRENT").exists()
    assert fit_run(config, NoProgress(), resume=True) == run
    card = read_json(run / "run_card.json")
    assert (card["status"], card["error"]) == ("trained", None)
    assert card["timing"]["train_seconds"] > spent
    assert resolve_run(str(tmp_path / "t")) == run
    found, expected = read_steps(run), read_steps(whole)
    assert [(line.step, line.loss) for line in found] == [
        (line.step, line.loss) for line in expected
    ]
    assert all(np.array_equal(a, b) for a, b in zip(weights(run), weights(whole), strict=True))


def test_a_signal_ends_validation_at_once(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = []

    def validate(model) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("too far")
        return {}

    monkeypatch.setattr(fit_module, "build_validate", lambda config, data: validate)
    with pytest.raises(TrainingInterruptedError):
        fit_run(configure(tiny_version, tmp_path), NoProgress())
    (run,) = (tmp_path / "t" / "runs").iterdir()
    assert reached == []
    assert list_checkpoints(run / "checkpoints" / "last")[-1].position == Position(0, 12)
    assert not (run / "history.json").exists()
