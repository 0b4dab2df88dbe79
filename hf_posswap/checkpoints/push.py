"""Pushing a checkpoint to the Hub: all of it in one commit, or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.checkpoints.adapters import ADAPTER_CONFIG
from hf_posswap.checkpoints.card import CardFacts, is_saved_readme, write_card
from hf_posswap.checkpoints.hub import Commit, checked_repo_id, hub_errors
from hf_posswap.checkpoints.manifest import CARD, MANIFEST
from hf_posswap.checkpoints.native import stock_instead
from hf_posswap.checkpoints.run_artifacts import Results, RunArtifacts, find_run_artifacts, read_results
from hf_posswap.checkpoints.save import save
from hf_posswap.errors import CheckpointError, OptionError
from hf_posswap.patching.inspect.describe import on_meta
from hf_posswap.patching.record.adapter_marks import SIDECAR
from hf_posswap.patching.record.training import training_of
from hf_posswap.utils.atomic_io import scratch_folder, shown, write_text
from hf_posswap.utils.format import human_bytes
from hf_posswap.utils.hub_session import HubSession, hub_session
from hf_posswap.utils.printable import in_lines
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LEFT_OUT = (
    ".*", "*/.*", "__pycache__/*", "*/__pycache__/*", "checkpoint-*/*", "optimizer.*", "scheduler.*", "scaler.*",
    "rng_state*", "trainer_state.json", "training_args.bin", "runs/*",  # of the Trainer
    "optimizer_[0-9]*", "pytorch_model_fsdp*", "random_states_*", "sampler*.bin", "custom_checkpoint_*",  # accelerate's
    "global_step*/*", "zero_to_fp32.py", "latest",  # DeepSpeed's
    "posswap-checkpoint.json", MANIFEST,
)  # fmt: skip
"""Patterns of files that no reader of a model needs: hidden ones, states and logs of trainers, what a save wrote."""
_SHARD = "model-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors"
_WEIGHTS = ("model.safetensors", _SHARD, "model.safetensors.index.json")
_OF_ADAPTERS = (ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin", SIDECAR)
_CODE = ("modeling_posswap.py", "posswap_*.py", MANIFEST)
PICTURES = "pictures"
"""Folder of the repository where the pictures of the card lie."""


@dataclass(frozen=True, repr=False)
class PushReport(ResultView):
    """What `push` uploaded, or would. `print(report)` shows it.

    Attributes:
        repo_id: on the Hub.
        revision: branch.
        files: path in the repository to size in bytes.
        deleted: files of an earlier push that the commit takes away; unknown, so empty, in a dry run.
        commit: id of the commit; None in a dry run.
        url: of the commit; None in a dry run.
        card: the model card that was written for it; None: there was one, or none was wanted.
        notes: what the card took from the model's run, and whether a stock checkpoint would do instead.
    """

    repo_id: str
    revision: str
    files: dict[str, int]
    deleted: tuple[str, ...] = ()
    commit: str | None = None
    url: str | None = None
    card: str | None = None
    notes: tuple[str, ...] = ()

    def _repr_facts(self) -> dict[str, object]:
        size = human_bytes(sum(self.files.values()))
        return {
            "repo_id": self.repo_id, "revision": self.revision, "files": len(self.files), "size": size,
            "commit": self.commit, "url": self.url,
        }  # fmt: skip

    def _html_rows(self) -> list[tuple[str, str]]:
        done = f"pushed to {self.url}" if self.url else "nothing was sent"
        files = [(name, human_bytes(size)) for name, size in self.files.items()]
        deleted, notes = [(name, "deleted") for name in self.deleted], [("note", note) for note in self.notes]
        return [("repository", f"{self.repo_id} at {self.revision}: {done}"), *files, *deleted, *notes]

    def __str__(self) -> str:
        width = max(map(len, self.files), default=0)
        lines = [f"{name:<{width}}  {human_bytes(size)}" for name, size in self.files.items()]
        lines += [f"{name:<{width}}  deleted" for name in self.deleted]
        total = f"{len(self.files)} files, {human_bytes(sum(self.files.values()))}"
        done = (
            f"pushed to {self.url}" if self.url else f"would go to {self.repo_id} at {self.revision}; nothing was sent"
        )
        preview = (
            [] if self.url or self.card is None else ["", f"{CARD} would be:", "", *self.card.rstrip().split("\n")]
        )
        return in_lines([*lines, f"{total}: {done}", *self.notes, *preview])

    def to_dict(self) -> dict[str, object]:
        """Return the report as JSON."""
        return {**self.__dict__, "deleted": list(self.deleted), "notes": list(self.notes)}


def push(
    source: PreTrainedModel | str | Path,
    repo_id: str,
    *,
    tokenizer: Any = None,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    commit_message: str | None = None,
    timeout: float | None = None,
    dry_run: bool = False,
    card: bool = True,
    base_model: str | None = None,
    license: str | None = None,
    recipe: dict[str, object] | None = None,
    results: dict[str, object] | str | Path | None = None,
    trust_remote_code: bool = False,
) -> PushReport:
    """Push a model or a saved checkpoint to the Hub in one commit, with a model card, and return what went there.

    A push that fails can be repeated; where no clear answer came to the commit, the Hub is asked what is there, and
    where it is, the push has succeeded. A Hub that is busy or fails is tried again as it asks, four times. Weights and
    bundled code of an earlier push that the new one no longer has are deleted in the same commit, and an adapter where
    a whole model comes; other files in the repository stay.

    Args:
        source: a model, or a folder that `save` or `save_pretrained` wrote. Of a folder, hidden files and what
            trainers keep to resume or log stay behind.
        repo_id: "owner/name"; made where it is missing.
        tokenizer: pushed with a model; a folder has its own.
        private: whether a new repository is private, and an existing public one refused; False: the default of its
            owner, which is public unless an organisation says otherwise.
        revision: branch to commit to, made from main where it is missing; None: main.
        token: of the Hub; None: the one of `hf auth login` or HF_TOKEN.
        commit_message: of the commit.
        timeout: seconds that all of the sending may take; None: as long as the Hub answers each request within two
            minutes.
        dry_run: send nothing, only return what would go.
        card: write the model card, README.md. False, or a README.md in the folder that you wrote or edited: it is left
            as it is.
        base_model: Hub id of the model before the swap; None: the base in the training report next to a folder, or
            the checkpoint that a model was loaded from.
        license: of the card; None: taken over from the base model's card.
        recipe: how the model was trained, for the card; None: from the report next to a folder.
        results: of an evaluation, for the card: {metric: number}, or what eval, compare or a quickstart writes: its
            folder, with the pictures, or the dict; None: those in `results` next to a folder or its run, if they are of
            this model, or the losses of the training.
        trust_remote_code: run code of a folder, where its config needs that, to write the card.

    Raises:
        CheckpointError: the source is not a checkpoint, or the Hub cannot be reached or refuses: why, whether anything
            was committed, and what to do.
        OptionError: a timeout that is not a positive number.
        RecordError: its swap cannot be read.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, "rope", max_length=64)
        >>> sorted(push(model, "me/gpt2-rope", dry_run=True).files)[:3]
        ['README.md', 'config.json', 'generation_config.json']
    """
    checked_repo_id(repo_id)
    if timeout is not None and not timeout > 0:
        raise OptionError(f"timeout is a positive number of seconds, or None, got {timeout!r}.")
    given = _Given(base_model, license, recipe, read_results(results) if results is not None else None)
    with scratch_folder() as scratch, ExitStack() as stack:
        if isinstance(source, str | Path):
            _check_folder(Path(source), tokenizer)
        if not dry_run:
            session = stack.enter_context(hub_session(timeout))
            _check_reach(repo_id, token)
        if isinstance(source, str | Path):
            folder, in_memory = Path(source), False
        else:
            folder, in_memory = save(source, scratch / "model", tokenizer=tokenizer), True
        files, text = files_to_push(folder), None
        notes = stock_instead(folder, in_memory=in_memory, trust_remote_code=trust_remote_code)
        if card and (CARD not in files or is_saved_readme(folder / CARD)):
            facts, source_notes = _card_facts(source, repo_id, given, trust_remote_code)
            text = write_card(folder, facts, token=token, online=not dry_run, trust_remote_code=trust_remote_code)
            write_text(scratch / CARD, text)
            pictures = {f"{PICTURES}/{picture.name}": picture for picture in facts.results.pictures}
            files, notes = {**files, CARD: scratch / CARD, **pictures}, notes + source_notes
        sizes = {name: path.stat().st_size for name, path in files.items()}
        report = PushReport(repo_id, revision or "main", sizes, card=text, notes=notes)
        if dry_run:
            return report
        with hub_errors(repo_id):
            return _commit(report, files, session, private, token, commit_message or "Push by hf_posswap")


def files_to_push(folder: Path) -> dict[str, Path]:
    """Return the files of `folder` that a push uploads, by their path in the repository."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in paths.items() if not _matches(name, LEFT_OUT)}


