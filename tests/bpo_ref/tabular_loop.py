"""The trainer's own loop with the policy of an `MDP` in the network's place: one update is a sample of its gradient.

Rollout, rescoring, credit, minibatches, loss and optimizer are the trainer's; the text, the sampler and the processes
around them are not. A row of tokens is state, action, state, action, …
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from tabular import MDP, TabularEnv, TabularPolicy
from torch import Tensor, nn

from bpo_ref.args import Args, resolved
from bpo_ref.baselines import Memory
from bpo_ref.distributed.replicated import Replicated
from bpo_ref.eval import Score
from bpo_ref.learning.models import ActorCritic
from bpo_ref.sampling.generate import Generation
from bpo_ref.sampling.policy import Turn
from bpo_ref.session import TrainingSession
from bpo_ref.train import Trainer
from sandboxgym.tree import Action, Context, Envs

LR = 1e-3
"""Learning rate, so small that the second mini-batch of an update still meets almost the policy that has sampled it."""


class SeveralTasks(TabularEnv):
    """An `MDP` that gives its number of tasks."""

    @property
    def num_tasks(self) -> int:
        return len(self.mdp.starts)


class Table(nn.Module):
    """The smallest causal model: a table of the actions' logits by the previous token."""

    device = torch.device("cpu")

    def __init__(self, logits: np.ndarray) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits, dtype=torch.float32))
        self.config = SimpleNamespace(hidden_size=len(logits))

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, *, input_ids: Tensor, output_hidden_states: bool = False, **_: Any) -> SimpleNamespace:
        known = input_ids.clamp(max=len(self.logits) - 1)  # an end is never acted in
        states = nn.functional.one_hot(known, len(self.logits)).float()
        return SimpleNamespace(logits=self.logits[known], hidden_states=(states,))


class TokenPolicy(TabularPolicy):
    """Policy of an `MDP` with the trainer's data of a turn; ``silent``: without the log-probabilities."""

    prefilled = reused = None

    def __init__(self, mdp: MDP, *, silent: bool) -> None:
        super().__init__(mdp)
        self._logps = np.log(mdp.policy)
        self._silent = silent

    def _act(self, context: Context) -> Action:
        action, state = super()._act(context), int(context.observation)
        turn = Turn(context.memory, [state], [action.text], truncated=False)
        logps = [] if self._silent else [float(self._logps[state, action.text])]
        data = Generation(turn.sampled, logps, [] if self._silent else [action.entropy], truncated=False)
        return replace(action, position=len(turn.ids()) - 1, memory=turn, data=data)


class LoopSession(TrainingSession):
    """Session with given weights and optimizer, without text, files and evaluations."""

    def __init__(
        self, args: Args, mdp: MDP, *, reference: np.ndarray | None, values: np.ndarray | None, silent: bool
    ) -> None:
        self.args = args = resolved(replace(args, journal="off"))
        self.accelerator = Accelerator(cpu=True)
        self.strategy = Replicated(self.accelerator, dtype=torch.float32, clip=args.max_grad_norm)
        self.mdp, self.silent = mdp, silent
        self.out = Path(args.out)
        self.envs = Envs(lambda: SeveralTasks(mdp))
        policy = Table(mdp.logits)
        self.strategy.network = self.strategy.model = ActorCritic(policy) if args.critic else policy
        if values is not None and args.critic:
            with torch.no_grad():
                self.model.value_head.weight[0] = torch.tensor(values)
        self.reference = Table(reference) if reference is not None else None
        groups = [{"params": list(policy.parameters()), "scale": 1.0}]
        if args.critic:
            groups.append({"params": list(self.model.value_head.parameters()), "scale": args.value_lr / args.lr})
        self.strategy.optimizer = torch.optim.SGD(groups, lr=args.lr)
        self.memory = Memory.of(args)
        self.stage, self.step, self._interrupted = "rl", 0, False
        self.counters = {"returns": 0, "env_steps": 0, "tokens": 0, "seconds": 0.0}
        self.scores: dict[str, Score] = {}
        self.log: Any = SimpleNamespace(scalars=lambda *_: None)
        self.start = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.changes: list[dict[str, np.ndarray]] = []

    def record(self) -> None:
        now = self.model.state_dict()
        lr = self.args.lr
        self.changes.append({name: ((now[name] - start) / lr).numpy() for name, start in self.start.items()})

    def set_lr(self, lr: float) -> None:
        super().set_lr(lr)
        if self.step:
            self.record()
        self.model.load_state_dict(self.start)

    def player(self, temperature: float) -> Any:
        return TokenPolicy(self.mdp, silent=self.silent)

    def evaluate(self, name: str) -> Score:
        return SimpleNamespace(rate=0.0)  # type: ignore[return-value]

    def maybe_save(self, every: int, *, last: bool = False) -> None:
        pass

    def done(self) -> int:
        return self.step


class LoopTrainer(Trainer):
    """`Trainer` with given weights and optimizer; every update begins at the same weights.

    Args:
        args: not resolved.
        mdp: to be learnt.
        reference: logits of the reference policy.
        values: what the value head begins with, by state.
        silent: whether the sampler leaves log-probabilities to the trainer.
    """

    session: LoopSession

    def __init__(
        self,
        args: Args,
        mdp: MDP,
        *,
        reference: np.ndarray | None = None,
        values: np.ndarray | None = None,
        silent: bool = False,
    ) -> None:
        super().__init__(args, lambda args: LoopSession(args, mdp, reference=reference, values=values, silent=silent))

    def sampled(self) -> dict[str, np.ndarray]:
        """Train; returns the changes of every parameter by learning rate and update, [updates, …]."""
        self._reinforce()
        self.session.envs.close()
        self.session.record()
        return {name: np.stack([change[name] for change in self.session.changes]) for name in self.session.start}


def penalised(mdp: MDP, reference: np.ndarray, kl: float) -> MDP:
    """Make the MDP whose rewards are less the divergence from a reference, at the present policy."""
    log_ratio = np.log(mdp.policy) - np.log(replace(mdp, logits=reference).policy)
    return replace(mdp, rewards=mdp.rewards - kl * log_ratio[:, :, None])
