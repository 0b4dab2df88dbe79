"""A Hub that stalls, drips, cuts, lies or is busy: bounded, and what a push says of the commit is what is there."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_posswap
from hf_posswap.errors import OptionError
from hf_posswap.utils.atomic_io import MARK
from tests.checkpoints.loopback import Answer, Hub, running
from tests.checkpoints.test_push import Client, client

pytestmark = pytest.mark.slow

Tally = Callable[[str, int, int], None]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, Client]]:
    with running() as hub, client(hub.url, tmp_path_factory.mktemp("home")) as speaking:
        yield hub, speaking


@pytest.fixture
def hub(world: tuple[Hub, Client]) -> Hub:
    world[0].forget()
    return world[0]


@pytest.fixture
def speaker(world: tuple[Hub, Client]) -> Client:
    return world[1]


def head(hub: Hub, name: str) -> str:
    return hub.repos[name].branches["main"]


@pytest.mark.parametrize(
    "how",
    [
        "cut",
        "page",
        "stall",
        500,
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("half", "torn", "drip", 502, 504)),
    ],
)
def test_a_commit_whose_answer_is_lost_is_found(hub: Hub, speaker: Client, tally: Tally, how: str | int) -> None:
    name, timeout = f"me/lost-{how}", 6.0 if how in ("stall", "drip") else None
    speaker.do("push", repo_id=name, scheme="rope")
    before = head(hub, name)
    hub.faults["commit"] = [Answer(how)] * 9
    report = speaker.do("push", repo_id=name, scheme="alibi", seed=1, timeout=timeout)
    assert report["commit"] == head(hub, name) != before
    assert report["url"].endswith(f"/{name}/commit/{head(hub, name)}")
    assert {file: len(content) for file, content in hub.files(name).items()} == report["files"]
    assert len(hub.repos[name].commits) == 3  # of the creation and of two pushes: none was done twice
    tally("Hub", 1, 1)


@pytest.mark.parametrize("how", ["cut", 500, 503])
def test_a_commit_that_was_not_done_is_tried_again(hub: Hub, speaker: Client, tally: Tally, how: str | int) -> None:
    name = f"me/again-{how}"
    hub.faults["commit"] = [how]
    report = speaker.do("push", repo_id=name, scheme="rope", seed=2)
    assert report["commit"] == head(hub, name)
    assert hub.kinds().count("commit") == 2
    tally("Hub", 1, 1)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Answer("stall", done=False), "nothing was committed so far, but it may be at work on it. Look at"),
        (Answer("page", done=False), "is still at .*: nothing was committed, push again"),
        (503, "is still at .*: nothing was committed, push again"),
        (403, "Nothing was committed: log in"),
    ],
)
def test_a_commit_that_is_not_there_is_said_not_to_be(
    hub: Hub, speaker: Client, tally: Tally, fault: Any, said: str
) -> None:
    name = f"me/none-{len(hub.repos)}"
    speaker.do("push", repo_id=name, scheme="rope")
    before = hub.files(name)
    hub.faults["commit"] = [fault] * 9
    message = speaker.refused("push", repo_id=name, scheme="alibi", seed=3, timeout=6.0)
    assert re.search(said, message), message
    assert hub.files(name) == before
    tally("Hub", 1, 1)


def test_a_hub_that_cannot_be_asked_afterwards_leaves_it_open(hub: Hub, speaker: Client, tally: Tally) -> None:
    speaker.do("push", repo_id="me/open", scheme="rope")
    before = head(hub, "me/open")
    hub.faults["commit"] = [Answer("cut")]
    hub.faults["info"] = [None, None, *[500] * 50]
    message = speaker.refused("push", repo_id="me/open", scheme="alibi", seed=4)
    assert "Whether it was committed is not known, for the Hub cannot be asked" in message
    assert f"main was at {before[:12]}: look at {hub.url}/me/open/commits/main" in message
    assert "Nothing was committed" not in message
    tally("Hub", 1, 1)


def test_the_commit_of_someone_else_is_not_taken_for_ones_own(hub: Hub, speaker: Client, tally: Tally) -> None:
    speaker.do("push", repo_id="me/theirs", scheme="rope")
    repo = hub.repos["me/theirs"]
    theirs = "f" * 40
    repo.commits[theirs] = {**repo.commits[repo.branches["main"]], "theirs.txt": (b"x", None)}

    class Meanwhile(list[Any]):
        def pop(self, *_: Any) -> Any:
            repo.branches["main"] = theirs
            return 500

    hub.faults["commit"] = Meanwhile([500])
    message = speaker.refused("push", repo_id="me/theirs", scheme="alibi", seed=5)
    assert f"to {theirs[:12]}, which does not hold these files: someone else committed" in message
    hub.faults.clear()
    tally("Hub", 1, 1)


@pytest.mark.parametrize(
    ("status", "wait"),
    [(429, 4), (500, None), *(pytest.param(*p, marks=pytest.mark.slow) for p in [(503, 4), (502, None)])],
)
@pytest.mark.parametrize("kind", ["create", "preupload", "batch", "put", "tree", "commit"])
def test_a_busy_hub_is_tried_again_when_it_says(
    hub: Hub, speaker: Client, tally: Tally, kind: str, status: int, wait: int | None
) -> None:
    hub.faults[kind] = [(status, wait)] if wait else [status]
    seed = 1000 + sum(f"{kind}{status}{wait}".encode())
    speaker.do("push", repo_id=f"me/busy-{kind}-{status}-{wait}", scheme="rope", seed=seed)
    assert hub.faults[kind] == []
    which = [number for number, line in enumerate(hub.kinds()) if line == kind]
    pause = hub.times[which[1]] - hub.times[which[0]]
    assert pause * 20 >= (wait or 0.9)  # the client's clock runs twenty times as fast
    tally("Hub", 1, 1)


@pytest.mark.parametrize("kind", ["info", "create", "preupload", "commit"])
def test_a_hub_that_asks_to_wait_for_an_hour_is_not_waited_for(
    hub: Hub, speaker: Client, tally: Tally, kind: str
) -> None:
    hub.faults[kind] = [(429, 3600)] * 50
    message = speaker.refused("push", repo_id="me/hour", scheme="rope", seed=6)
    assert "The Hub asks to wait 3600 s. Nothing was committed: push again after that." in message
    assert hub.kinds().count(kind) == 1
    tally("Hub", 1, 1)


@pytest.mark.parametrize("how", ["stall", pytest.param("drip", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["info", "create", "tree", "preupload", "batch", "put"])
def test_a_stalled_hub_is_left_after_the_time_that_was_given(
    hub: Hub, speaker: Client, tally: Tally, kind: str, how: str
) -> None:
    name, seed = f"me/stalled-{kind}-{how}", 2000 + sum(f"{kind}{how}".encode())  # weights that are not there yet
    speaker.do("push", repo_id=name, scheme="rope")
    hub.faults[kind] = [Answer(how)] * 9
    began = time.monotonic()
    message = speaker.refused("push", repo_id=name, scheme="alibi", seed=seed, timeout=2.0)
    assert time.monotonic() - began < 12
    assert "Nothing was committed: check the connection and push again" in message
    assert "said nothing for" in message or "it took longer than timeout=2 s" in message
    tally("Hub", 1, 1)


@pytest.mark.parametrize("how", ["half", "page"])
@pytest.mark.parametrize("kind", ["info", "create", "tree", "preupload", "batch"])
def test_an_answer_that_cannot_be_read_is_one_clear_error(
    hub: Hub, speaker: Client, tally: Tally, kind: str, how: str
) -> None:
    hub.faults[kind] = [Answer(how)] * 50
    name = f"me/unreadable-{kind}-{how}"
    asked = {"repo_id": name, "scheme": "rope", "seed": 8 + len(hub.repos)}
    answer = speaker.ask("push", **asked)
    assert answer.get("error") == "CheckpointError", answer
    assert f"cannot push to {name}: the Hub's answer cannot be read" in answer["message"]
    assert "Nothing was committed" in answer["message"]
    tally("Hub", 1, 1)


def test_what_is_read_from_a_hub_that_fails_is_one_clear_error(hub: Hub, speaker: Client, tally: Tally) -> None:
    speaker.do("push", repo_id="me/read", scheme="rope", seed=9)
    for fault in (500, (429, 3600), "short"):
        hub.faults["resolve"] = [fault] * 200
        began = time.monotonic()
        assert "me/read" in speaker.refused("load", repo_id="me/read", force_download=True)
        assert time.monotonic() - began < 20
        tally("Hub", 1, 1)


@pytest.mark.parametrize(
    ("kinds", "how", "said"),
    [
        (["head"], "creep", "did not finish an answer within|said nothing for"),
        (["info", "tree", "resolve"], "drip", "bytes a second|did not finish an answer within"),
        (["resolve"], "huge", ""),
    ],
)
def test_a_load_from_a_hub_that_drips_ends_in_less_than_a_minute(
    hub: Hub, speaker: Client, tally: Tally, kinds: list[str], how: str, said: str
) -> None:
    name = f"me/dripping-{how}"
    speaker.do("push", repo_id=name, scheme="rope", seed=10)
    for kind in kinds:
        hub.faults[kind] = [Answer(how)] * 200
    began = time.monotonic()
    message = speaker.refused("load", repo_id=name, force_download=True)
    assert time.monotonic() - began < 50
    assert name in message
    assert re.search(said, message), message
    tally("Hub", 1, 1)


@pytest.mark.parametrize(
    ("how", "said"), [("huge", "more than 32 MiB"), ("bomb", "more than 32 MiB"), ("deep", "nested too deeply")]
)
@pytest.mark.parametrize("kind", ["info", "create", "tree", "preupload", "batch"])
def test_an_answer_of_any_size_or_depth_is_not_taken_in(
    hub: Hub, speaker: Client, tally: Tally, kind: str, how: str, said: str
) -> None:
    before = speaker.do("peak")
    hub.faults[kind] = [Answer(how)] * 50
    name = f"me/endless-{kind}-{how}"
    message = speaker.refused("push", repo_id=name, scheme="rope", seed=3000 + sum(name.encode()))
    assert said in message, message
    assert "Nothing was committed" in message
    assert speaker.do("peak") < before + 250
    tally("Hub", 1, 1)


def test_a_list_of_files_without_an_end_is_left(hub: Hub, speaker: Client, tally: Tally) -> None:
    name = "me/pages"
    speaker.do("push", repo_id=name, scheme="rope", seed=11)
    again = f'<{hub.url}/api/models/{name}/tree/main?recursive=True&cursor=x>; rel="next"'
    hub.faults["tree"] = [Answer("whole", headers=(("Link", again),))] * 5000
    assert "gave more than 1000 answers to one question" in speaker.refused(
        "push", repo_id=name, scheme="alibi", seed=12
    )
    tally("Hub", 1, 1)


@pytest.mark.parametrize("kind", ["info", "create", "preupload", "commit", "head", "resolve"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Retry-After": "\xb2"},
        {"Retry-After": "9" * 5000},
        {"Retry-After": "Wed, 99 Nov 99999 99:99:99 +9999"},
        {"Retry-After": "Mon, 01 Jan 0001 00:00:00 +2359"},
        {"RateLimit": '"api";r=0;t=' + "9" * 5000},
        {"RateLimit": '"api";r=' + "9" * 5000 + ";t=1", "RateLimit-Policy": '"fixed window";"api";q=\xb2;w=300'},
        {"X-Error-Code": "\xb2", "X-Error-Message": "\xff" * 2000, "X-Request-Id": "\xb2"},
    ],
    ids=lambda headers: next(iter(headers)) + next(iter(headers.values()))[:8].encode("ascii", "replace").decode(),
)
def test_odd_headers_are_no_other_error(
    hub: Hub, speaker: Client, tally: Tally, kind: str, headers: dict[str, str]
) -> None:
    name = f"me/odd-{kind}"
    speaker.do("push", repo_id=name, scheme="rope", seed=13)
    hub.faults[kind] = [Answer(429, done=kind in ("head", "resolve"), headers=tuple(headers.items()))] * 200
    call = (
        {"call": "load", "force_download": True} if kind in ("head", "resolve") else {"call": "push", "scheme": "alibi"}
    )
    began = time.monotonic()
    assert name in speaker.refused(repo_id=name, **call)  # type: ignore[arg-type]
    assert time.monotonic() - began < 30
    tally("Hub", 1, 1)


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Linked-Size": "\xb2"}, {"X-Linked-Size": "-1"}, {"X-Linked-Size": "9" * 5000}, {"ETag": ""},
        {"ETag": "\xb2"},
        {"X-Repo-Commit": "../../../../outside"}, {"X-Repo-Commit": "\xb2"}, {"Content-Length": "x"},
        {"Location": "http://[::1"},
    ],
    ids=str,
)  # fmt: skip
def test_odd_headers_of_a_file_are_no_other_error(
    hub: Hub, speaker: Client, tally: Tally, headers: dict[str, str]
) -> None:
    speaker.do("push", repo_id="me/headers", scheme="rope", seed=14)
    hub.faults["head"] = [Answer("whole", headers=tuple(headers.items()))] * 200
    answer = speaker.ask("load", repo_id="me/headers", force_download=True)
    assert "value" in answer or answer["error"] == "CheckpointError", answer
    tally("Hub", 1, 1)


def test_an_unreachable_hub_is_said_in_seconds_and_nothing_else_is(tmp_path: Path, tally: Tally) -> None:
    with running() as gone:
        pass
    with client(gone.url, tmp_path) as speaking:
        speaking.do("save", folder=str(tmp_path / "saved"), scheme="rope")
        before = (tmp_path / "stderr").read_text()
        for call, asked in (("push", {"folder": str(tmp_path / "saved")}), ("load", {})):
            began = time.monotonic()
            message = speaking.refused(call, repo_id="me/gone", **asked)
            assert time.monotonic() - began < 10
            assert "cannot be reached" in message or "couldn't connect" in message
            tally("Hub", 1, 1)
        assert (tmp_path / "stderr").read_text() == before


@pytest.mark.parametrize("kind", ["preupload", "put", "commit"])
def test_a_killed_push_leaves_all_or_nothing_and_can_be_repeated(
    tmp_path: Path, tally: Tally, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with running() as hub:
        with client(hub.url, tmp_path / "one") as first:
            first.do("push", repo_id="me/killed", scheme="rope")
            before = hub.files("me/killed")
            hub.faults[kind], met = [Answer("stall", done=kind == "commit")], hub.kinds().count(kind)
            assert first.process.stdin is not None
            asked = {"call": "push", "repo_id": "me/killed", "scheme": "alibi", "seed": 1}
            first.process.stdin.write(json.dumps(asked) + "\n")
            first.process.stdin.flush()
            while hub.kinds().count(kind) == met:
                time.sleep(0.02)
            time.sleep(0.2)
            first.process.kill()
        assert len(list(temporary.rglob("model.safetensors"))) == 1
        held = hub.files("me/killed")
        assert (held == before) == (kind != "commit")
        hub.faults.clear()
        with client(hub.url, tmp_path / "two") as second:
            report = second.do("push", repo_id="me/killed", scheme="alibi", seed=1)
        assert {file: len(content) for file, content in hub.files("me/killed").items()} == report["files"]
        assert kind != "commit" or hub.files("me/killed") == held
        assert not list(temporary.glob(f"{MARK}*"))  # torch keeps caches there
    tally("Hub", 1, 1)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_that_is_none_is_refused(tmp_path: Path, timeout: float) -> None:
    with pytest.raises(OptionError, match="timeout is a positive number of seconds, or None, got"):
        hf_posswap.push(tmp_path, "me/x", timeout=timeout)
