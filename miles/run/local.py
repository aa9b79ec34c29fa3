"""The local launcher: engine, collector, buffer and learner in one process."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from miles.algo import AlgorithmRow
from miles.algo.rehearsal import rehearse
from miles.buffer.embedded import EmbeddedBuffer
from miles.buffer.ledger import Ledger
from miles.buffer.rewinding import RewindMode
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.config.schema import Recipe
from miles.errors import (
    ConfigError,
    EngineError,
    EpisodeError,
    NothingToTrain,
    PoisonedData,
    RewardError,
    TrainingAborted,
)
from miles.learn.adapters import target_paths
from miles.learn.export import check_target
from miles.learn.learner import Learner
from miles.learn.load import describe, load_model
from miles.learn.scorer import load_scorer, set_padding
from miles.learn.writer import Writer
from miles.loop import train
from miles.observe.live import LiveView
from miles.observe.recorder import Recorder
from miles.observe.rows import METRICS_FILE, read_rows
from miles.observe.sinks import open_sinks
from miles.rollout.collect import Collector, GroupMaker
from miles.rollout.episode import Episodes
from miles.rollout.evaluate import Evaluation, evaluation_metrics, run_evaluation
from miles.rollout.recorded import Recorded
from miles.run.coroutines import Coroutines
from miles.run.engines import open_rollouts
from miles.run.interrupts import Interrupted, Interrupts
from miles.run.keeper import BEST, FINAL, RunKeeper
from miles.run.logs import logs_to, said
from miles.run.prepare import Inputs
from miles.run.resume import CHECKPOINTS, DATA, check_resumable, lost_rows, restore, restore_ledger
from miles.run.rundir import begin_run_dir, check_run_dir, fixed_hash, write_config

log = logging.getLogger(__name__)

FAILED_OUTSIDE_OF_UPDATES = (RewardError, EpisodeError, EngineError, NothingToTrain, PoisonedData)
"""What collecting and evaluating raise: the learner stands between two steps then."""


@dataclass
class LocalLauncher:
    """Trains one recipe in this process. `launch` returns the exit code; failures are raised as MilesError."""

    recipe: Recipe
    row: AlgorithmRow
    inputs: Inputs
    run_dir: Path
    resume: bool
    view: LiveView

    def __post_init__(self) -> None:
        self._resumed: Path | None = None  # the checkpoint that the run goes on from

    def launch(self) -> int:
        self._check()
        torch.set_num_threads(self.recipe.run.threads or 1)
        model = load_trained(self.recipe, self.row)
        if (answers := self.inputs.answers) is not None and self.row.scorer:
            set_padding(model, self.inputs.tokenizer, answers.last_tokens())
        if self.recipe.lora.rank is not None:
            target_paths(model, self.recipe.lora.targets)
        if not self.resume:
            begin_run_dir(self.run_dir, self.recipe)
        interrupts = Interrupts()
        with ExitStack() as stack:
            stack.enter_context(logs_to(self.run_dir / "logs" / "main.log", self.view.message))
            stack.enter_context(self.view)
            stack.enter_context(interrupts.active())
            keeper = stack.enter_context(self._keeper(model, interrupts))
            return self._train(keeper)

    def _check(self) -> None:
        """What can be known of the run directory and the machine before a model is loaded."""
        check_run_dir(self.run_dir, self.recipe, self.resume)
        for name in (FINAL, BEST):
            check_target(self.run_dir / name)
        if self.resume:
            with said(self.view.message):
                self._resumed = check_resumable(self.run_dir, self.inputs.data_hash)
        device_of(self.recipe)
        rehearse(self.recipe, self.row)

    def _train(self, keeper: RunKeeper) -> int:
        try:
            train(keeper.learner, keeper.buffer, self._rollouts.publisher, keeper)
        except Interrupted as interrupted:
            keeper.save_checkpoint()
            self.view.message(
                f"stopped by a signal; a checkpoint is in {self.run_dir / CHECKPOINTS}: continue with --resume"
            )
            return interrupted.exit_code
        except TrainingAborted as aborted:
            keeper.abort(aborted.metrics)
            raise
        except FAILED_OUTSIDE_OF_UPDATES:
            keeper.fail()
            raise
        return 0

    @contextmanager
    def _keeper(self, model: PreTrainedModel, interrupts: Interrupts) -> Iterator[RunKeeper]:
        """Put the parts together and bring them to the version that the run directory holds."""
        recipe, inputs = self.recipe, self.inputs
        start = describe(model)
        learner = Learner(model, recipe, device=device_of(recipe), total_steps=total_steps(recipe, len(inputs.train)))
        identity = self._identity(start)
        saved = -1 if self._resumed is None else restore(self._resumed, learner, identity)
        stream = PromptStream(
            len(inputs.train),
            recipe.run.seed,
            recipe.data.shuffle,
            recipe.algorithm.groups_per_step,
            recipe.data.epochs,
        )
        with ExitStack() as stack:
            self._rollouts = stack.enter_context(open_rollouts(recipe, inputs, model, learner, self.run_dir))
            self._told_slow = False
            episodes = self._episodes()
            lost = self.resume and restore_ledger(self.run_dir)
            ledger = Ledger(self.run_dir, self._settings(model), stream, identity, resume=self.resume)
            stack.callback(ledger.close)
            loop = stack.enter_context(Coroutines(interrupts))
            collect = functools.partial(self._collect, loop, stream, episodes)
            buffer = EmbeddedBuffer(ledger, collect=lambda: collect(buffer))
            recorder = Recorder(self.run_dir, (), recipe.log.samples_per_step)
            stack.callback(recorder.close)
            if self.resume:
                self._go_back(buffer, recorder, learner.version, "resample" if lost else "replay")
            for sink in open_sinks(recipe.log, self.run_dir, learner.version, recipe.model_dump(mode="json")):
                recorder.add_sink(sink)
            self._show_start(start, learner.version)
            if isinstance(episodes, Recorded):
                evaluate = functools.partial(held_out_metrics, learner, inputs.held_out, episodes)
            else:
                evaluate = functools.partial(self._evaluate, loop, episodes)
            yield RunKeeper(
                recipe,
                self.row,
                self.run_dir,
                learner,
                buffer,
                model,
                inputs.tokenizer,
                evaluate if len(inputs.held_out) else None,
                recorder,
                self.view,
                interrupts,
                Writer(self.run_dir / CHECKPOINTS, recipe.run.keep_checkpoints),
                identity,
                saved,
            )

    def _episodes(self) -> Episodes | Recorded:
        """Sampled by the run's engine and scored by its rewards, or read from the data."""
        inputs = self.inputs
        if inputs.answers is not None:
            return Recorded(inputs.answers)
        return Episodes(
            inputs.environment, self._rollouts.engine, inputs.rewards, inputs.sampling, inputs.renderer.text
        )

    def _go_back(self, buffer: EmbeddedBuffer, recorder: Recorder, version: int, mode: RewindMode) -> None:
        """Bring everything in the run directory to `version`, and say what is not as a reader would expect."""
        buffer.rewind(version, mode)
        recorder.rewind(version)
        write_config(self.run_dir, self.recipe)
        if version == 0:
            log.warning("%s has no checkpoint: the run starts again from the beginning", self.run_dir)
        if lost := lost_rows(self.run_dir, version):
            log.warning(lost)
        steps = self.recipe.algorithm.steps
        if steps is not None and steps < version:
            log.warning("algorithm.steps = %d, but the run stands at step %d: nothing is trained", steps, version)

    def _settings(self, model: PreTrainedModel) -> LedgerSettings:
        recipe = self.recipe
        return LedgerSettings(
            groups_per_step=recipe.algorithm.groups_per_step, max_staleness=recipe.buffer.max_staleness,
            max_attempts=recipe.buffer.max_attempts, max_dropped=recipe.rollout.max_dropped, keep=recipe.buffer.keep,
            max_refused=recipe.buffer.max_refused, min_free_bytes=recipe.buffer.min_free_mb << 20,
            group_size=self.row.samples_in_group(recipe.rollout.group_size),
            vocabulary=model.config.get_text_config().vocab_size,
        )  # fmt: skip

    def _identity(self, start: Mapping[str, Any]) -> dict[str, Any]:
        scorer = self.inputs.reward_model
        return {
            "recipe": fixed_hash(self.recipe),
            DATA: self.inputs.data_hash,
            "weights of model.name": start["weights_sha256"],
            **({"weights of reward.model": scorer.load(device_of(self.recipe))} if scorer is not None else {}),
        }

    def _collect(self, loop: Coroutines, stream: PromptStream, episodes: GroupMaker, buffer: EmbeddedBuffer) -> None:
        collector = Collector(buffer, stream, self.inputs.train, episodes, recipe=self.recipe, row=self.row)
        loop.run(collector.run())
        self._tell_slow()

    def _evaluate(self, loop: Coroutines, episodes: Episodes) -> tuple[Mapping[str, float], Evaluation]:
        evaluation = loop.run(run_evaluation(self.inputs.held_out, episodes, recipe=self.recipe))
        self._tell_slow()
        return evaluation_metrics(evaluation, self.inputs.rewards.full), evaluation

    def _tell_slow(self) -> None:
        reason = self._rollouts.slow_reason()
        if reason is not None and not self._told_slow:
            self._told_slow = True
            log.warning("%s is sampled from slowly, one prompt after another: %s", self.recipe.model.name, reason)

    def _show_start(self, start: Mapping[str, Any], version: int) -> None:
        recipe = self.recipe
        log.info("starts from %s", start)
        facts = {
            "model": f"{recipe.model.name}, {start['parameters'] / 1e6:.1f} M parameters, weights {start['weights_sha256'][:12]}",
            "data": "; ".join([f"{len(self.inputs.train)} rows of {self.inputs.train.source}", *self.inputs.notes]),
            "algorithm": f"{recipe.algorithm.name}, {work_of(recipe, self.row)}",
            "run": str(self.run_dir),
        }  # fmt: skip
        rows = read_rows(self.run_dir / METRICS_FILE).rows if self.resume else []
        self.view.start(facts, recipe.algorithm.steps, version, rows)
        self.view.preview(self.inputs.preview())