def stale_files(there: Iterable[str], coming: Iterable[str]) -> list[str]:
    """Return the files of an earlier push that would contradict the one that comes: its shards, its bundled code.

    Where a whole model comes, an adapter too: with it the repository would be read as one. An adapter that comes leaves
    the weights of a whole model.

    Example:
        >>> stale_files(["model-00001-of-00002.safetensors", "mine.txt"], ["model.safetensors"])
        ['model-00001-of-00002.safetensors']
    """
    coming = set(coming)
    whole = any(_matches(name, _WEIGHTS) for name in coming)
    patterns = (*_CODE, *_WEIGHTS, *_OF_ADAPTERS) if whole else _CODE
    return sorted(name for name in set(there) - coming if "/" not in name and _matches(name, patterns))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class _Given:
    """What the caller says for the card; what is None is looked for."""

    base_model: str | None
    license: str | None
    recipe: dict[str, object] | None
    results: Results | None


def _card_facts(
    source: PreTrainedModel | str | Path, repo_id: str, given: _Given, trust_remote_code: bool
) -> tuple[CardFacts, tuple[str, ...]]:
    """Return the facts of the card, given or from the model's run; and where they were found, as sentences."""
    looks, artifacts = given.recipe is None or given.results is None, RunArtifacts()
    if looks and isinstance(source, str | Path) and (Path(source) / "config.json").is_file():
        skeleton = on_meta(str(source), trust_remote_code=trust_remote_code)
        patch = getattr(skeleton, "_posswap", None)
        plan = None if patch is None else patch.plan
        artifacts = find_run_artifacts(Path(source), plan, training_of(skeleton.config))
    base = given.base_model or artifacts.base or getattr(getattr(source, "config", None), "name_or_path", None) or None
    results = artifacts.results if given.results is None else given.results
    facts = CardFacts(repo_id, base, given.license, given.recipe or artifacts.recipe, results, PICTURES)
    is_looked_for = {"recipe": given.recipe is None, "results": given.results is None}
    return facts, tuple(note for name, note in artifacts.sources.items() if is_looked_for[name])


