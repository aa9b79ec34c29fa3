"""ppo by roles on one base equals ppo with four separate copies to 1e-5; the reference is the untouched base, bit for bit."""

from __future__ import annotations

import copy
import sys
from typing import Any

from common import ROOT, check, finish

STEPS, TOLERANCE = 5, 1e-5
NUMBERS = ("loss/total", "loss/value", "grad_norm", "grad_norm/critic", "kl/ref", "value/mean")


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "learn"))
    import groups
    import torch

    from miles.learn.learner import Learner
    from miles.learn.tiny import tiny_model

    recipe = groups.recipe(
        algorithm__name="ppo", algorithm__beta=0.05, algorithm__kl_place="reward", algorithm__groups_per_step=6,
        lora__rank=8, learner__learning_rate=1e-3, learner__minibatches=2,
    )  # fmt: skip
    made = groups.measured(tiny_model("llama"), groups.draw(count=6, size=4), noise=0.3)
    roles, copies = Learner(tiny_model("llama"), recipe), separate(Learner(tiny_model("llama"), recipe))
    plain = Learner(tiny_model("llama"), groups.recipe(algorithm__groups_per_step=6))
    base = plain.logprobs(plain.pack(made))
    equal, rows = [], []
    for _ in range(STEPS):
        pair = []
        for learner in (roles, copies):
            step = learner.pack(made)
            signal = learner.score(step)
            equal.append(torch.equal(signal.ref_logprobs, base))
            pair.append(learner.update(step, signal))
        rows.append(pair)
    worst = max(
        abs(a[key] - b[key]) / max(abs(other[key]) for _, other in rows if key in other)
        for a, b in rows
        for key in NUMBERS
        if key in b
    )
    check(f"largest relative difference of {', '.join(NUMBERS)} in {STEPS} steps", f"{worst:.1e}", worst <= TOLERANCE)
    check(
        "scores of the reference that equal the untouched base bit for bit", f"{sum(equal)} of {len(equal)}", all(equal)
    )
    moved = (roles.logprobs(roles.pack(made)) - base).abs().max().item()
    check("the policy itself has moved, in nat", f"{moved:.3f}", moved > 0.01)
    finish()


def separate(learner: Any) -> Any:
    """The learner with a whole copy of the model for each role, with that role's adapter on for ever."""
    from miles.learn.adapters import adapter_parameters, layers_of
    from miles.learn.optim import Optimizer

    roles = learner.roles
    roots = {role: copy.deepcopy(roles.root) for role in roles.names}
    for role, root in roots.items():
        next(iter(layers_of(root).values())).switch.adapter = None if role == "ref" else role

    def logprobs(role: str, batch: Any, with_entropy: bool = True) -> Any:
        return roots[role](batch, learner.compute, None, with_entropy)

    def values(role: str, batch: Any) -> Any:
        return roots[role](batch, learner.compute, role, False)[0]

    roles.logprobs, roles.values = logprobs, values
    head = dict(roots["critic"].heads["critic"].named_parameters("value_head"))
    trained = {
        "actor": adapter_parameters(roots["actor"], "actor"),
        "critic": {**adapter_parameters(roots["critic"], "critic"), **head},
    }
    learner.optimizer = Optimizer(trained["actor"], learner.recipe.learner, learner.optimizer.schedule)
    learner.critic_optimizer = Optimizer(trained["critic"], learner.recipe.learner, learner.critic_optimizer.schedule)
    return learner


if __name__ == "__main__":
    main()
