"""The local launcher: engine, collector, buffer and learner in one process, which may be one rank of several."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from miles.algo import AlgorithmRow
from miles.algo.rehearsal import rehearse
from miles.buffer.snapshot import SNAPSHOT_NAME
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
from miles.learn.channel import Channel
from miles.learn.export import check_target
from miles.learn.learner import Learner
from miles.learn.load import describe, in_parts, load_model, open_model
from miles.learn.saved import check_saved, files_hash, saved_files
from miles.learn.scorer import load_scorer, set_padding
from miles.learn.shards import Stored
from miles.learn.writer import Writer
from miles.loop import train
from miles.observe.live import LiveView
from miles.observe.recorder import Recorder
from miles.observe.rows import METRICS_FILE, read_rows
from miles.observe.sinks import open_sinks
from miles.protocols import ExperienceSink, Publisher
from miles.rollout.evaluate import Evaluation, evaluation_metrics
from miles.rollout.recorded import Recorded
from miles.run.buffer import open_buffer
from miles.run.collecting import Collecting
from miles.run.coroutines import Coroutines
from miles.run.crew import Crew, Duty
from miles.run.duties import collect_round, collect_share, evaluate_share, export_part, judge_groups, save_part
from miles.run.engines import open_rollouts
from miles.run.interrupts import Interrupted, Interrupts
from miles.run.join import check_alike, packages
from miles.run.joining import OpenBuffer, RunFacts, join_buffer, ledger_settings
from miles.run.keeper import BEST, FINAL, RunKeeper
from miles.run.led import LedKeeper, LedSource
from miles.run.logs import logs_to, said
from miles.run.meeting import Meeting
from miles.run.place import Place
from miles.run.prepare import Inputs
from miles.run.resume import CHECKPOINTS, check_resumable, lost_rows, newest_snapshot, restore
from miles.run.rundir import DATA, RECIPE, begin_run_dir, check_run_dir, fixed_hash, write_config
from miles.types import Group

log = logging.getLogger(__name__)

FAILED_OUTSIDE_OF_UPDATES = (RewardError, EpisodeError, EngineError, NothingToTrain, PoisonedData)
"""What collecting and evaluating raise: the learner stands between two steps then."""


@dataclass
class LocalLauncher:
    """Trains one recipe in this process, alone or as one rank. `launch` returns the exit code; failures are raised."""

    recipe: Recipe
    row: AlgorithmRow
    inputs: Inputs
    run_dir: Path
    resume: bool
    view: LiveView
    crew: Crew
    device: torch.device
    log: Path | None  # None: standard error, which whoever started this rank keeps
    meeting: Meeting | None = None  # with the collectors, which are other processes. None: this one collects
    _unjudged: Sequence[Group] = ()  # rank 0's, while all ranks score them

    def launch(self) -> int:
        resumed = self.crew.agree(self._check)
        torch.set_num_threads(self.recipe.run.threads or 1)
        model, weights = self._model()
        if (answers := self.inputs.answers) is not None and self.row.scorer:
            set_padding(model, self.inputs.tokenizer, answers.last_tokens())
        if self.recipe.lora.rank is not None:
            check_saved(model, self.recipe)
        start = describe(model, weights)
        identity = self._identity(start)
        check_alike(self.crew, {**packages(), **identity})
        if not self.resume:
            self.crew.together(lambda: begin_run_dir(self.run_dir, self.recipe))
        interrupts = Interrupts(held=self.crew.size > 1)
        with ExitStack() as stack:
            stack.enter_context(logs_to(self.log, self.view.message))
            stack.enter_context(self.view)
            stack.enter_context(interrupts.active())
            return self._train(*stack.enter_context(self._parts(model, weights, start, identity, resumed, interrupts)))

    def _model(self) -> tuple[PreTrainedModel, Mapping[str, Stored] | None]:
        """The model; on several ranks without memory, and where its weights stand, wherever they can be read in parts."""
        whole = self.row.scorer or self.recipe.lora.base_bits is not None
        if self.crew.size > 1 and in_parts(self.recipe.model) and not whole:
            return open_model(self.recipe.model)
        return load_trained(self.recipe, self.row, self.device), None

    def _check(self) -> str:
        """What can be known before a model is loaded; the checkpoint that the run goes on from, where there is one."""
        found = None
        check_run_dir(self.run_dir, self.recipe, self.resume)
        for name in (FINAL, BEST):
            check_target(self.run_dir / name)
        if self.resume:
            with said(self.view.message):
                found = check_resumable(self.run_dir, self.inputs.data_hash, locked=self.meeting is not None)
        rehearse(self.recipe, self.row)
        return "" if found is None else str(found)

    def _train(self, learner: Learner, source: LedSource, publisher: Publisher, keeper: LedKeeper) -> int:
        try:
            train(learner, source, publisher, keeper)
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
    def _parts(
        self,
        model: PreTrainedModel,
        weights: Mapping[str, Stored] | None,
        start: Mapping[str, Any],
        identity: dict[str, Any],
        resumed: str,
        interrupts: Interrupts,
    ) -> Iterator[tuple[Learner, LedSource, Publisher, LedKeeper]]:
        """What every rank has, and on rank 0 what only one may have, at the version that the run directory holds."""
        recipe, inputs, crew = self.recipe, self.inputs, self.crew
        total = total_steps(recipe, len(inputs.train))
        learner = Learner(model, recipe, device=self.device, total_steps=total, weights=weights)
        saved = restore(Path(resumed), learner, identity, crew.channel.rank) if resumed else -1
        writer = Writer(self.run_dir / CHECKPOINTS, recipe.run.keep_checkpoints, Channel.open())
        with ExitStack() as stack:
            rollouts = stack.enter_context(open_rollouts(recipe, inputs, model, learner, self.run_dir, self._weights))
            loop = stack.enter_context(Coroutines(interrupts))
            collecting = Collecting(recipe, self.row, inputs, rollouts, learner.roles, loop)
            buffer, keeper = None, None
            if crew.leads:
                buffer = stack.enter_context(self._buffer(model, collecting, identity, interrupts))
            crew.take_up(self._duties(learner, writer, collecting, buffer, identity))
            if buffer is not None:
                keeper = stack.enter_context(
                    self._keeper(learner, buffer, collecting, writer, interrupts, start, saved)
                )
            source = LedSource(crew, None if buffer is None else buffer.source)
            yield learner, source, rollouts.publisher, LedKeeper(crew, keeper, interrupts)

    def _duties(
        self, learner: Learner, writer: Writer, collecting: Collecting, buffer: OpenBuffer | None,
        identity: dict[str, Any],
    ) -> Mapping[str, Duty]:  # fmt: skip
        channel = self.crew.channel
        recipe = self.recipe.model_dump(mode="json")

        def save(beside: bool) -> Path | None:
            files = {} if buffer is None else {SNAPSHOT_NAME: buffer.source.snapshot()}
            return save_part(learner, writer, identity, files, beside)

        return {
            "collect": lambda leases: collect_share(leases, channel, collecting.collect),
            "evaluate": lambda: evaluate_share(len(self.inputs.held_out), channel, collecting.evaluate),
            "judge": lambda: judge_groups(learner, self._unjudged, channel),
            "measure": lambda: held_out_metrics(learner, self.inputs.held_out, collecting.recorded),
            "save": save,
            "export": lambda name: export_part(learner, self.inputs.tokenizer, self.run_dir / name, recipe, channel),
        }

    def _buffer(
        self, model: PreTrainedModel, collecting: Collecting, identity: dict[str, Any], interrupts: Interrupts
    ) -> AbstractContextManager[OpenBuffer]:
        def collect(sink: ExperienceSink) -> None:
            if self._all_collect:
                collect_round(sink, self.crew, self.recipe, collecting.run)
            else:
                collecting.collect(sink)

        size, vocabulary = (
            self.row.samples_in_group(self.recipe.rollout.group_size),
            model.config.get_text_config().vocab_size,
        )
        facts = RunFacts(ledger_settings(self.recipe, size, vocabulary), collecting.stream, identity)
        if self.meeting is not None:
            snapshot = newest_snapshot(self.run_dir) if self.resume else None
            return join_buffer(self.meeting, facts, interrupts.check, snapshot, resume=self.resume)
        return open_buffer(self.recipe.buffer, self.run_dir, facts, collecting.run, collect, resume=self.resume)

    @property
    def _weights(self) -> Path | None:
        return None if self.meeting is None else self.meeting.weights

    @property
    def _all_collect(self) -> bool:
        """Servers are asked by rank 0 alone; an engine of each rank's own samples that rank's share."""
        return self.crew.size > 1 and self.recipe.engine.kind == "inprocess"

    @contextmanager
    def _keeper(
        self, learner: Learner, buffer: OpenBuffer, collecting: Collecting, writer: Writer, interrupts: Interrupts,
        start: Mapping[str, Any], saved: int,
    ) -> Iterator[RunKeeper]:  # fmt: skip
        recipe = self.recipe
        with closing(Recorder(self.run_dir, (), recipe.log.samples_per_step)) as recorder:
            if self.resume:
                self._go_back(buffer, recorder, learner.version)
            for sink in open_sinks(recipe.log, self.run_dir, learner.version, recipe.model_dump(mode="json")):
                recorder.add_sink(sink)
            self._show_start(start, learner.version)
            yield RunKeeper(
                recipe,
                self.row,
                self.run_dir,
                learner,
                buffer.source,
                lambda beside: self.crew.call("save", beside=beside),
                lambda name: self.crew.call("export", name=name),
                partial(self._evaluate, collecting, learner.judges) if len(self.inputs.held_out) else None,
                recorder,
                self.view,
                interrupts,
                writer,
                _writes_beside(recipe, learner),
                saved,
                buffer.end,
            )

    def _evaluate(self, collecting: Collecting, judges: bool) -> tuple[Mapping[str, float], Evaluation]:
        if self.inputs.answers is not None:
            return self.crew.call("measure"), Evaluation((), ())
        everything = range(len(self.inputs.held_out))
        evaluation = self.crew.call("evaluate") if self._all_collect else collecting.evaluate(everything)
        if judges:
            evaluation = self._judged(evaluation)
        return evaluation_metrics(evaluation, self.inputs.rewards.full), evaluation

    def _judged(self, evaluation: Evaluation) -> Evaluation:
        """With the scores of the learner's reward model, which all ranks make together."""
        self._unjudged = (*evaluation.sampled, *evaluation.greedy)
        groups, count = self.crew.call("judge"), len(evaluation.sampled)
        return Evaluation(tuple(groups[:count]), tuple(groups[count:]))

    def _go_back(self, buffer: OpenBuffer, recorder: Recorder, version: int) -> None:
        """Bring everything in the run directory to `version`, and say what is not as a reader would expect."""
        buffer.source.rewind(version, buffer.rewind)
        recorder.rewind(version)
        write_config(self.run_dir, self.recipe)
        if version == 0 and self.meeting is None:
            log.warning("%s has no checkpoint: the run starts again from the beginning", self.run_dir)
        if lost := lost_rows(self.run_dir, version):
            log.warning(lost)
        steps = self.recipe.algorithm.steps
        if steps is not None and steps < version:
            log.warning("algorithm.steps = %d, but the run stands at step %d: nothing is trained", steps, version)

    def _identity(self, start: Mapping[str, Any]) -> dict[str, Any]:
        scorer = self.inputs.reward_model
        return {
            RECIPE: fixed_hash(self.recipe),
            DATA: self.inputs.data_hash,
            "weights of model.name": start["weights_sha256"],
            **{f"weights of {key}": files_hash(files) for key, files in saved_files(self.recipe).items()},
            **({"weights of reward.model": scorer.load(self.device)} if scorer is not None else {}),
        }

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


