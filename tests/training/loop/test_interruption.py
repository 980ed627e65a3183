from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from conf.artefacts.run import read_json, resolve_run
from conf.errors import TrainingCancelledError, TrainingInterruptedError
from tests.training.killed_run import CONFIG, ActsAfter
from training import fit as fit_module
from training.checkpoint.checkpoint_files import Position, list_checkpoints
from training.fit import fit_run
from training.loop.epochs import stop_on_signals
from training.monitoring.progress import TrainingProgress
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


def test_signals_save_the_state_and_end_validation_at_once(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def validate(model) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("too far")

    config = CONFIG.model_copy(update={"dataset": str(tiny_version), "root": str(tmp_path)})
    monkeypatch.setattr(fit_module, "build_validate", lambda config, data: validate)
    with pytest.raises(TrainingInterruptedError):
        fit_run(config, TrainingProgress())
    monkeypatch.undo()
    (run,) = (tmp_path / "t" / "runs").iterdir()
    assert list_checkpoints(run / "checkpoints" / "last")[-1].position == Position(0, 12)
    assert not (run / "history.json").exists()
    with pytest.raises(TrainingCancelledError):
        fit_run(config, ActsAfter(20, lambda: os.kill(os.getpid(), signal.SIGINT)), resume=True)
    assert list_checkpoints(run / "checkpoints" / "last")[-1].position == Position(1, 9)
    card = read_json(run / "run_card.json")
    spent = card["timing"]["train_seconds"]
    assert (card["status"], spent > 0) == ("interrupted", True)
    assert not (tmp_path / "t" / "CURRENT").exists()
    assert fit_run(config, TrainingProgress(), resume=True) == run
    card = read_json(run / "run_card.json")
    assert (card["status"], card["error"]) == ("trained", None)
    assert card["timing"]["train_seconds"] > spent
    assert resolve_run(str(tmp_path / "t")) == run
    fit_run(config.model_copy(update={"root": str(tmp_path / "whole")}), TrainingProgress())
    (whole,) = (tmp_path / "whole" / "t" / "runs").iterdir()
    found, expected = ([(s.step, s.loss) for s in read_steps(one)] for one in (run, whole))
    assert found == expected
