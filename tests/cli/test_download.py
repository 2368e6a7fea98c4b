"""Data sets from a server or from files are complete or absent, resumed after a kill, and checked."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import gymnasium as gym
import pytest

from sandboxgym import EnvCard, SnapshotWrapper, TaskEnv, data
from sandboxgym.cli import download
from sandboxgym.cli.support import transfer
from sandboxgym.registration import data_set

ROOT = Path(__file__).parents[2]
TREE = {f"json_2.1.1/valid_seen/pick_and_place_simple-{n}/trial/game.tw-pddl": os.urandom(40_000) for n in range(5)}
ROWS = b"PAR1" + bytes(2000) + b"PAR1"


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def toy(monkeypatch, server):
    """A data set of an archive and a file, both served."""
    server.content = {"games.zip": zipped(TREE), "rows.parquet": ROWS}
    archive = data.DataFile("games.zip", f"{server.url}/games.zip", holds=("json_2.1.1/*/*/*/game.tw-pddl",))
    rows = data.DataFile("rows.parquet", f"{server.url}/rows.parquet", other_names=("rows.jsonl",))
    dataset = data.DataSet("toy", "a toy", "none", {"games": (archive,), "rows": (rows,)})
    toy = type("Toy", (TaskEnv,), {"card": EnvCard(data_sets=(dataset,))})
    gym.register("toys/Toy-v0", entry_point=toy, additional_wrappers=(SnapshotWrapper.wrapper_spec(),))
    monkeypatch.setattr(transfer.time, "sleep", lambda seconds: None)
    yield data.directory(dataset)
    del gym.registry["toys/Toy-v0"]


def contents(root: Path) -> dict[str, bytes]:
    return {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()}


def test_an_archive_is_fetched_unpacked_recorded_and_nothing_else_stays(run, toy, server):
    status, out, err = run("download", "toy")
    assert (status, "5 files unpacked" in out) == (0, True), err
    found = contents(toy)
    record = json.loads(found.pop("downloads.json"))
    assert found == TREE
    assert record["games.zip"]["sha256"] == hashlib.sha256(server.content["games.zip"]).hexdigest()
    assert data.parts_found(data_set("toy")) == ["games"] and data.find(data_set("toy")) == toy


def test_what_is_there_is_not_fetched_again(run, toy, server):
    run("download", "toy", "--part", "games", "rows")
    server.asked.clear()
    status, out, _ = run("download", "toy", "--part", "games", "rows")
    assert (status, server.asked, out.count("already there")) == (0, [], 2)


def test_a_file_that_changed_on_disk_is_found_out(run, toy):
    run("download", "toy", "--part", "rows")
    (toy / "rows.parquet").write_bytes(ROWS.replace(b"\0", b"\1"))
    status, _, err = run("download", "toy", "--part", "rows")
    assert status == 1 and "has changed since" in err
    assert run("download", "toy", "--part", "rows", "--force")[0] == 0
    assert (toy / "rows.parquet").read_bytes() == ROWS


def test_a_file_that_changed_at_the_source_is_refused_and_the_old_one_kept(run, toy, server):
    run("download", "toy", "--part", "rows")
    server.content["rows.parquet"] = ROWS.replace(b"\0", b"\1")
    status, _, err = run("download", "toy", "--part", "rows", "--force")
    assert status == 1 and "recorded by the first download" in err and "downloads.json" in err
    assert contents(toy).keys() == {"rows.parquet", "downloads.json"} and (toy / "rows.parquet").read_bytes() == ROWS


def test_a_pinned_checksum_is_compared(toy, server, quiet):
    pinned = data.DataFile("rows.parquet", f"{server.url}/rows.parquet", sha256="0" * 64)
    with pytest.raises(transfer.ChecksumMismatch, match="pinned"):
        download.install(pinned, toy, show=quiet)
    assert contents(toy) == {}
    right = data.DataFile("rows.parquet", pinned.url, sha256=hashlib.sha256(ROWS).hexdigest())
    assert "as pinned" in download.install(right, toy, show=quiet)


def test_a_killed_download_goes_on_in_the_next_process(run, toy, server, tmp_path):
    server.stall = threading.Event()
    script = (
        "from sandboxgym.cli.download import install; from sandboxgym.data import DataFile; from pathlib import Path\n"
        f"install(DataFile('games.zip', '{server.url}/games.zip', holds=('json_2.1.1/*/*/*/game.tw-pddl',)), "
        f"Path({str(toy)!r}))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    part = toy / ".downloads" / "games.zip.part"
    half = len(server.content["games.zip"]) // 2
    deadline = time.monotonic() + 300
    try:
        while not part.exists() or part.stat().st_size < half // 2:
            assert process.poll() is None and time.monotonic() < deadline
            threading.Event().wait(0.02)
        status, _, err = run("download", "toy")
        assert status == 1 and "another process" in err
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    server.stall.set()
    had = part.stat().st_size
    assert data.parts_found(data_set("toy")) == []
    assert run("download", "toy")[0] == 0
    assert server.asked[-1] == f"bytes={had}-"
    found = contents(toy)
    del found["downloads.json"]
    assert found == TREE


@pytest.mark.parametrize("local", [False, True])
def test_an_interruption_while_files_are_put_in_place_is_repaired(run, toy, server, tmp_path, monkeypatch, local):
    (tmp_path / "games.zip").write_bytes(server.content["games.zip"])
    source = ("--from", str(tmp_path)) if local else ()

    def interrupted(source: Path, target: Path) -> None:
        place = target / "json_2.1.1/valid_seen/pick_and_place_simple-0"
        place.parent.mkdir(parents=True)
        (source / place.relative_to(target)).rename(place)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(download, "merge", interrupted)
        assert run("download", "toy", *source)[0] == 130
    assert data.parts_found(data_set("toy")) == ["games"]  # one game is there
    assert run("download", "toy", *source)[0] == 0
    found = contents(toy)
    del found["downloads.json"]
    assert found == TREE


def test_an_interruption_before_the_record_is_written_is_repaired(run, toy, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(download, "_write_record", interrupted)
        assert run("download", "toy")[0] == 130
    assert run("download", "toy")[0] == 0
    assert json.loads((toy / "downloads.json").read_text()).keys() == {"games.zip"}
    assert not (toy / ".downloads").exists()


def test_files_at_hand_replace_the_network(run, toy, tmp_path, server):
    (tmp_path / "games.zip").write_bytes(server.content["games.zip"])
    (tmp_path / "rows.jsonl").write_bytes(b'{"instance_id": "a"}\n')
    status, _, err = run("download", "toy", "--part", "games", "rows", "--from", str(tmp_path))
    assert status == 0, err
    assert server.asked == []
    assert (toy / "rows.jsonl").exists() and data.parts_found(data_set("toy")) == ["games", "rows"]
    assert (tmp_path / "games.zip").exists()


def test_one_file_at_hand_may_have_any_name(run, toy, tmp_path, server):
    (tmp_path / "mine.zip").write_bytes(server.content["games.zip"])
    assert run("download", "toy", "--from", str(tmp_path / "mine.zip"))[0] == 0
    assert data.parts_found(data_set("toy")) == ["games"]
    server.content["games.zip"] = zipped(TREE | {"more": b""})  # what is published need not be that file
    assert run("download", "toy", "--force")[0] == 0


def test_an_evil_archive_leaves_nothing(run, toy, tmp_path):
    (tmp_path / "games.zip").write_bytes(zipped({**TREE, "../../evil": b"x"}))
    status, _, err = run("download", "toy", "--from", str(tmp_path))
    assert status == 1 and "does not stay" in err
    assert contents(toy) == {} and not (tmp_path / "evil").exists()


def test_the_wrong_archive_is_refused_before_anything_is_in_place(run, toy, tmp_path):
    (tmp_path / "games.zip").write_bytes(zipped({"readme": b"x"}))
    status, _, err = run("download", "toy", "--from", str(tmp_path))
    assert status == 1 and "game.tw-pddl" in err and contents(toy) == {}


def test_an_error_page_saved_as_a_file_is_refused(run, toy, tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"<html>")
    status, _, err = run("download", "toy", "--part", "rows", "--from", str(tmp_path))
    assert status == 1 and "not a parquet file" in err


def test_offline_the_error_says_how_to_do_it_by_hand(run, toy, server):
    url = server.url
    server.failures = [404]
    status, _, err = run("download", "toy", "--mirror", f"{url}/elsewhere")
    assert status == 1
    assert f"{url}/elsewhere/games.zip: HTTP 404" in err
    assert f"curl -L -C - -o games.zip '{url}/games.zip'" in err and "--from DIRECTORY" in err
    assert not toy.exists() and data.find(data_set("toy")) is None


def test_a_full_disk_is_found_out_first(run, toy, server, monkeypatch):
    monkeypatch.setattr(download, "SPARE", 2**62)
    status, _, err = run("download", "toy")
    assert status == 1 and "are needed under" in err and contents(toy) == {}


def test_another_directory_is_used_and_the_setting_for_it_printed(run, tmp_path):
    status, out, _ = run("download", "toy", "--dir", str(tmp_path / "elsewhere" / "toy"))
    assert status == 0 and f"export SANDBOXGYM_DATA={tmp_path / 'elsewhere'}" in out
    assert (tmp_path / "elsewhere" / "toy" / "json_2.1.1").is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "invalid choice"),
        (("toy", "--part", "other"), "has the parts games, rows"),
        (("toy", "--from", "/no/such/place"), "no such file"),
    ],
)
def test_wrong_usage_is_told_apart(run, arguments, message):
    status, _, err = run("download", *arguments)
    assert status == 2 and message in err


def test_official_games_are_opened_as_the_environment_does(run, tmp_path, server, monkeypatch):
    from sandboxgym.envs.alfworld.games.generated import generate_game

    name = "json_2.1.1/valid_seen/pick_and_place_simple-Mug/trial/game.tw-pddl"
    server.content["json_2.1.2_tw-pddl.zip"] = zipped({name: generate_game("train", 0)})
    status, out, err = run("download", "alfworld", "--mirror", server.url)
    assert status == 0 and "valid_seen: 1 games" in out, err
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "named"))
    server.content["json_2.1.2_tw-pddl.zip"] = zipped({name: b"{}"})
    status, _, err = run("download", "alfworld", "--mirror", server.url)
    assert status == 1 and "not hold games that can be played" in err
    assert (tmp_path / "named").is_dir()


def test_a_data_set_of_another_package_is_fetched_once_that_is_imported(run, tmp_path, server, monkeypatch):
    (tmp_path / "others.py").write_text(f"""
