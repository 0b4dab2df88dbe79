"""The model card of a checkpoint: its base, its swap, and how to load it."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.checkpoints.hub import checked_repo_id
from hf_posswap.checkpoints.run_artifacts import Results, evaluation, table
from hf_posswap.compat.transformers_loading import auto_class_name
from hf_posswap.errors import CheckpointError, PluginWarning
from hf_posswap.patching.inspect.describe import describe_positions, on_meta
from hf_posswap.patching.record.refusals import stock_name
from hf_posswap.patching.record.remote_code import ENTRY, package_version
from hf_posswap.patching.record.training import training_of
from hf_posswap.utils.atomic_io import object_or_empty
from hf_posswap.utils.sentence_models import ANY_KIND
from hf_posswap.utils.untrusted import card_data, kept_header, read_bounded

if TYPE_CHECKING:
    from huggingface_hub import EvalResult
    from transformers import PreTrainedConfig

    from hf_posswap.patching.plan.swap_plan import SwapPlan

_TAG = "hf_posswap"
_SIGNATURE = "\n<!-- written by hf_posswap, SHA-256 of the lines above: "
_TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
}


@dataclass(frozen=True)
class CardFacts:
    """What a card says that the checkpoint itself does not.

    Attributes:
        repo_id: where the checkpoint goes.
        base: Hub id, or folder, of the model before the swap; None: unknown.
        license: None: taken over from the base's card.
        recipe: how the model was trained.
        results: of an evaluation.
        pictures: folder of the repository where the pictures of the results lie.
    """

    repo_id: str
    base: str | None = None
    license: str | None = None
    recipe: dict[str, object] | None = None
    results: Results = Results()
    pictures: str = "pictures"


def write_card(
    folder: str | Path,
    facts: CardFacts,
    *,
    token: str | None = None,
    online: bool = True,
    trust_remote_code: bool = False,
) -> str:
    """Return the model card of the checkpoint in `folder` as Markdown with metadata.

    Args:
        folder: with a config.json, swapped or not; no weights are read.
        facts: that the folder does not tell.
        token: of the Hub, to read the base model's card.
        online: whether the base model's card may be fetched from the Hub.
        trust_remote_code: run code that the folder brings, where its config needs that.

    Raises:
        CheckpointError: no readable config, or results of other models.
        RecordError: the swap cannot be read.

    Example:
        >>> import tempfile
        >>> from transformers import GPT2Config
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     GPT2Config(n_layer=1, n_head=2, n_embd=8, architectures=["GPT2LMHeadModel"]).save_pretrained(folder)
        ...     print(write_card(folder, CardFacts("me/mine", base="gpt2", license="mit"), online=False)[:60])
        ---
        base_model: gpt2
        library_name: transformers
        license: mit
    """
    skeleton = on_meta(str(folder), trust_remote_code=trust_remote_code)
    patch = getattr(skeleton, "_posswap", None)
    plan = None if patch is None else patch.plan
    base, license = origin = _base_and_license(facts, token, online, card_data(folder).get("license"))
    architecture, training = type(skeleton).__name__, describe_positions(skeleton).trained
    task = next((task for end, task in _TASKS.items() if architecture.endswith(end)), None)
    numbers, metrics = evaluation(facts.results, plan, training_of(skeleton.config), task or "other")
    data = _card_data(facts, task, plan, origin, metrics)
    recipe = json.dumps(facts.recipe, indent=2, default=str)
    sections = [
        f"# {facts.repo_id.rpartition('/')[2]}",
        _opening(plan, base) + ("" if training is None else f" Trained: {training}."),
        *([] if plan is None else [f"## What was swapped\n\n{_swap(plan)}"]),
        f"## How to load\n\n{_loading(plan, facts.repo_id, architecture, Path(folder))}",
        *([f"## Evaluation\n\n{numbers}"] if numbers else []),
        *(f"![{picture.stem}]({facts.pictures}/{picture.name})" for picture in facts.results.pictures),
        *([f"## Recipe\n\n```json\n{recipe}\n```"] if facts.recipe else []),
        f"## Limits\n\n{_limits(plan, license)}",
        f"## Versions\n\n{_versions(skeleton.config)}",
    ]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"


def saved_readme(folder: Path, plan: SwapPlan, architecture: str, base: str | None = None) -> str:
    """Return the README.md of a saved folder that is not on the Hub: what the model is, and how to load it.

    Args:
        folder: where the checkpoint is.
        plan: of the swap.
        architecture: the model's class.
        base: what the model was loaded from; of a folder, licence and languages are taken over.
    """
    text = (
        f"{kept_header(base) if base else ''}# {architecture} with {plan.scheme.name}\n\n{_opening(plan, None)}\n\n"
        "## How to load\n\n"
        f"{_loading(plan, 'path/to/this/folder', architecture, folder)}\n\n`posswap push` and a save with "
        "`overwrite=True` replace this file, unless you edit it.\n"
    )
    return text + _signature(text)


def is_saved_readme(path: Path) -> bool:
    """Return whether the file at `path` is a README.md that a save wrote, and nobody edited since."""
    try:
        text, mark, signature = read_bounded(path).rpartition(_SIGNATURE)
    except (OSError, ValueError):
        return False
    return bool(mark) and mark + signature == _signature(text)


def _signature(text: str) -> str:
    return f"{_SIGNATURE}{hashlib.sha256(text.encode()).hexdigest()} -->\n"


def _card_data(
    facts: CardFacts,
    task: str | None,
    plan: SwapPlan | None,
    origin: tuple[str | None, str | None],
    metrics: list[EvalResult],
) -> Any:
    from huggingface_hub import ModelCardData

    base, license = origin
    longer = plan is not None and plan.max_length > plan.sites.geometry.original_length
    return ModelCardData(
        base_model=base,
        base_model_relation=None if base is None else "finetune",
        library_name="transformers",
        license=license,
        pipeline_tag=task,
        tags=[_TAG, *(["long-context"] if longer else []), *([] if plan is None else [plan.scheme.name])],
        model_name=facts.repo_id.rpartition("/")[2] if metrics else None,
        eval_results=metrics or None,
    )


def _base_and_license(
    facts: CardFacts, token: str | None, online: bool, kept: str | None
) -> tuple[str | None, str | None]:
    """Return the base model's Hub id and the licence, as far as they are given or a card tells them.

    `kept` is the licence that a save took over from the card of the base.
    """
    local = facts.base is not None and Path(facts.base).is_dir()
    if facts.base is None or not (local or _is_repo_id(facts.base)):
        return None, facts.license or kept
    metadata: dict[str, Any] = {}
    if local or (online and facts.license is None):
        metadata = _card_of(facts.base, token, local)
    named = metadata.get("base_model")
    base = (named[0] if isinstance(named, list) and named else named) if local else facts.base
    return (base if isinstance(base, str) else None), facts.license or metadata.get("license") or kept


def _is_repo_id(name: str) -> bool:
    try:
        return checked_repo_id(name) == name
    except CheckpointError:
        return False


def _card_of(base: str, token: str | None, local: bool) -> dict[str, object]:
    """Return the metadata of the card of `base`, a folder or a Hub id; empty, with a warning, where there is none."""
    from huggingface_hub import ModelCard

    if local and not (Path(base) / "README.md").is_file():
        return {}
    try:
        if local:
            card = ModelCard(read_bounded(Path(base) / "README.md"), ignore_metadata_errors=True)
        else:
            card = ModelCard.load(base, token=token, ignore_metadata_errors=True)
    except Exception as error:  # an unreadable card must not stop a push: a warning says what is missing
        warnings.warn(
            f"the card of the base model {base} cannot be read, so its licence is not taken over: "
            f"{type(error).__name__}: {error}. Give license=... to state it.",
            PluginWarning,
            stacklevel=5,
        )
        return {}
    data: dict[str, object] = card.data.to_dict()
    return data


def _opening(plan: SwapPlan | None, base: str | None) -> str:
    name = "A model" if base is None else f"[{base}](https://huggingface.co/{base})"
    if plan is None:
        return f"{name}, with its own position mechanism."
    return (
        f"{name} with its position mechanism swapped to **{plan.scheme.name}** by hf_posswap, for up to "
        f"{plan.max_length} tokens."
    )


def _swap(plan: SwapPlan) -> str:
    from hf_posswap.patching.plan.swap_plan import EDIT_HEADER

    edits = table(list(EDIT_HEADER), [[str(cell) for cell in row] for row in plan.edit_rows()])
    facts = table(["", ""], [[name, text] for name, text in plan.fact_rows()])
    record = json.dumps(plan.record.to_dict(), indent=2)
    return f"`{plan.named}`\n\n{edits}\n\n{facts}\n\nThe record, `config.posswap`:\n\n```json\n{record}\n```"


def _loading(plan: SwapPlan | None, repo_id: str, architecture: str, folder: Path) -> str:
    native = f'from transformers import {architecture}\n\nmodel = {architecture}.from_pretrained("{repo_id}")'
    plugin = f'import hf_posswap  # pip install hf-posswap\n\nmodel = hf_posswap.load("{repo_id}")'
    auto = auto_class_name(stock_name(architecture))
    remote = f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("{repo_id}", trust_remote_code=True)'
    is_native, whole = plan is None or plan.route == "native", ""
    loader = object_or_empty(folder / "config_sentence_transformers.json").get("model_type")
    if loader in ANY_KIND:
        imports = ("" if is_native else "import hf_posswap\n") + f"from sentence_transformers import {loader}"
        code = f'{imports}\n\nmodel = {loader}("{repo_id}")'
        whole = f"With sentence-transformers:\n\n{_python(code)}\n\nThe transformers model inside it, by itself:\n\n"
    if plan is None or is_native:
        strictly = f"or with hf_posswap, strictly:\n\n{_python(plugin)}"
        return f"{whole}With transformers alone:\n\n{_python(native)}\n\n{strictly}"
    own = "".join(
        f" Import the module `{module}` first: it registers the scheme {name}, which is not part of hf_posswap."
        for name, module in (plan.record.imports or {}).items()
    )
    text = (
        f"{whole}With hf_posswap:\n\n{_python(plugin)}\n\nAfter `import hf_posswap` the Auto classes of transformers "
        "load it "
    )
    if (folder / f"{ENTRY}.py").is_file():
        return (
            f"{text}too.{own} Without the package, by the code in this repository, which is the package's own"
            f"{', and that of the scheme' if own else ''} (read it first):\n\n{_python(remote)}\n\nPlain transformers "
            "refuses this checkpoint, and so do serving stacks that do not run its code."
        )
    first = own or " Import the package that describes its model type first: that is not part of hf_posswap."
    return f"{text}too.{first}\n\nPlain transformers refuses this checkpoint."


def _python(code: str) -> str:
    return f"```python\n{code}\n```"


def _limits(plan: SwapPlan | None, license: str | None) -> str:
    lines = [] if license else ["The licence of the base model applies; it is not stated here because it is not known."]
    if plan is not None:
        trained = plan.adaptation.startswith("adapted")
        needs = f"{'Its weights were' if trained else 'Adaptation:'} {plan.adaptation}"
        lines.append(f"Made for {plan.max_length} tokens. {needs}.")
        if not plan.cached_equals_full:
            lines.append("Decoding with a cache may differ from one full forward at long lengths.")
        if not plan.unbounded:
            lines.append("Beyond that length it stops with an error.")
        lines += [note for note in plan.notes]
    lines.append("A longer reach does not show that far context is used: measure it on your task.")
    return "\n".join(f"- {line}" for line in lines)


def _versions(config: PreTrainedConfig) -> str:
    import torch
    import transformers

    versions = {"hf_posswap": package_version(), "transformers": transformers.__version__, "torch": torch.__version__}
    training = training_of(config)
    trained = {} if training is None else training.software
    if not trained:
        return table(["package", "version"], [[name, version] for name, version in versions.items()])
    names = dict.fromkeys((*versions, *trained))
    rows = [[name, versions.get(name, ""), trained.get(name, "")] for name in names]
    return table(["package", "version", "trained with"], rows)
