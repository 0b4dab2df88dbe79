"""Pushing and pulling, with the Hub's real client, against a Hub on this machine that can fail on demand."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.checkpoints.hub import hub_errors
from hf_posswap.checkpoints.push import files_to_push, stale_files
from hf_posswap.cli.app import app
from hf_posswap.errors import CheckpointError
from hf_posswap.utils.atomic_io import scratch_folder
from tests.checkpoints.loopback import TOKEN, Hub, running

REPO = "me/swapped"


class Client:
    """A process with huggingface_hub and hf_posswap that speaks to a loopback Hub."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, call: str, **kwargs: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"call": call, **kwargs}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the client has died"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def do(self, call: str, **kwargs: Any) -> Any:
        answer = self.ask(call, **kwargs)
        assert "value" in answer, answer
        return answer["value"]

    def refused(self, call: str, **kwargs: Any) -> str:
        answer = self.ask(call, **kwargs)
        assert answer.get("error") == "CheckpointError", answer
        return str(answer["message"])


@contextmanager
def client(url: str, home: Path, *, plugin: bool = True, xet: bool = False, token: str = TOKEN) -> Iterator[Client]:
    drop = ("PYTHONPATH", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "TRANSFORMERS_OFFLINE")
    environment = {key: value for key, value in os.environ.items() if key not in drop} | {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "*",
        **({} if xet else {"HF_HUB_DISABLE_XET": "1"}),
    }
    home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("loopback_client.py")), "with" if plugin else "without"]
    with (home / "stderr").open("w") as errors:
        process = subprocess.Popen(
            command, env=environment, cwd=home, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
    try:
        yield Client(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, Client]]:
    """One Hub and one client for the whole module: starting a client takes seconds."""
    with running() as hub, client(hub.url, tmp_path_factory.mktemp("home")) as speaking:
        yield hub, speaking


@pytest.fixture
def hub(world: tuple[Hub, Client]) -> Hub:
    world[0].forget()
    return world[0]


@pytest.fixture
def speaker(world: tuple[Hub, Client]) -> Client:
    return world[1]


@pytest.mark.slow
def test_pushed_twice_and_pulled_without_the_package(hub: Hub, speaker: Client, tmp_path: Path) -> None:
    numbers = speaker.do("save", folder=str(tmp_path / "saved"), scheme="rope")
    first = speaker.do("push", repo_id=REPO, folder=str(tmp_path / "saved"))
    second = speaker.do("push", repo_id=REPO, folder=str(tmp_path / "saved"), commit_message="again")
    assert "put" in hub.kinds()  # the weights went by LFS, the rest in the commit
    assert set(hub.files(REPO)) == set(first["files"]) == set(second["files"])
    assert {name: len(content) for name, content in hub.files(REPO).items()} == second["files"]
    assert hub.kinds().count("commit") == 2
    assert hub.kinds().count("put") == 1
    assert speaker.do("load", repo_id=REPO, revision=first["commit"]) == numbers
    with client(hub.url, tmp_path / "bare", plugin=False) as bare:
        assert bare.do("auto", repo_id=REPO, trust_remote_code=True) == numbers
        refusal = bare.ask("auto", repo_id=REPO, trust_remote_code=False)
        assert "contains custom code" in refusal["message"]


@pytest.mark.slow
def test_transformers_own_push_to_hub_takes_the_code_along(hub: Hub, speaker: Client) -> None:
    numbers = speaker.do("push_to_hub", repo_id="me/theirs", scheme="alibi")
    files = hub.files("me/theirs")
    assert "modeling_posswap.py" in files
    assert json.loads(files["config.json"])["auto_map"] == {"AutoConfig": "modeling_posswap.PosswapConfig"}
    assert speaker.do("load", repo_id="me/theirs") == numbers


@pytest.mark.slow
def test_a_revision_of_its_own(hub: Hub, speaker: Client) -> None:
    speaker.do("push", repo_id="me/branched", scheme="rope")
    report = speaker.do("push", repo_id="me/branched", scheme="alibi", revision="alibi-64")
    assert report["revision"] == "alibi-64"
    assert b'"alibi"' in hub.files("me/branched", "alibi-64")["config.json"]
    assert b'"rope"' in hub.files("me/branched")["config.json"]
    old, new = (speaker.do("load", repo_id="me/branched", **kw) for kw in ({}, {"revision": "alibi-64"}))
    assert old != new
    assert "revision" in speaker.refused("load", repo_id="me/branched", revision="missing")