def _check_folder(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a folder that is not a checkpoint.

    Raises:
        CheckpointError: it is not a checkpoint, or a tokenizer was given with it.
    """
    try:
        named = any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    except OSError:  # a name that is too long
        named = False
    if not named or not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{shown(folder)} is not a checkpoint that can be pushed: it needs a config.json and safetensors. Give "
            "a folder that hf_posswap.save or save_pretrained wrote, or a model."
        )
    if tokenizer is not None:
        raise CheckpointError("a folder is pushed as it is: save the tokenizer into it, or push the model itself.")


def _commit(
    report: PushReport, files: dict[str, Path], session: HubSession, private: bool, token: str | None, message: str
) -> PushReport:
    """Make the repository and the branch where they are missing, send the files, and return what went there."""
    from huggingface_hub import HfApi

    api = HfApi(token=token, library_name="hf_posswap")
    api.create_repo(report.repo_id, private=private or None, exist_ok=True)  # None: the default of the owner
    if private and api.model_info(report.repo_id).private is False:
        raise CheckpointError(
            f"{report.repo_id} is there already and public, and private was asked for: nothing was sent. Make it "
            "private on the Hub, or push to another name."
        )
    if report.revision != "main":
        api.create_branch(report.repo_id, branch=report.revision, exist_ok=True)
    stale = stale_files(api.list_repo_files(report.repo_id, revision=report.revision), files)
    oid, url = Commit(api, report.repo_id, report.revision, files, stale).send(session, message)
    return replace(report, deleted=tuple(stale), commit=oid, url=url)


def _check_reach(repo_id: str, token: str | None) -> None:
    """Ask the Hub for the repository, which may be missing: whether it answers at all is known before much is done."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    with hub_errors(repo_id), suppress(RepositoryNotFoundError):
        HfApi(token=token, library_name="hf_posswap").model_info(repo_id)
