"""Archives: checked, unpacked safely, complete or not at all."""

import json
import os
import socket
import stat
import zipfile

import pytest

from conf.errors import ConfigError, InputDataError, InternalError, UpstreamNotReadyError
from etl.sample_data import archive as archive_module
from etl.sample_data.archive import (
    ARCHIVES,
    BASE_URL,
    fetch_archive,
    replace_directory,
    unpack_zip,
)
from tests.etl.sample_data.helpers import FILES, Script, make_archive, make_zip, serve


def listed(folder):
    """What is in a folder, the files that processes lock aside."""
    return sorted(name for name in os.listdir(folder) if not name.endswith(".lock"))


def publish(out, text="new", *, overwrite=False):
    with replace_directory(out, "CARD", overwrite=overwrite) as staging:
        (staging / "CARD").write_text(text)


def test_publishes_into_new_nested_and_empty_directories(tmp_path):
    publish(tmp_path / "a" / "b")
    (tmp_path / "empty").mkdir()
    publish(tmp_path / "empty")
    assert (tmp_path / "a" / "b" / "CARD").read_text() == "new"
    assert (tmp_path / "empty" / "CARD").read_text() == "new"
    assert listed(tmp_path) == ["a", "empty"]


def test_replaces_only_on_request_and_only_its_own_kind(tmp_path):
    out = tmp_path / "out"
    publish(out, "old")
    with pytest.raises(ConfigError, match="not empty"):
        publish(out)
    assert (out / "CARD").read_text() == "old"
    publish(out, overwrite=True)
    assert (out / "CARD").read_text() == "new"
    (out / "CARD").rename(out / "thesis.txt")
    with pytest.raises(ConfigError, match="refusing"):
        publish(out, overwrite=True)
    assert (out / "thesis.txt").exists()
    assert listed(tmp_path) == ["out"]


def test_a_failed_block_leaves_everything_as_it_was(tmp_path):
    out = tmp_path / "out"
    publish(out, "old")
    with pytest.raises(UnicodeEncodeError):
        publish(out, "half \udc80", overwrite=True)
    assert (out / "CARD").read_text() == "old"
    assert listed(tmp_path) == ["out"]


def test_refuses_files_and_links(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="not a directory"):
            publish(tmp_path / name, overwrite=True)


def test_a_full_or_closed_disk_is_reported(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InternalError, match="cannot write"):
        publish(tmp_path / "file" / "below")
    with (
        pytest.raises(InternalError, match="No space"),
        replace_directory(tmp_path / "out", "CARD", overwrite=False),
    ):
        raise OSError(28, "No space left on device")
    assert listed(tmp_path) == ["file"]


@pytest.mark.parametrize("out_is_there", [True, False])
def test_what_a_killed_process_left_is_restored_and_swept(tmp_path, out_is_there):
    out, replaced = tmp_path / "out", tmp_path / ".out.replaced"
    publish(out, "old")
    (tmp_path / ".out.staging").mkdir()
    (tmp_path / ".out.staging" / "CARD").write_text("lost")
    if not out_is_there:  # killed between the two renames of a system that cannot swap names
        out.rename(replaced)
    with pytest.raises(ConfigError, match="not empty"):
        publish(out)
    assert (out / "CARD").read_text() == "old"
    assert listed(tmp_path) == ["out"]


def test_a_live_process_is_left_alone(tmp_path):
    out = tmp_path / "out"
    with replace_directory(out, "CARD", overwrite=False) as staging:
        (staging / "CARD").write_text("slow")
        publish(tmp_path / "other")
        with pytest.raises(UpstreamNotReadyError, match="another process"):
            publish(out, "quick")
        assert staging.is_dir()
    assert (out / "CARD").read_text() == "slow"


def test_leftovers_of_other_names_are_not_ours(tmp_path):
    (tmp_path / ".out2.staging").mkdir()
    (tmp_path / ".out.notes").mkdir()
    publish(tmp_path / "out")
    assert listed(tmp_path) == [".out.notes", ".out2.staging", "out"]