def test_what_an_earlier_push_left_is_replaced_and_other_files_stay(hub: Hub, speaker: Client, tmp_path: Path) -> None:
    speaker.do("save", folder=str(tmp_path / "shards"), scheme="kerple", max_shard_size="60KB")
    (tmp_path / "shards" / "notes.txt").write_text("mine")
    first = speaker.do("push", repo_id="me/shards", folder=str(tmp_path / "shards"))
    shards = {name for name in first["files"] if name.startswith("model-")}
    assert len(shards) > 1
    second = speaker.do("push", repo_id="me/shards", scheme="alibi", seed=1)
    expected = {*shards, "model.safetensors.index.json"}
    assert set(second["deleted"]) == expected
    assert set(hub.files("me/shards")) == {*second["files"], "notes.txt"}
    assert speaker.do("load", repo_id="me/shards")


def test_a_dry_run_sends_nothing(hub: Hub, speaker: Client) -> None:
    report = speaker.do("push", repo_id="me/dry", scheme="rope", dry_run=True)
    assert hub.requests == []
    assert report["commit"] is None
    assert report["files"]["model.safetensors"] > 10_000


RETRIED = pytest.mark.slow  # the client tries again by itself, and waits between


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fault", "said"),
    [
        ("preupload", 401, "log in with `hf auth login`"),
        ("commit", 403, "log in with `hf auth login`"),
        pytest.param("preupload", 500, "push again", marks=RETRIED),
        pytest.param("batch", 500, "push again", marks=RETRIED),
        ("put", 400, "push again"),
        pytest.param("put", "cut", "push again", marks=RETRIED),
        ("commit", 500, "push again"),
        ("commit", "cut", "push again"),
    ],
)
def test_a_failed_push_commits_nothing_and_can_be_repeated(
    hub: Hub, speaker: Client, kind: str, fault: int | str, said: str
) -> None:
    name, seed = f"me/fault-{kind}-{fault}", 100 + sum(f"{kind}{fault}".encode())  # weights that are not there yet
    speaker.do("push", repo_id=name, scheme="rope")
    before = hub.files(name)
    hub.faults[kind] = [fault] * 50
    message = speaker.refused("push", repo_id=name, scheme="alibi", seed=seed)
    assert said in message
    assert f"cannot push to {name}" in message
    assert hub.files(name) == before
    hub.faults.clear()
    speaker.do("push", repo_id=name, scheme="alibi", seed=seed)
    assert b'"alibi"' in hub.files(name)["config.json"]


def test_a_failure_that_passes_is_not_even_noticed(hub: Hub, speaker: Client) -> None:
    hub.faults["put"] = [500]
    speaker.do("push", repo_id="me/once", scheme="rope", seed=3)
    assert speaker.do("load", repo_id="me/once")


def test_a_torn_download_is_taken_up_again_or_refused(hub: Hub, speaker: Client) -> None:
    speaker.do("push", repo_id="me/torn", scheme="rope", seed=4)
    hub.faults["resolve"] = ["short"] * 200
    assert "me/torn" in speaker.refused("load", repo_id="me/torn")
    hub.faults["resolve"] = ["short"]
    torn = speaker.do("load", repo_id="me/torn")
    speaker.do("push", repo_id="me/whole", scheme="rope", seed=4)
    assert speaker.do("load", repo_id="me/whole") == torn


def test_no_room_for_a_download_is_said_and_a_later_one_works(hub: Hub, speaker: Client) -> None:
    speaker.do("push", repo_id="me/room", scheme="rope", seed=5)
    assert "me/room" in speaker.refused("load", repo_id="me/room", largest=50_000)
    assert speaker.do("load", repo_id="me/room")


def test_a_public_repository_is_not_taken_for_a_private_one(hub: Hub, speaker: Client) -> None:
    speaker.do("push", repo_id="me/public", scheme="rope")
    before = hub.files("me/public")
    assert "is there already and public" in speaker.refused("push", repo_id="me/public", scheme="alibi", private=True)
    assert hub.files("me/public") == before
    speaker.do("push", repo_id="me/private", scheme="rope", private=True)
    assert hub.repos["me/private"].private


