"""Which Java runtime is taken, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from conf.errors import ConfigError
from jobs.support import java_runtime


def fake_runtime(folder: Path, version: str = "21.0.8") -> Path:
    launcher = folder / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = -version ] && {{ echo \'openjdk version "{version}"\' >&2; exit 0; }}\n'
        'for a do printf "[%s]" "$a"; done\n'
    )
    launcher.chmod(0o755)
    return folder


def test_wrapper_drops_the_one_option_and_keeps_the_rest(tmp_path):
    java = fake_runtime(tmp_path / "jre") / "bin" / "java"
    home = java_runtime.build_java_home(java, tmp_path / "cache dir")
    arguments = ["-Xmx1g", java_runtime.DROPPED_OPTION, "-cp", "a b:c", "Main", "", "$HOME"]
    run = subprocess.run(
        [home / "bin" / "java", *arguments], capture_output=True, text=True, check=True
    )
    assert run.stdout == "[-Xmx1g][-cp][a b:c][Main][][$HOME]"


def test_each_runtime_has_a_wrapper_of_its_own(tmp_path):
    for name in ("one", "two"):
        java = fake_runtime(tmp_path / name) / "bin" / "java"
        home = java_runtime.build_java_home(java, tmp_path / "cache")
        assert str(java) in (home / "bin" / "java").read_text()
        assert (home / "lib").readlink() == tmp_path / name / "lib"
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_java_home_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JAVA_HOME", str(fake_runtime(tmp_path / "jre")))
    home = java_runtime.ensure_java()
    assert str(tmp_path / "jre" / "bin" / "java") in (home / "bin" / "java").read_text()
    assert os.environ["JAVA_HOME"] == str(home)
    assert java_runtime.ensure_java() == home


def test_java_home_without_java_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="JAVA_HOME"):
        java_runtime.ensure_java()


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.2"])
def test_too_old_a_java_is_no_java(tmp_path, monkeypatch, version):
    old = fake_runtime(tmp_path, version)
    monkeypatch.setenv("JAVA_HOME", str(old))
    with pytest.raises(ConfigError, match="JAVA_HOME"):
        java_runtime.ensure_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(old / "bin"))
    monkeypatch.setattr(java_runtime.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="none was found"):
        java_runtime.ensure_java()


def test_no_java_at_all_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(java_runtime.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        java_runtime.ensure_java()
    assert "sluice-recsys[jre]" in str(refused.value)


def test_a_stub_that_does_not_start_is_not_java(tmp_path, monkeypatch):
    stub = tmp_path / "java"
    stub.write_text("#!/bin/sh\nexit 1\n")
    stub.chmod(0o755)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(java_runtime.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="none was found"):
        java_runtime.ensure_java()
