"""Trains one phase, from the start or a checkpoint to its finished model."""

from __future__ import annotations

import gc
import importlib.util
import shutil
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerState, set_seed
from transformers.integrations import TensorBoardCallback

from hf_posswap.checkpoints.run_artifacts import REPORT
from hf_posswap.checkpoints.save import refuse_to_replace, replacing_checkpoint, write_files
from hf_posswap.compat.transformers_models import load_whole
from hf_posswap.errors import CheckpointError, TrainingStoppedError
from hf_posswap.patching.apply.patch_model import swap_plan
from hf_posswap.patching.tools.scheme_values import finish_blend
from hf_posswap.training.config import SENTENCES, Phase, Recipe
from hf_posswap.training.engine.arguments import training_arguments
from hf_posswap.training.engine.checkpoints import SEAL, checkpoints_in, differences, step_of
from hf_posswap.training.engine.gates import probe
from hf_posswap.training.engine.log import RunLog, Watch, tensorboard_callback
from hf_posswap.training.engine.parallel import Launch, collator_of
from hf_posswap.training.engine.preparing import Prepared, prepare
from hf_posswap.training.engine.sentences import write_sentence_files
from hf_posswap.training.engine.services import Services, measure_of
from hf_posswap.training.engine.trainer import (
    BlendScheduleCallback,
    LossExplosionCallback,
    PosswapTrainer,
    StopAtSigterm,
    StopWhenRecovered,
    stage_done_at,
    stop_at_sigterm,
)
from hf_posswap.training.trainable import parameter_groups
from hf_posswap.utils.atomic_io import read_object, write_json

if TYPE_CHECKING:
    from transformers import TrainerCallback

DONE = "done.json"
MODEL = "model"
LOG = "log.jsonl"
CHECKPOINTS = "checkpoints"
_GATES = "gates.json"


@dataclass(frozen=True)
class PhaseResult:
    """The results of one phase.

    Attributes:
        name: of the phase; "" if there is only one.
        steps: optimizer steps.
        tokens: tokens read, over all processes.
        train_runtime: seconds of training over all sessions; a killed session counts up to its last log entry.
        first_loss: of the first log entry, which is the first step's; None: nothing was logged.
        last_loss: of the last log entry, the mean over the steps since the one before, or since a resume.
        plan: of the swap, as JSON; None: there was none.
        gates: messages of the checks.
        data: summary of the data.
    """

    name: str
    steps: int
    tokens: int
    train_runtime: float
    first_loss: float | None
    last_loss: float | None
    plan: dict[str, Any] | None
    gates: list[str]
    data: dict[str, object]


@dataclass(frozen=True)
class Run:
    """The state that the phases of a run share.

    Attributes:
        folder: of the run.
        identity: of the training; a phase adds documents and base.
        launch: how the process was started.
        services: for evaluation and output.
        main: whether this process writes files and shows lines.
    """

    folder: Path
    identity: dict[str, object]
    launch: Launch
    services: Services
    main: bool

    def say(self, line: str) -> None:
        """Show a line, on the main process."""
        if self.main and self.services.reporter is not None:
            self.services.reporter.line(line)