@pytest.fixture
def _no_waiting(monkeypatch):
    monkeypatch.setattr(archive_module.time, "sleep", lambda seconds: None)


def fetch(script, out, archive=None, *, overwrite=False):
    with serve(script):
        known = archive or make_archive(script.body)
        return fetch_archive(known, out, script.base_url, overwrite=overwrite)


@pytest.mark.usefixtures("_no_waiting")
def test_downloads_verifies_and_strips_the_top_folder(tmp_path):
    script = Script(make_zip())
    card = fetch(script, tmp_path / "out")
    assert script.asked == ["/sets/ml-x.zip"]
    assert sorted(os.listdir(tmp_path / "out")) == ["DOWNLOAD.json", "README", "users.dat"]
    assert (tmp_path / "out" / "README").read_bytes() == FILES["ml-x/README"]
    assert json.loads((tmp_path / "out" / "DOWNLOAD.json").read_text()) == card


@pytest.mark.usefixtures("_no_waiting")
@pytest.mark.parametrize("kind", ["md5", "sha256"])
def test_refuses_a_wrong_checksum_and_leaves_nothing(tmp_path, kind):
    content = make_zip()
    archive = make_archive(content)
    archive.checksums[kind] = "0" * 32
    with pytest.raises(InputDataError, match="not the published file") as caught:
        fetch(Script(content), tmp_path / "out", archive)
    assert caught.value.exit_code == 3
    assert listed(tmp_path) == []


@pytest.mark.usefixtures("_no_waiting")
def test_a_refused_download_leaves_the_earlier_one(tmp_path):
    fetch(Script(make_zip()), tmp_path / "out")
    with pytest.raises(ConfigError, match="not empty"):
        fetch(Script(make_zip()), tmp_path / "out")
    with pytest.raises(InputDataError):
        fetch(Script(b"other"), tmp_path / "out", make_archive(make_zip()), overwrite=True)
    assert (tmp_path / "out" / "users.dat").read_bytes() == FILES["ml-x/users.dat"]
    assert listed(tmp_path) == ["out"]


@pytest.mark.usefixtures("_no_waiting")
@pytest.mark.parametrize(
    "name", ["../escaped.txt", "ml-x/../../escaped.txt", "/abs.txt", "ml-x\\..\\e.txt", "C:/e.txt"]
)
def test_refuses_entries_that_leave_the_target(tmp_path, name):
    content = make_zip({**FILES, name: b"x"})
    with pytest.raises(InputDataError, match="unsafe entry"):
        fetch(Script(content), tmp_path / "deep" / "out")
    assert listed(tmp_path / "deep") == []
    assert listed(tmp_path) == ["deep"]


