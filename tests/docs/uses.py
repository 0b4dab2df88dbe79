"""The four uses, as a newcomer comes to them: patch a model in a script, run a recipe, evaluate by length, push.

`python -m tests.docs.uses` runs the README's ten lines, its command "uses", and the script of the quickstart page, in
the environment that it is started in: `.ci/run` starts it where no more is installed than the README's first command
asks for, so that this is no test of pytest. Only less is trained and measured, and the Hub is one of this machine, to
which the last line of the command is said once more without --dry-run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.checkpoints.loopback import TOKEN, Hub, running
from tests.docs.pages import README, ROOT, Block, blocks_of

QUICKSTART = ".docs/pages/quickstart.md"
SHORTER = {
    " training.max_steps=200 training.warmup_steps=20": " training.max_steps=2 training.warmup_steps=1",
    " -o results\n": " --documents 8 --trials 2 -o results\n",
}
"""What is said in place of a part of the command, so that it takes a minute."""
DRY = " --dry-run"
REPO = "me/gpt2-rope"
PULL = f"import hf_posswap\nprint(hf_posswap.swap_plan(hf_posswap.load({REPO!r})))\n"
OTHERS_HUB = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PYTHONPATH")


def main() -> None:
    """Do all four in a folder of their own; the first that fails ends it."""
    script, command, longer = ten_lines(), uses(), script_of_the_quickstart()
    with tempfile.TemporaryDirectory() as name, running() as hub:
        place = Path(name)
        (place / "hf_posswap").symlink_to(ROOT / "hf_posswap")  # the commands are typed in a checkout
        done(place, hub, shortened(command))
        check("a recipe was run", recipe_of(place / "rope") == "learned-to-rope")
        measured = lengths(place / "results")
        check("its control too", recipe_of(place / "control") == "control")
        own = {"base": [128], "control": [128], "rope": [128, 256, 512, 1024]}
        check("they were evaluated by length", measured == own)
        check("they have read as many tokens", len({*training_tokens(place / "results").values()}) == 1)
        check("there is a verdict, and no warning of a missing control", is_concluded(place / "results"))
        check("a dry run sends nothing", "commit" not in hub.kinds())
        check("a model was patched in a script", "(1, 1000, 1024)" in python(place, hub, script))
        python(place, hub, longer)
        check("and saved", (place / "my-gpt2-rope" / "config.json").is_file())
        done(place, hub, command.splitlines()[-1].replace(DRY, ""))
        check("it was pushed", {"README.md", "config.json", "model.safetensors"} <= set(hub.files(REPO)))
        check("and comes back", "rope(base=10000.0" in python(place, hub, PULL))


def ten_lines() -> str:
    """Return the README's script."""
    (found,) = (block for block in blocks_of(README) if block.kind == "example")
    return found.code


def uses() -> str:
    """Return the README's command of the other three uses; the last line of it pushes."""
    (found,) = (block for block in blocks_of(README) if (block.kind, block.detail) == ("command", "uses"))
    last = found.code.splitlines()[-1]
    assert last.startswith("posswap push "), found
    assert last.endswith(DRY), found
    assert REPO in last, found
    return found.code


def shortened(command: str) -> str:
    """Return the command with less to train and to measure."""
    for part, less in SHORTER.items():
        assert command.count(part) == 1, part
        command = command.replace(part, less)
    return command


def script_of_the_quickstart() -> str:
    """Return the script of the quickstart page."""
    found: list[Block] = [block for block in blocks_of(QUICKSTART) if block.language == "python"]
    assert len(found) == 1, found
    return found[0].code


def done(place: Path, hub: Hub, command: str) -> str:
    """Run a command of the shell in `place`, and return what it prints."""
    kept = {key: value for key, value in os.environ.items() if key not in OTHERS_HUB}
    environment = (
        {"HF_POSSWAP_CACHE": str(place / "cache")}
        | kept
        | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(place / "hub"),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "*",
        }
    )
    started = time.monotonic()
    say(f"$ {command.rstrip()}")
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=place, env=environment, capture_output=True, text=True
    )
    if run.returncode:
        sys.exit(f"{run.stdout[-2000:]}{run.stderr[-3000:]}exit code {run.returncode}")
    say(f"  {time.monotonic() - started:.0f} s")
    return run.stdout


def python(place: Path, hub: Hub, code: str) -> str:
    """Run a script in `place`, and return what it prints."""
    (place / "script.py").write_text(code, encoding="utf-8")
    return done(place, hub, "python script.py")


def check(claim: str, holds: bool) -> None:
    """Say `claim`, or end."""
    if not holds:
        sys.exit(f"not so: {claim}")
    say(f"  {claim}")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def recipe_of(run: Path) -> str:
    """Return the recipe that the report of a training names."""
    return str(json.loads((run / "report.json").read_text(encoding="utf-8"))["recipe"]["name"])


def training_tokens(results: Path) -> dict[str, int]:
    """Return the tokens that the control and the swapped model were trained on."""
    models = json.loads((results / "results.json").read_text(encoding="utf-8"))["models"]
    return {name: models[name]["training"]["tokens"] for name in ("control", "rope")}


def is_concluded(results: Path) -> bool:
    """Return whether the swapped model is compared with the control's sliding window, and nothing warns."""
    found = json.loads((results / "results.json").read_text(encoding="utf-8"))
    conclusion = found["models"]["rope"]["conclusion"]
    is_compared = conclusion["against"] == "the sliding window of control" and conclusion["p"] is not None
    return is_compared and not any("control" in note for note in found["notes"])


def lengths(results: Path) -> dict[str, list[int]]:
    """Return the lengths at which each model's perplexity was measured."""
    models = json.loads((results / "results.json").read_text(encoding="utf-8"))["models"]
    return {name: [row["length"] for row in model["ppl_prefix"]] for name, model in models.items()}


if __name__ == "__main__":
    main()