def load_trained(recipe: Recipe, row: AlgorithmRow) -> PreTrainedModel:
    """What the row trains: the causal language model of the recipe, or a scorer made of it. Raises ModelError."""
    load = load_scorer if row.scorer else load_model
    return load(recipe.model, seed=recipe.run.seed, device=device_of(recipe))


def held_out_metrics(
    learner: Learner, rows: Sequence[Mapping[str, Any]], recorded: Recorded
) -> tuple[Mapping[str, float], Evaluation]:
    """The keys of an eval row for recorded answers: `eval/loss`, `eval/pairs/accuracy`, ..."""
    found = learner.measure([recorded.read(index, index, row) for index, row in enumerate(rows)])
    metrics = {f"eval/{key.removesuffix('/total')}": value for key, value in found.items()}
    return {**metrics, "eval/rows": len(rows)}, Evaluation((), ())


def work_of(recipe: Recipe, row: AlgorithmRow) -> str:
    """What one step takes, in words."""
    groups = recipe.algorithm.groups_per_step
    if row.recorded:
        return f"{groups} {row.data}"
    return f"{groups} prompts x {recipe.rollout.group_size} samples"


def total_steps(recipe: Recipe, rows: int) -> int | None:
    """Steps of the run; with `data.epochs` what the rows are enough for, which drops may shorten."""
    if recipe.data.epochs is None:
        return recipe.algorithm.steps
    return math.ceil(rows * recipe.data.epochs / recipe.algorithm.groups_per_step)


def device_of(recipe: Recipe) -> torch.device:
    """The device of `run.device`. Raises ConfigError where a GPU is asked for and there is none."""
    found = torch.cuda.is_available()
    if recipe.run.device == "cuda" and not found:
        raise ConfigError("run.device = 'cuda', but this machine has no usable GPU: set it to 'auto' or 'cpu'")
    return torch.device("cuda" if recipe.run.device != "cpu" and found else "cpu")