import gymnasium
from sandboxgym import EnvCard, SnapshotWrapper, TaskEnv
from sandboxgym.data import DataFile, DataSet

FILE = DataFile("rows.parquet", "{server.url}/rows.parquet")
ROWS = DataSet("others", "rows", "none", {{"rows": (FILE,)}}, check="others:check")

def check(root):
    if (root / "broken").exists():
        raise ValueError("no rows that can be played")
    return ["1 row"]

class Others(TaskEnv):
    card = EnvCard(data_sets=(ROWS,))

gymnasium.register("others/Others-v0", entry_point=Others, additional_wrappers=(SnapshotWrapper.wrapper_spec(),))
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "invalid choice: 'others'" in run("download", "others")[2]
    try:
        status, out, err = run("download", "others", "--import", "others")
        assert status == 0 and "1 row" in out, err
        assert data.parts_found(data_set("others")) == ["rows"]
        (data.directory(data_set("others")) / "broken").touch()
        status, _, err = run("download", "--import", "others", "--", "others")
        assert status == 1 and "no rows that can be played" in err
    finally:
        gym.registry.pop("others/Others-v0", None)


@pytest.mark.parametrize("name", ["alfworld", "webshop", "swebench"])
def test_every_known_data_set_is_described_in_full(name):
    dataset = data_set(name)
    assert dataset.about and dataset.licence and dataset.about_parts.keys() == dataset.parts.keys()
    for file in (file for files in dataset.parts.values() for file in files):
        assert file.url.startswith("https://") and "/" not in file.name
