"""Settings of a run: their meaning, and the values that a preset of ``--algo`` gives them.

`running/setting_checks.py` refuses those that are out of range or contradict each other.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from bpo_ref.config import ConfigError, parse
from bpo_ref.presets import DEFAULTS, PRESETS
from bpo_ref.running.environments import refuse_before_loading
from bpo_ref.running.setting_checks import KEYED, check_combinations, check_ranges, refuse_contradictions
from bpo_ref.sampling.backends import BackendName
from bpo_ref.sampling.driver import DriverName
from sandboxgym.adapters.prompts import PromptName
from sandboxgym.registration import registered_id

Algo = Literal[
    "sft", "ppo", "grpo", "gigpo", "rloo", "rloo-turn", "rloo-key", "rloo-value", "rloo-pooled", "vineppo",
    "bpo-paper", "bpo-sibling", "bpo-tree", "bpo-key", "bpo-forest", "bpo-split", "bpo",
]  # fmt: skip
ScheduleName = Literal[
    "none",
    "entropy",
    "entropy-online",
    "random",
    "spaced",
    "lowest",
    "root",
    "value-oracle",
    "explained",
    "split",
    "mc",
]
Credit = Literal["paper", "sibling", "tree", "group", "gigpo", "gae", "mc"]
Baseline = Literal["none", "turn", "key", "value", "pooled", "critic"]
Network = Literal["none", "lookahead", "baseline", "both"]


@dataclass(frozen=True)
class Args:
    """Settings of a run. A setting of None is filled in by ``algo`` (see `presets.PRESETS`)."""

    algo: Algo = "bpo"
    """The algorithm: a preset (`presets.py`) of the settings that are None; each can be overridden. ``bpo`` is
    ``bpo-split`` with the pooled baseline and roulette where the environment gives a ``progress_key``, else
    ``bpo-forest``."""
    out: str = "runs/{env}/{algo}-seed{seed}"
    """Folder for logs, checkpoints, samples, plots and results: one for each run. ``{env}``, ``{algo}`` and ``{seed}``
    stand for the environment's name, the algorithm and the seed. A folder that holds a run is refused."""
    seed: int = 0
    """Seed of all random draws: weights, demonstrations, prompts, samples."""
    resume: bool = False
    """Continue from the last checkpoint in ``out``, exactly as if never interrupted."""
    resume_if_saved: bool = False
    """Resume if ``out`` has a checkpoint, else start anew, also where a run was ended before it saved. For jobs that a
    queue starts again."""
    overwrite: bool = False
    """Remove the files of a run that ``out`` holds, and start anew."""
    init_from: str | None = None
    """Checkpoint folder with the initial weights; SFT is then skipped."""

    # Environment
    env_id: str = "sandboxgym/ALFWorld-v0"
    """Id of an environment with snapshots, text observations and text actions."""
    env_kwargs: tuple[str, ...] = ()
    """Arguments of the training environment, as name=value."""
    eval_kwargs: tuple[str, ...] = ()
    """Arguments of the evaluation environment, as name=value."""
    envs: Literal["local", "process", "ray"] = "local"
    """Place of the environments: in this process, in worker processes, or on the nodes of a Ray cluster."""
    env_workers: int = 0
    """Workers of each training process, for ``process`` and ``ray``. 0: one per core."""
    env_timeout: float | None = None
    """Seconds after which a step in a worker, or ten times as many after which a reset, counts as lost. 0: no limit.
    None: none for ``process``; for ``ray``, whose machines may freeze, a minute more than the environment's own limits
    let a step take by default, and at least ten minutes for a reset."""
    ray_address: str | None = None
    """Address of the Ray cluster, such as ``ray://host:10001``. None: ``$RAY_ADDRESS``, else one of this machine."""
    env_resources: tuple[str, ...] = ()
    """Needs of each worker on the cluster, as name=value: CPU (0.1), memory in bytes, and resources that were given to
    the nodes which may hold it (sandbox=1)."""
    env_labels: tuple[str, ...] = ()
    """Labels of the cluster's nodes that may hold workers, as name=value: v, !v, in(v,w) or !in(v,w)."""
    env_limits: tuple[str, ...] = ()
    """Limits of each node of the cluster, as name=value: environments, creations_per_second, snapshot_bytes."""
    env_store: str | None = None
    """Directory or URL that all workers reach: snapshots stay in their worker, with durable copies there, made in the
    background. For sandboxes. None: every snapshot is sent as bytes."""
    env_store_every: int = 1
    """Steps of an environment between snapshots that are written to ``env_store``. More: less is written, and more
    actions are repeated after a loss."""
    env_store_bandwidth: float = 0.0
    """Bytes per second that each worker writes to ``env_store`` in the background. 0: no limit."""
    env_threads: int = 1
    """Environments that step at the same time. More than 1 helps with sandboxes and browsers."""
    env_overlap: bool = False
    """Sample for one half of the tasks while the environments of the other half step. Helps when steps are slow."""
    env_retries: int = 2
    """Number of environment failures after which a path and its forks are dropped; until then a new environment takes
    over from the path's last snapshot. 0: the first failure ends the run."""
    env_capture_every: int = 0
    """Steps of a path after which it is captured although nothing will fork there, so that fewer actions are repeated
    if its environment is lost; 0: never. For sandboxes whose commands take long."""
    rollout_timeout: float = 0.0
    """Seconds after which the paths of an update that have not ended are dropped with their forks; 0: none. For when
    something is wrong: it favours what is quick."""
    max_live: int = 1024
    """Maximum number of paths that a process samples at the same time. Limits memory, changes nothing else."""
    max_turns: int = 24
    """Step limit of an episode (the original ALFWorld's is 50, the paper's 40)."""

    # Policy
    model: str = "tiny:0.2M"
    """``tiny:SIZE`` (built in code, see ``tiny.py``), or a folder or Hub name of a transformers causal model."""
    tiny_vocabulary: int = 0
    """Vocabulary size of a tiny policy's byte-level tokenizer, trained on the expert episodes; it can encode any text.
    0: a word-level tokenizer that only knows the words of these episodes (ALFWorld has few)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype, also that of frozen weights; trained weights stay in float32."""
    lora_r: int = 0
    """LoRA rank; 0: train all weights. With LoRA the reference policy is the model without its adapters and takes no
    extra memory."""
    lora_alpha: int = 32
    """LoRA alpha: the adapters' output is scaled by this divided by the rank."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass instead of storing them."""
    prompt: PromptName = "plain"
    """``plain``: a message is the observation, an answer the action. ``react``: a system prompt for the environment,
    and answers of thoughts between <think> tags and one action between <action> tags; others are invalid actions.
    ``choice``: the possible actions are numbered, and a number is an answer."""
    list_actions: bool = False
    """List the admissible actions in every message, if the environment gives them."""
    history: int = 0
    """Number of past turns in each message; every turn is then a conversation (and a training row) of its own. 0: one
    conversation grows with the episode."""
    system: str | None = None
    """System prompt that replaces the one of ``prompt``."""
    context: int = 768
    """Maximum tokens per episode, or with ``history`` per turn; longer ones are truncated."""
    observation_tokens: int = 0
    """Maximum tokens per observation; the middle of longer ones is left out. 0: no limit."""
    max_new_tokens: int = 12
    """Maximum tokens per action."""
    entropy_skip: int | None = None
    """Tokens at the start of every answer; the entropy of an action is that of the token after them. Default: the
    prompt's tag."""
    temperature: float = 1.0
    """Sampling temperature in training; the policy is the tempered distribution."""
    backend: BackendName = "hf"
    """Sampling backend: ``hf`` is this package's loop; ``transformers-continuous`` has a paged cache, for CUDA;
    ``vllm`` asks servers (``server``)."""
    server: tuple[str, ...] = ()
    """Addresses of vLLM servers, such as ``http://node7:8000``; conversations of one task go to the same one. Or
    ``colocate``: every process starts one on its own GPU, which sleeps while the policy learns, and ends it."""
    server_python: str | None = None
    """Python that has vLLM, for ``server=colocate``. Default: ``$SANDBOXGYM_VLLM``, else the trainer's own."""
    server_memory: float = 0.4
    """Share of a GPU's memory that a server of ``server=colocate`` takes while it is awake."""
    server_timeout: float = 300.0
    """Seconds in which a server has to answer; loading weights may take ten times as long."""
    server_retries: int = 6
    """Number of times that a request is repeated, after 1, 2, 4, ... seconds, by the next server where there are
    several."""
    server_tolerance: float | None = None
    """Largest mean difference, in nats, of the log-probabilities of a server and of the trainer after each update.
    Default: 0.001 with float32, 0.05 with bfloat16."""
    server_sends: Literal["weights", "adapters", "nccl"] = "weights"
    """Kind of the update that servers get: all weights, by a folder; or the adapters of ``lora_r`` alone, to servers
    that were started with the weights below them; or all weights over NCCL, from GPU to GPU (never run on GPUs)."""
    server_sleeps: bool = False
    """Have the servers free the memory of their GPUs while the policy learns: for servers on the trainer's GPUs that
    somebody else has started."""
    server_weights: str | None = None
    """Folder for the weights, which the servers see under the same path. Default: ``served`` in ``out``."""
    driver: DriverName = "auto"
    """Order in which paths advance, in training and evaluation: in ``lockstep``, a turn of all of them at once; or
    ``async``, each by itself, so that none waits for the slowest (with servers only). ``auto``: ``async`` with servers,
    unless the schedule rules it out, which the log then says. The trees are the same."""
    threads: int = 1
    """CPU threads per process (0: PyTorch's choice)."""
    process_timeout: float = 24.0
    """Timeout in hours for processes that wait for each other; those that finish their tasks wait for the slowest."""

    # SFT on expert episodes
    sft_steps: int = 0
    """Optimizer steps of SFT; 0 skips it."""
    sft_data: str | None = None
    """Chats for SFT instead of the environment's own expert, one JSON object ``{"messages": [{"role", "content"}, …]}``
    per line."""
    sft_episodes: int = 4000
    """Number of expert episodes to collect."""
    expert_kwargs: tuple[str, ...] = ()
    """Further arguments of the environment's expert, as name=value."""
    sft_reward: float | None = None
    """Minimum total reward of the expert episodes that are used; None: use the successful ones."""
    sft_noise: float = 0.2
    """Probability of replacing an expert action by another one. Replaced actions are masked from the loss; the recovery
    from them is learned."""
    sft_batch: int = 16
    """Episodes per step, over all processes."""
    sft_lr: float = 3e-3
    """Learning rate of SFT, with a linear warm-up and a cosine decay."""
    sft_observation_weight: float = 0.2
    """Weight of the loss on observation tokens, from which small models learn to copy names."""

    # Reinforcement learning
    updates: int = 50
    """Number of updates; with a ``budget`` it only scales ``eval_every`` and ``warmup``."""
    match: Literal["returns", "env-steps", "tokens"] = "returns"
    """Unit of ``budget``: episodes played to an end, environment steps, or generated tokens; all are logged."""
    budget: int = 0
    """Train until this much is spent, whatever the number of updates, to compare algorithms at equal budgets."""
    prompts: int = 16
    """Tasks per update, over all processes."""
    dynamic_sampling: float = 0.0
    """F: sample F times as many tasks and train on those whose returns differ, at most ``prompts`` of them (0: off).
    Biased towards tasks of medium difficulty. Budgets and totals count everything sampled."""
    lr: float = 5e-4
    """Learning rate of AdamW."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up; linear and cosine end at 0."""
    warmup: int = 0
    """Number of updates with linear warm-up of the learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's beta1 and beta2."""
    adam_eps: float = 1e-8
    """AdamW's epsilon. Weights whose gradients are far smaller hardly move; with 0 noise alone moves them by ``lr``."""
    weight_decay: float = 0.0
    """AdamW's weight decay, on the policy's matrices only: not on norms, biases and the value head."""
    max_grad_norm: float = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it."""
    epochs: int | None = None
    """Passes over the rollouts of an update. Default: 1; 4 for ``ppo``."""
    minibatches: int | None = None
    """Optimizer steps per pass; each takes whole tasks, shuffled anew for every pass. Default: 1; for ``ppo`` the
    greatest common divisor of 4 and ``prompts``."""
    micro_tokens: int = 16384
    """Maximum tokens per forward and backward pass; gradients of larger batches are accumulated."""
    long_rows: Literal["split", "whole", "refuse"] = "split"
    """Rows longer than ``micro_tokens``: ``split`` computes a packed tree of them in parts of so many tokens, with the
    same gradient (`learning/parts.py`); ``whole`` each row in one pass, as always with ``pack=flat``; ``refuse``
    refuses a ``context`` that allows them, as ``split`` does with weights sharded over processes."""
    pack: Literal["tree", "flat"] = "tree"
    """``tree``: prefixes that paths share are computed once; ``flat``: every path is a padded row of its own."""

    # Tree and credit
    width: int | None = None
    """K: children of a branch node."""
    points: float | None = None
    """M: maximum number of branch points between the root and a leaf. A fraction is rounded up or down at random per
    task."""
    roots: int | None = None
    """W: independent rollouts per task. Default: N = 1 + M (K - 1) without forks, else set by ``root_branch``."""
    allocation: Literal["equal", "spread"] = "equal"
    """Independent rollouts: W per task, or W on average with more for tasks whose returns varied in earlier batches
    (``spread``)."""
    schedule: ScheduleName | None = None
    """Rule for branch points. ``entropy`` (the paper's), ``lowest``, ``random``, ``spaced``, ``root`` and
    ``value-oracle`` rank the steps of a finished path; the others decide before the action: ``entropy-online``,
    ``explained`` (at the depth that explains 30 % of the variance), ``split`` (by V̂). ``mc`` forks to estimate values
    only."""
    forks: Literal["backbone", "roots", "all"] | None = None
    """Paths that fork: the first independent rollout, every independent rollout, or every path including forks."""
    root_branch: Literal["always", "free", "never"] | None = None
    """The root as one of the M branch points: always, if the schedule chooses it, or never."""
    spacing: int = 8
    """Minimum distance between branch points in tokens of context (the paper: 64); unused by ``split`` and
    ``explained``."""
    fill: Literal["none", "widen"] = "none"
    """Use of branch points that a short path leaves unspent: none, or more siblings at those chosen."""
    subsample_returns: int = 0
    """Train on a random subset of this many paths per task (0: all); advantages still use all of them."""
    credit: Credit | None = None
    """Advantage estimator: ``paper`` (Eq. 7, 8), ``sibling`` (Eq. 7 along the whole path), ``tree`` (backed-up values),
    ``group`` (GRPO), ``gigpo`` (GRPO's plus the step's advantage among all visits of its state), ``gae`` (PPO), ``mc``
    (VinePPO: differences of Monte-Carlo values from restored states)."""
    baseline: Baseline | None = None
    """State value from other data than the siblings: none, the mean of other rollouts at this turn or at this progress
    (``key``), a running mean by progress over earlier batches (``value``), the task's other rollouts at this progress
    shrunk towards that mean (``pooled``), or a learned value head (``critic``)."""
    refusals: bool = False
    """Baselines by progress (``key``, ``value``, ``pooled``) also distinguish how many answers in a row the environment
    refused: 0, 1, 2 or more."""
    fork_baseline: Literal["siblings", "shrunk", "parent"] | None = None
    """Baseline below a fork: the siblings' mean, a mixture of it and ``baseline`` by analysis of variance, or
    ``baseline``."""
    step_weight_power: float | None = None
    """p: a step below f forks of width K has the weight K^(-p f). 1 is unbiased, 0 weights all steps of a tree
    equally."""
    roulette: float | None = None
    """q of ``split``: a path whose V̂ falls to ``roulette_below`` continues with this probability and then counts
    1/q."""
    roulette_below: float = 0.02
    """V̂ at which ``roulette`` starts; no path is stopped until states with such values have turned out to be worth at
    most twice it."""
    lookahead: bool = False
    """Try the listed actions of every state one step ahead in forks, and subtract the luck of the decisions after an
    action from its return (`lookahead.py`). Unbiased; generates no tokens. Needs credit ``tree`` and an environment
    that lists its actions and gives a ``progress_key``."""
    lookahead_least: float = 0.0
    """Actions whose Q̂ differs by at most this from that of an action without effect are treated as such, which saves
    computing their probability. The estimate stays unbiased, but its variance rises a little."""
    network: Network = "none"
    """A small network on the environment's ``info["features"]``, trained on earlier batches, in place of the running
    means: in look-ahead, in the ``pooled`` or ``value`` baseline, or in both (`learning/value_network.py`)."""
    split_variance: Literal["returns", "fair"] = "returns"
    """Quantity that ``split`` uses: the variance of returns, or of returns less the luck of later decisions
    (look-ahead)."""
    value_decay: float = 0.9
    """Fraction of the running means (``value``, ``split``, ``allocation``) that each update keeps."""
    mc_rollouts: int = 4
    """Rollouts from a restored state to estimate its value; not trained on. VinePPO's count towards the budget, the
    oracle's do not."""
    mc_turns: int = 0
    """VinePPO: largest number of turns per path at which the state is valued, drawn from ``max_turns`` beforehand;
    those after the end of the episode, and the first turn, are not valued. 0: all."""
    lam: float = 0.95
    """λ of Eq. 8, in agent steps."""
    gamma: float = 1.0
    """Discount per turn."""
    invalid_penalty: float = 0.0
    """Subtracted from the reward of an action that the environment does not understand (0.1 is common on ALFWorld)."""
    group_std: bool = True
    """Divide ``group`` and ``gigpo`` advantages by the group's standard deviation."""
    omega: float = 1.0
    """ω of ``gigpo``: weight of the step advantage, computed among the visits of its state."""
    omega_gamma: float = 0.95
    """Discount of ``gigpo``'s returns from a step on; returns of whole episodes use ``gamma``."""
    advantage_norm: Literal["none", "batch"] | None = None
    """Scale advantages to mean 0 and variance 1 over the tokens of the batch."""

    # Value head (``credit=gae`` or ``baseline=critic``)
    gae_steps: Literal["turn", "token"] = "turn"
    """Step of ``gae``: a turn of the episode, or a token."""
    gae_lam: float | None = None
    """λ of ``gae``, per step. Default: 0.95 for turns; 1 for tokens, where 0.95 would forget all beyond about 60."""
    value_lr: float = 1e-3
    """Learning rate of the value head; the rest of the network uses the policy's."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    value_clip: float = 0.2
    """Clipping range of PPO's value loss, in units of the return (0: off)."""

    # Loss
    ratio: Literal["token", "step", "sequence"] = "token"
    """Level of the importance ratio: per token, per action, or per path (geometric mean over its actions)."""
    clip_low: float = 0.2
    """Lower clipping range: the ratio is clipped at 1 minus this."""
    clip_high: float = 0.2
    """Upper clipping range: the ratio is clipped at 1 plus this."""
    dual_clip: float = 0.0
    """Dual clipping: where the advantage is negative, the ratio is also clipped above this (0: off)."""
    tis: float = 0.0
    """C of truncated importance sampling: the loss of a token is multiplied by min(π_old / π_sampler, C), with π_old
    computed by the trainer and π_sampler reported by the backend (0: off). Has no effect where the two are equal."""
    tis_level: Literal["token", "episode"] = "token"
    """Probabilities that ``tis`` corrects: of a token given what came before it; or of episodes, whose return then
    counts by the ratios of all actions, each capped at C. ``episode`` needs credit ``tree``."""
    staleness: int = 0
    """1: sample the next update's rollouts while this one is learned, with the weights before it. Needs ``tis``. Only
    ``vllm`` samples at the same time; other backends do one after the other, with the same result."""
    mask_truncated: bool = False
    """Mask from the loss answers that ``max_new_tokens`` cut, and actions after which every episode was cut by the
    context or the turn limit. Advantages and baselines still use them."""
    kl: float | None = None
    """β: weight of the KL divergence to the policy that reinforcement learning started from. Default: 0; for
    ``bpo-paper`` 0.05, as printed."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Schulman's estimators of the KL divergence, with r the reference's probability over the policy's: k1 = -log r,
    k2 = (log r)² / 2, k3 = r - 1 - log r. Default: k3 in the loss (k2 can replace it), k1 in the reward. Both have the
    gradient of KL(π‖ref): k3 is multiplied by the importance ratio, without which it would be that of KL(ref‖π)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL divergence: in the loss, or in the reward as the log-ratio of each action (k1)."""
    aggregation: Literal["token", "path", "constant"] = "token"
    """Mean over all tokens of all processes, mean over paths of token means, or sum over tokens / tasks."""

    # Bookkeeping
    eval_episodes: int = 256
    """Size of the fixed evaluation set: the first tasks of the evaluation library, one episode each."""
    eval_untrained: bool = True
    """Evaluate before SFT too; turn it off where random commands make an environment wait."""
    eval_every: int = 10
    """Updates between evaluations."""
    eval_temperature: float = 1.0
    """Sampling temperature in evaluation."""
    save_every: int = 10
    """Updates (and 20 times as many SFT steps) between checkpoints."""
    journal: Literal["exact", "quick", "off"] = "exact"
    """Keep what environments answered since the last checkpoint, so that ``resume`` repeats no step of a killed run.
    ``exact`` samples the actions again: all numbers are those of an undisturbed run. ``quick`` takes them from the
    journal, too: the same actions, but later ones may be rounded otherwise. There is none with ``lookahead`` or
    ``staleness``."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Trackers of accelerate that receive every logged number (wandb, mlflow, trackio, …)."""

    @property
    def critic(self) -> bool:
        """True if the policy has a value head."""
        return self.credit == "gae" or self.baseline == "critic"

    @property
    def colocated(self) -> bool:
        """True if the run starts its servers itself."""
        return self.server == ("colocate",)

    @property
    def keyed(self) -> bool:
        """True if the environment's ``progress_key`` is used."""
        return self.baseline in KEYED or self.schedule == "split" or self.lookahead


def parse_args(argv: Sequence[str] | None = None) -> Args:
    """Read the settings: defaults, then the YAML file of ``--config``, then the command line; raises `ConfigError`."""
    args = parse(Args, argv)
    return replace(args, env_id=registered_id(args.env_id))


def command_line(argv: Sequence[str] | None = None) -> Args:
    """`parse_args` for programs: refuse whatever is wrong for every environment before the slow start of a run.

    Raises:
        SystemExit: the settings are wrong, with the reason; or ``--help`` was asked for.
    """
    try:
        args = parse_args(argv)
        refusals = {str(error) for error in (_refused(args, keyed=keyed) for keyed in (True, False))}
        if len(refusals) == 1 and "None" not in refusals:  # otherwise it depends on the environment's progress_key
            resolved(args)
        refuse_before_loading(args)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
    if os.environ.get("RANK", "0") == "0":
        print("loading PyTorch, model and environments ...", file=sys.stderr, flush=True)  # seconds of silence else
    return args


def _refused(args: Args, *, keyed: bool) -> ConfigError | None:
    try:
        resolved(args, keyed=keyed)
    except ConfigError as error:
        return error
    return None


def resolved(args: Args, *, keyed: bool = True) -> Args:
    """Fill in the preset of ``algo`` and check the settings.

    Args:
        args: the settings as given.
        keyed: whether the environment gives a ``progress_key``.

    Raises:
        ConfigError: a setting is invalid; the message names it.
    """
    check_ranges(args)
    preset = DEFAULTS | PRESETS["bpo-forest" if args.algo == "bpo" and not keyed else args.algo]
    given = {name: value for name, value in asdict(args).items() if value is not None}
    settings = preset | given
    preset["fork_baseline"] = preset["fork_baseline"] or ("siblings" if settings["baseline"] == "none" else "parent")
    preset["roulette"] = preset["roulette"] if settings["schedule"] == "split" else 1.0
    preset["kl_estimator"] = "k3" if args.kl_in == "loss" else "k1"
    preset["gae_lam"] = 0.95 if args.gae_steps == "turn" else 1.0
    preset["minibatches"] = math.gcd(preset["minibatches"], args.prompts)
    args = replace(args, **{name: value for name, value in preset.items() if name not in given})
    width, points = args.width or 0, args.points or 0.0
    forks = args.schedule not in ("none", "mc")
    n = 1 + points * (width - 1)
    if args.roots is None:
        if not forks and n != round(n):
            raise ConfigError(f"roots: N = 1 + points (width - 1) = {n} is not a whole number; set roots")
        args = replace(args, roots=(width if args.root_branch == "always" else 1) if forks else round(n))
    refuse_contradictions(args, keyed=keyed)
    check_combinations(args)
    return args