@pytest.mark.slow
def test_a_wrong_token_and_an_unreachable_hub(tmp_path: Path) -> None:
    with running() as hub:
        with client(hub.url, tmp_path / "a", token="hf_wrong") as speaking:
            assert "log in with `hf auth login`" in speaking.refused("push", repo_id=REPO, scheme="rope")
            assert "me/private" in speaking.refused("load", repo_id="me/private")
        gone = hub.url
    with client(gone, tmp_path / "b") as speaking:
        assert "check the connection" in speaking.refused("push", repo_id=REPO, scheme="rope")


@pytest.mark.slow
def test_pulled_in_a_fresh_process_with_the_package(hub: Hub, speaker: Client, tmp_path: Path) -> None:
    numbers = speaker.do("push_to_hub", repo_id="me/fresh", scheme="rope")
    with client(hub.url, tmp_path) as fresh:
        assert fresh.do("load", repo_id="me/fresh") == numbers
        assert fresh.do("auto", repo_id="me/fresh") == numbers


@pytest.mark.slow
def test_pushing_works_with_xet_on(tmp_path: Path) -> None:
    # a Hub that answers "regular" keeps the client from xet's own servers, which no loopback can stand for
    with running(use_lfs=False) as hub:
        with client(hub.url, tmp_path / "a", xet=True) as speaking:
            speaking.do("push", repo_id=REPO, scheme="rope")
            numbers = speaking.do("load", repo_id=REPO)
            speaking.do("push", repo_id=REPO, scheme="rope")
            hub.faults["commit"] = [500] * 20
            assert "push again" in speaking.refused("push", repo_id=REPO, scheme="alibi")
            hub.faults.clear()
        with client(hub.url, tmp_path / "b", xet=True, plugin=False) as bare:
            assert bare.do("auto", repo_id=REPO, trust_remote_code=True) == numbers
        assert "put" not in hub.kinds()


@pytest.mark.slow
def test_lfs_with_xet_on_fails_clearly(tmp_path: Path) -> None:
    with running() as hub, client(hub.url, tmp_path, xet=True) as speaking:
        assert f"cannot push to {REPO}" in speaking.refused("push", repo_id=REPO, scheme="rope")
        assert hub.files(REPO) == {}


@pytest.mark.parametrize("repo_id", ["a b", "me/too/deep", "../up", "/abs"])
def test_what_is_no_repository_is_refused_before_anything_is_saved(repo_id: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a repository on the Hub; give owner/name"):
        hf_posswap.push(tmp_path, repo_id)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="needs a config.json and safetensors"):
        hf_posswap.push(tmp_path, REPO)


def test_pushing_offline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        hf_posswap.push(tmp_path, REPO, token=TOKEN)
    assert "README.md" in hf_posswap.push(tmp_path, REPO, dry_run=True).files


KILLED = """
import os, signal
import hf_posswap.checkpoints.push as pushing
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
pushing.files_to_push = lambda folder: os.kill(os.getpid(), signal.SIGKILL)  # once it has been saved
pushing.push(model, "me/x", dry_run=True)
"""


@pytest.mark.slow
def test_what_a_killed_push_left_is_removed_by_the_next(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    others = [".posswap-partial", "tmp1", "posswap-partial-1"]
    for name in others:
        (temporary / name).mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(Path(hf_posswap.__file__).parents[1])}
    killed = subprocess.run([sys.executable, "-c", KILLED], env=environment, cwd=tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(temporary.rglob("model.safetensors"))) == 1
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with scratch_folder() as living:
        assert hf_posswap.push(folder, "me/x", dry_run=True).files
        assert sorted(path.name for path in temporary.iterdir()) == sorted([*others, living.name])
    assert sorted(path.name for path in temporary.iterdir()) == sorted(others)