@pytest.mark.parametrize(
    "names",
    [
        ["ml-x/a", "ml-x/a"],
        ["ml-x/a", "ml-x//a"],
        ["ml-x/a", "ml-x/a/b"],
        ["ml-x/a/b", "ml-x/a"],
        ["ml-x/" + "n" * 300],
        ["ml-x/" + "ü" * 200],
        ["ml-x/" + "d/" * 99 + "f"],
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_refuses_entries_that_hide_each_other_or_have_long_names(tmp_path, names):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    with pytest.raises(InputDataError, match="cannot be unpacked beside the others"):
        unpack_zip(tmp_path / "a.zip", tmp_path / "out", 1_000)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("_no_waiting")
def test_refuses_links(tmp_path):
    link = zipfile.ZipInfo("ml-x/users.dat")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(InputDataError, match="unsafe entry"):
        unpack_zip(tmp_path / "a.zip", tmp_path, 1_000)


@pytest.mark.usefixtures("_no_waiting")
def test_refuses_too_many_bytes_packed_and_unpacked(tmp_path, monkeypatch):
    bomb = make_zip({"ml-x/users.dat": bytes(1_000_000)})
    monkeypatch.setattr(archive_module, "MAX_UNPACKED_BYTES", 999_999)
    with pytest.raises(InputDataError, match="unpacks to too many"):
        fetch(Script(bomb), tmp_path / "out")
    monkeypatch.setattr(archive_module, "MAX_BYTES", 100)
    for states_length in (True, False):  # A server need not say how many bytes come.
        monkeypatch.setattr(archive_module, "_BLOCK_BYTES", 50)
        script = Script(bomb, states_length=states_length)
        with pytest.raises(InputDataError, match="download is too large"):
            fetch(script, tmp_path / "out")
        assert len(script.asked) == 1
    assert listed(tmp_path) == []


@pytest.mark.usefixtures("_no_waiting")
def test_refuses_what_is_no_zip_or_lacks_files(tmp_path):
    with pytest.raises(InputDataError, match="cannot be unpacked"):
        fetch(Script(b"<html>login</html>"), tmp_path / "out")
    with pytest.raises(InputDataError, match="lacks files"):
        fetch(Script(make_zip({"ml-x/other": b""})), tmp_path / "out")


@pytest.mark.usefixtures("_no_waiting")
def test_refuses_an_archive_with_damaged_content(tmp_path):
    content = bytearray(make_zip({"ml-x/users.dat": bytes(range(256)) * 40}))
    start = 30 + len("ml-x/users.dat")
    content[start : start + 8] = b"\xff" * 8
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(InputDataError, match="cannot be unpacked"):
        unpack_zip(tmp_path / "a.zip", tmp_path / "out", 1 << 20)


@pytest.mark.usefixtures("_no_waiting")
def test_tries_again_after_failures_that_may_pass(tmp_path):
    script = Script(make_zip(), failures=[503, 500])
    fetch(script, tmp_path / "out")
    assert len(script.asked) == 3


@pytest.mark.usefixtures("_no_waiting")
def test_does_not_try_again_where_it_is_useless(tmp_path):
    script = Script(make_zip(), failures=[404, 404])
    with pytest.raises(UpstreamNotReadyError, match="404"):
        fetch(script, tmp_path / "out")
    assert len(script.asked) == 1


@pytest.mark.usefixtures("_no_waiting")
def test_a_cut_connection_is_not_taken_for_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(archive_module, "_ATTEMPTS", 2)
    script = Script(make_zip(), stated_length=10_000)
    with pytest.raises(UpstreamNotReadyError, match=r"connection closed|IncompleteRead"):
        fetch(script, tmp_path / "out")
    assert len(script.asked) == 2
    assert listed(tmp_path) == []


@pytest.mark.usefixtures("_no_waiting")
def test_no_server_is_upstream_not_ready(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UpstreamNotReadyError) as caught:
            fetch_archive(make_archive(b""), tmp_path / "out", url)
    assert caught.value.exit_code == 4
    assert listed(tmp_path) == []


@pytest.mark.usefixtures("_no_waiting")
@pytest.mark.parametrize("url", ["http://example.org/x", "file:///etc", "ftp://localhost/x", "x"])
def test_refuses_addresses_that_are_not_https(tmp_path, url):
    with pytest.raises(ConfigError, match="not secure"):
        fetch_archive(make_archive(b""), tmp_path / "out", url)


@pytest.mark.usefixtures("_no_waiting")
def test_refuses_a_redirect_to_an_insecure_address(tmp_path):
    with pytest.raises(ConfigError, match="not secure"):
        fetch(Script(b"", redirect="http://example.org/ml-x.zip"), tmp_path / "out")


@pytest.mark.usefixtures("_no_waiting")
def test_known_archives_come_over_https_with_full_checksums():
    assert BASE_URL.startswith("https://")
    for name, known in ARCHIVES.items():
        assert known.name == name
        sizes = {kind: len(bytes.fromhex(text)) for kind, text in known.checksums.items()}
        assert sizes == {"md5": 16, "sha256": 32}