def _writes_beside(recipe: Recipe, learner: Learner) -> bool:
    """Where all weights live in the memory that a copy of them would take, the copy costs more than the wait."""
    choice = recipe.run.checkpoint_async
    small = learner.device.type != "cpu" or recipe.lora.rank is not None
    return small if choice == "auto" else choice == "on"


def load_trained(recipe: Recipe, row: AlgorithmRow, device: torch.device) -> PreTrainedModel:
    """What the row trains: the causal language model of the recipe, or a scorer made of it. Raises ModelError."""
    load = load_scorer if row.scorer else load_model
    return load(recipe.model, seed=recipe.run.seed, device=device)


def held_out_metrics(learner: Learner, rows: Sequence[Mapping[str, Any]], recorded: Recorded) -> Mapping[str, float]:
    """The keys of an eval row for recorded answers: `eval/loss`, `eval/pairs/accuracy`, ..."""
    found = learner.measure([recorded.read(index, index, row) for index, row in enumerate(rows)])
    metrics = {f"eval/{key.removesuffix('/total')}": value for key, value in found.items()}
    return {**metrics, "eval/rows": len(rows)}


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


def device_of(recipe: Recipe, place: Place | None = None) -> torch.device:
    """The device of `run.device`, for a rank its own. Raises ConfigError where there are not enough GPUs."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if recipe.run.device == "cuda" and not found:
        raise ConfigError("run.device = 'cuda', but this machine has no usable GPU: set it to 'auto' or 'cpu'")
    if recipe.run.device == "cpu" or not found:
        return torch.device("cpu")
    if place is None:
        return torch.device("cuda")
    if place.local_size > found:
        raise ConfigError(
            f"{place.local_size} ranks on this machine, but it has {found} usable GPUs: start fewer ranks here (NNODES spreads "
            "them over machines), or set run.device to 'cpu'"
        )
    return torch.device("cuda", place.local)
