"""What turns the rows of a recipe into groups in a process that only collects."""

from __future__ import annotations

from miles.errors import ConfigError
from miles.rollout.episode import Episodes
from miles.run.copies import follow
from miles.run.local import device_of
from miles.run.meeting import Meeting
from miles.run.own import Making
from miles.run.prepare import prepare
from miles.run.recipes import Resolved


def make_groups(resolved: Resolved, meeting: Meeting) -> Making:
    """With the engine of the recipe, which needs no learner in this process. Raises MilesError."""
    recipe = resolved.recipe
    inputs, device = prepare(recipe, resolved.row), device_of(recipe)
    if meeting.weights is None:
        raise ConfigError(f'engine.kind = "{recipe.engine.kind}" cannot be collected with in a process of its own yet')
    if inputs.reward_model is not None:
        inputs.reward_model.load(device)
    engine = follow(recipe, inputs, meeting.weights, device)
    episodes = Episodes(inputs.environment, engine, inputs.rewards, inputs.sampling, inputs.renderer.text)
    return Making(inputs.train, inputs.data_hash, episodes, inputs.config.get_text_config().vocab_size)
