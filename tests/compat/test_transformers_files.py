"""Files of checkpoints by the functions of the transformers that is installed, from a Hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hf_posswap.compat import transformers_files
from tests.checkpoints.loopback import TOKEN, running

ROOT = Path(__file__).resolve().parents[2]
ASKS = """
import os
from huggingface_hub import HfApi, constants
from hf_posswap.compat.transformers_files import file_of

HfApi().create_repo("me/files")
HfApi().upload_file(path_or_fileobj=b"{}", path_in_repo="there.json", repo_id="me/files")
print(file_of("me/files", "there.json").read_text())
print(file_of("me/files", "missing.json"))
constants.HF_HUB_DOWNLOAD_TIMEOUT = constants.HF_HUB_ETAG_TIMEOUT = 2
os.environ["HF_ENDPOINT"] = constants.ENDPOINT = "http://127.0.0.1:9"
print(file_of("me/other", "config.json", certain=False, token=False))
try:
    file_of("me/other", "config.json", token=False)
except OSError:
    print("refused")
"""


def test_file_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("{}")
    assert transformers_files.file_of(tmp_path, "there.json") == tmp_path / "there.json"
    assert transformers_files.file_of(str(tmp_path), "missing.json") is None


def test_file_of_a_repository(tmp_path: Path) -> None:
    with running() as hub:
        drop = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        environment = {key: value for key, value in os.environ.items() if key not in drop}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
        environment |= {"HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", ASKS]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["{}", "None", "None", "refused"]