def test_a_temporary_folder_that_cannot_be_written_is_one_clear_error(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(CheckpointError, match="no temporary folder can be made: No such file.*set TMPDIR"):
        hf_posswap.push(folder, "me/x", dry_run=True)


def test_what_is_no_part_of_a_model_stays_behind(tmp_path: Path) -> None:
    for name in (
        ".git/HEAD",
        ".partial-1-x",
        "optimizer.pt",
        "checkpoint-5/model.safetensors",
        "training_args.bin",
        "posswap_files.json",
        "posswap-checkpoint.json",
        "runs/Nov30_10-00-00_the-name-of-my-machine/events.out.tfevents.1.x",
        "rng_state_0.pth",
        "global_step500/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "latest",
        "zero_to_fp32.py",
        "optimizer_0/__0_0.distcp",
        "pytorch_model_fsdp_0/__0_0.distcp",
        "random_states_0.pkl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("config.json", "tokenizer.json", "pictures/a.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(files_to_push(tmp_path)) == ["config.json", "pictures/a.png", "tokenizer.json"]
    assert stale_files(["sub/model.safetensors", "posswap_x.py", "mine.py", "config.json"], []) == ["posswap_x.py"]


def test_a_users_own_weights_stay_and_an_adapter_goes_where_a_whole_model_comes() -> None:
    theirs = ["model.fp16.safetensors", "model-int8.safetensors", "model.fp16-00001-of-00002.safetensors", "mine.bin"]
    weights = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    adapter = ["adapter_config.json", "adapter_model.safetensors", "posswap.json"]
    there = [*theirs, *weights, *adapter]
    assert stale_files(there, ["config.json", "model.safetensors"]) == sorted([*weights, *adapter])
    assert stale_files(["config.json", *theirs, *weights], adapter) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    hf_posswap.patch_model(model, "rope", max_length=32)
    return hf_posswap.save(model, tmp_path / "saved")


def test_the_command_shows_what_would_go(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["push", str(folder), REPO, "--dry-run"])
    assert shown.exit_code == 0
    assert "would go to me/swapped at main; nothing was sent" in " ".join(shown.stdout.split())
    found = CliRunner().invoke(app, ["push", str(folder), REPO, "--dry-run", "--json", "--revision", "v2"])
    report = json.loads(found.stdout)
    assert report["revision"] == "v2"
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    for name in ("posswap_files.json", "README.md"):  # what a save wrote to this folder; how to load it from there
        del sizes[name]
    assert {name: size for name, size in report["files"].items() if name != "README.md"} == sizes
    assert "Example: posswap push" in CliRunner().invoke(app, ["push", "--help"]).output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{folder}", "a b"], "is not a repository on the Hub"),
        (["{folder}/missing", REPO], "is not a checkpoint that can be pushed"),
        (["{folder}", REPO], "HF_HUB_OFFLINE is set"),
        (["{folder}", REPO, "--results", "{folder}/missing.json"], "cannot read the results in"),
    ],
)
def test_errors_of_the_command_are_one_line(folder: Path, arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(app, ["push", *(argument.format(folder=folder) for argument in arguments)])
    assert result.exit_code == 4
    assert text in result.stderr
    assert [line for line in result.stderr.splitlines() if line.startswith("error:")] == [
        result.stderr.splitlines()[-1]
    ]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (RuntimeError("tensor cast failed"), None),
        (FileNotFoundError(2, "No such file or directory", "model.safetensors"), "a file or the disk of this machine"),
        (OSError(errno.ENOSPC, "No space left on device"), "a file or the disk of this machine"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "check the connection"),
        (ConnectionResetError(104, "Connection reset by peer"), "check the connection"),
        (socket.gaierror(-2, "Name or service not known"), "check the connection"),
        (HTTPError("cut"), "check the connection"),
        (LocalTokenNotFoundError("no token"), "hf auth login"),
    ],
)
def test_only_what_the_network_raises_is_about_the_connection(error: Exception, advice: str | None) -> None:
    with pytest.raises(type(error) if advice is None else CheckpointError, match=advice), hub_errors(REPO):
        raise error


def test_a_failure_of_the_compiled_client_is_about_the_connection_and_its_cause_decides() -> None:
    scope: dict[str, object] = {"__name__": "huggingface_hub._commit_api"}
    exec("def upload():\n    raise RuntimeError('Data processing error: reqwest')", scope)
    with pytest.raises(CheckpointError, match="check the connection"), hub_errors(REPO):
        scope["upload"]()  # type: ignore[operator]
    with pytest.raises(CheckpointError, match="of this machine"), hub_errors(REPO):
        raise RuntimeError("Error while uploading") from OSError(errno.ENOSPC, "No space left on device")