def run_phase(phase: Phase, run: Run, weights: Path | None) -> PhaseResult:
    """Train or resume one phase, and return its results; a finished phase is not trained again.

    Args:
        phase: of the recipe.
        run: its run.
        weights: the finished model of the previous phase.

    Raises:
        TrainingStoppedError: the training was asked to stop.
    """
    folder = run.folder / phase.name
    done = _finished(folder, run.identity)
    if done is not None:
        run.say(f"{folder} is finished: it is not trained again, and its data and base are not checked.")
        return done
    recipe = phase.recipe
    refuse_to_replace(folder / MODEL, overwrite=True)  # now, not after the training
    (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    set_seed(recipe.training.seed)
    load_whole()
    resumes = any((folder / CHECKPOINTS).glob("checkpoint-*"))
    recovers = phase.stage is not None and phase.stage.recovered is not None
    prepared = prepare(recipe, run.launch, run.services, weights=weights, resumes=resumes, recovers=recovers)
    run = replace(run, identity=run.identity | prepared.identity)
    if weights is not None:
        _refuse_other_training(weights.parent, run.identity)
    for line in prepared.messages:
        run.say(line)
    use_cache = getattr(prepared.model.config, "use_cache", None)
    prepared.messages = _first_messages(folder / _GATES, prepared.messages, run, resumes=resumes)
    log = RunLog(folder / LOG, writes=run.main)
    trainer = _trainer(phase, run, prepared, folder)
    step_tokens = _rows(recipe, run) * recipe.data.length
    watch = Watch(log, run.services.reporter if run.main else None, phase.name or "training", step_tokens)
    for callback in (watch, *_callbacks(phase, prepared, trainer, log)):
        trainer.add_callback(callback)
    checkpoint = trainer.newest_checkpoint()
    if checkpoint is not None:
        step = stage_done_at(TrainerState.load_from_json(str(checkpoint / "trainer_state.json")))
        if step is not None:  # a stage that was done just before the process was interrupted stops at once
            trainer.args.max_steps = step
            trainer.train_dataset = prepared.data.steps(step, _rows(recipe, run))
    _resume_logs(trainer, checkpoint, folder, log, run)
    if checkpoint is not None:
        of = f" of {phase.name}" if phase.name else ""
        run.say(f"resuming after step {step_of(checkpoint)} of {trainer.args.max_steps}{of}, from {checkpoint}")
    try:
        with stop_at_sigterm(trainer) if recipe.training.enable_jit_checkpoint else nullcontext() as stop:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            _end_unfinished(trainer, stop)  # here, where a second SIGTERM does not end the writing
    finally:
        watch.close()
    steps = trainer.state.global_step
    if use_cache is None:
        del prepared.model.config.use_cache  # the Trainer added it
    else:
        prepared.model.config.use_cache = use_cache  # the Trainer turned it off
    if recipe.swap.gradual_steps:
        prepared.plan = swap_plan(finish_blend(prepared.model, max_length=recipe.swap.max_length))
    if prepared.plan is not None and prepared.tokenizer.model_max_length == prepared.window:
        prepared.tokenizer.model_max_length = prepared.plan.max_length  # otherwise it truncates at the old length
    _write_model(trainer, prepared, folder, recipe, run)
    result = _result(phase, prepared, steps, steps * step_tokens, watch.seconds, log)
    if run.main:
        write_json(folder / DONE, {"identity": run.identity, "result": asdict(result)})
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()
    del trainer, prepared
    gc.collect()
    load_whole()
    return result


def _end_unfinished(trainer: PosswapTrainer, stop: StopAtSigterm | None) -> None:
    """If the training was asked to stop, be it in its last step, write a checkpoint of where it stopped, and raise."""
    steps = trainer.state.global_step
    is_asked = stop is not None and stop.is_asked()
    if not is_asked and (steps >= trainer.args.max_steps or stage_done_at(trainer.state) is not None):
        return
    if not any(step_of(path) == steps and (path / SEAL).is_file() for path in checkpoints_in(trainer.folder)):
        trainer.save_checkpoint()
    raise TrainingStoppedError(
        f"the training was asked to stop after step {steps} of {trainer.args.max_steps}, and is not finished (with "
        f"training.enable_jit_checkpoint, SIGTERM asks for it). {trainer.last_good()} The same command resumes."
    )


def _rows(recipe: Recipe, run: Run) -> int:
    """Return the rows of data.length tokens that one step reads on all processes."""
    training = recipe.training
    return training.per_device_train_batch_size * training.gradient_accumulation_steps * run.launch.replicas


def _trainer(phase: Phase, run: Run, prepared: Prepared, folder: Path) -> PosswapTrainer:
    recipe, training = phase.recipe, phase.recipe.training
    evaluates, documents = training.eval_strategy != "no" or training.eval_on_start, prepared.data.held_out
    trainer = PosswapTrainer(
        prepared.model,
        training_arguments(recipe, folder / CHECKPOINTS),
        objective=prepared.objective,
        groups=lambda model: parameter_groups(
            model, recipe.trainable, learning_rate=training.learning_rate, weight_decay=training.weight_decay
        ),
        identity=run.identity,
        measure=measure_of(recipe, run.services, prepared.model, documents, prepared.data.held_out_counted)
        if evaluates
        else None,
        tokenizer=prepared.tokenizer,
        data_collator=collator_of(run.launch, prepared.data.collate),
        train_dataset=prepared.data.steps(training.max_steps, _rows(recipe, run)),
        eval_dataset=documents if evaluates else None,
    )
    return trainer


def _first_messages(path: Path, messages: list[str], run: Run, *, resumes: bool) -> list[str]:
    """Return the messages saved in `path` when this training started; if it starts now, save `messages`."""
    if resumes and path.is_file():
        return list(read_object(path, said=list)["said"])
    if run.main:
        write_json(path, {"said": messages})
    return messages


def _resume_logs(trainer: PosswapTrainer, checkpoint: Path | None, folder: Path, log: RunLog, run: Run) -> None:
    """Resume all logs at `checkpoint` as if there had been no interruption; None: start new ones."""
    step = 0 if checkpoint is None else step_of(checkpoint)
    log.go_back_to(step if checkpoint is not None else -1)
    if checkpoint is not None:
        trainer.args.eval_on_start = False  # it was evaluated at the original start
    default_callback = trainer.pop_callback(TensorBoardCallback)  # it writes next to the checkpoints
    if default_callback is not None and run.main:
        trainer.add_callback(tensorboard_callback(folder / "tensorboard", after=step))


def _callbacks(phase: Phase, prepared: Prepared, trainer: PosswapTrainer, log: RunLog) -> list[TrainerCallback]:
    recipe, stage = phase.recipe, phase.stage
    callbacks: list[TrainerCallback] = [LossExplosionCallback(recipe.gates, trainer.last_good)]
    if recipe.swap.gradual_steps:
        callbacks.append(BlendScheduleCallback(prepared.model, recipe.swap.gradual_steps))
    if stage is not None and prepared.recovery is not None:
        short, before = prepared.recovery
        callbacks.append(StopWhenRecovered(stage, lambda: probe(prepared.model, short, causal=True), before, log))
    return callbacks


def _write_model(trainer: PosswapTrainer, prepared: Prepared, folder: Path, recipe: Recipe, run: Run) -> None:
    """Write the finished model atomically."""
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    gathered = folder / ".unfinished-model"
    if is_sharded:
        if run.main:
            shutil.rmtree(gathered, ignore_errors=True)
        trainer.write_model(gathered)
    if not run.main:
        return
    (run.folder / REPORT).unlink(missing_ok=True)  # it is of the model that is replaced
    with replacing_checkpoint(folder / MODEL, overwrite=True) as temporary:
        if is_sharded:
            gathered.rename(temporary)
        else:
            write_files(prepared.model.eval(), temporary, prepared.tokenizer)
        if recipe.objective.kind in SENTENCES and importlib.util.find_spec("sentence_transformers") is not None:
            assert prepared.plan is not None
            write_sentence_files(recipe.model, temporary, prepared.plan.max_length)


def _result(phase: Phase, prepared: Prepared, steps: int, tokens: int, seconds: float, log: RunLog) -> PhaseResult:
    losses = [entry for entry in log.entries() if "loss" in entry]
    return PhaseResult(
        name=phase.name,
        steps=steps,
        tokens=tokens,
        train_runtime=round(seconds, 3),
        first_loss=losses[0]["loss"] if losses else None,
        last_loss=losses[-1]["loss"] if losses else None,
        plan=None if prepared.plan is None else prepared.plan.to_dict(),
        gates=prepared.messages,
        data=prepared.data.summary,
    )


def _finished(folder: Path, identity: dict[str, object]) -> PhaseResult | None:
    """Return the results of a finished phase; None: it is not finished.

    Raises:
        CheckpointError: it belongs to another training.
    """
    if not (folder / DONE).is_file() or not (folder / MODEL).is_dir():
        return None
    _refuse_other_training(folder, identity)
    try:
        return PhaseResult(**read_object(folder / DONE, result=dict)["result"])
    except TypeError as error:
        raise CheckpointError(
            f"{folder / DONE} holds no result of a phase: {error}. Delete {folder} to start over."
        ) from error


def _refuse_other_training(folder: Path, identity: dict[str, object]) -> None:
    """Raise a CheckpointError if the finished phase in `folder` has a different `identity`, in the keys that it has."""
    saved_identity = read_object(folder / DONE, identity=dict)["identity"]
    known = {key: value for key, value in saved_identity.items() if key in identity}
    changes = [f"{key}: {old!r}, now {new!r}" for key, old, new in differences(known, identity)]
    if changes:
        raise CheckpointError(
            f"{folder} holds another, finished training ({'; '.join(changes)}). Choose another folder (out)."
        )
