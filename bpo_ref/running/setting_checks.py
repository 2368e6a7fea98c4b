"""Checks of a run's settings: numbers out of range, and settings that contradict each other or mean something else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bpo_ref.config import ConfigError
from bpo_ref.sampling.driver import only_lockstep
from bpo_ref.sampling.env_source import labels_of, limits_of, needs_of
from bpo_ref.sampling.vllm import VllmEngine
from sandboxgym.arguments import parse_arguments

if TYPE_CHECKING:
    from bpo_ref.args import Args

KEYED = ("key", "value", "pooled")
"""Baselines that need the environment's ``progress_key``."""
BY_ENTROPY = ("entropy", "entropy-online", "lowest")
"""Schedules that need the entropy of a decision as soon as it is sampled."""
LEAST: dict[str, float] = {
    **dict.fromkeys(
        ("seed", "env_retries", "env_capture_every", "tiny_vocabulary", "lora_r", "history", "observation_tokens"), 0
    ),
    **dict.fromkeys(("entropy_skip", "threads", "sft_noise", "sft_observation_weight", "warmup", "weight_decay"), 0),
    **dict.fromkeys(("spacing", "step_weight_power", "roulette_below", "value_decay", "lam", "gae_lam"), 0),
    **dict.fromkeys(("invalid_penalty", "value_weight", "value_clip", "clip_low", "clip_high", "kl", "roulette"), 0),
    **dict.fromkeys(("env_workers", "env_timeout", "rollout_timeout", "server_retries", "staleness"), 0),
    "env_store_bandwidth": 0,
    **dict.fromkeys(("width", "points", "tis", "dynamic_sampling", "omega", "omega_gamma"), 0),
    **dict.fromkeys(("lookahead_least", "updates", "sft_steps", "budget", "mc_turns", "subsample_returns"), 0),
    **dict.fromkeys(("lora_alpha", "context", "max_new_tokens", "sft_episodes", "sft_batch", "micro_tokens"), 1),
    **dict.fromkeys(("prompts", "roots", "max_turns", "epochs", "minibatches", "mc_rollouts", "env_threads"), 1),
    **dict.fromkeys(("max_live", "eval_episodes", "eval_every", "save_every", "env_store_every"), 1),
}
"""Minimum of a setting."""
MOST: dict[str, float] = dict.fromkeys(
    ("sft_noise", "value_decay", "lam", "gae_lam", "gamma", "omega_gamma", "staleness", "server_memory"), 1
)
"""Maximum of a setting."""
POSITIVE = (
    "lr", "sft_lr", "value_lr", "max_grad_norm", "gamma", "temperature", "eval_temperature", "process_timeout",
    "server_timeout", "server_tolerance", "server_memory", "adam_eps",
)  # fmt: skip
"""Settings that must not be 0: nothing would be learned, or a division would fail."""


def check_ranges(args: Args) -> None:
    """Refuse numbers out of range and arguments that cannot be read; settings of None are left to the preset.

    Raises:
        ConfigError: the message names the setting.
    """
    for name in LEAST | MOST | dict.fromkeys(POSITIVE):
        value = getattr(args, name)
        if value is None:
            continue
        least, most = LEAST.get(name, 0.0), MOST.get(name, math.inf)
        if not least <= value <= most or math.isinf(value) or (name in POSITIVE and value == 0):
            bounds = "more than 0" if name in POSITIVE else f"{least:g} to {most:g}" if most < math.inf else None
            unbounded = f"at least {least:g}" if least else "0 or more"
            raise ConfigError(f"{name}: expected {bounds or unbounded}, found {value}")
    for name in ("env_kwargs", "eval_kwargs", "expert_kwargs"):
        try:
            parse_arguments(getattr(args, name))
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None
    if not all(0 <= beta < 1 for beta in args.betas):
        raise ConfigError(f"betas: expected two numbers from 0 to below 1, found {args.betas}")
    if args.dual_clip and not 1 < args.dual_clip < math.inf:
        raise ConfigError(f"dual_clip: expected 0, or more than the ratio on-policy, 1; found {args.dual_clip}")
    if args.sft_reward is not None and math.isnan(args.sft_reward):
        raise ConfigError(f"sft_reward: expected a number, found {args.sft_reward}")
    for name in ("env_workers", "env_timeout"):
        if args.envs == "local" and getattr(args, name):
            raise ConfigError(f"{name}: environments of this process have no workers; set envs to process or ray")
    if args.long_rows == "refuse" and args.context > args.micro_tokens:
        raise ConfigError(
            f"long_rows: rows of up to {args.context} tokens (context) may be needed, and {args.micro_tokens} are "
            "available (micro_tokens): set long_rows to split, raise micro_tokens or lower context"
        )
    if (args.backend == "vllm") != bool(args.server):
        raise ConfigError(
            f"server: expected addresses with backend=vllm alone, found {args.backend} with {args.server}"
        )
    if "colocate" in args.server and not args.colocated:
        raise ConfigError(f"server: expected addresses, or colocate alone, found {args.server}")
    if args.colocated and args.server_sleeps:
        raise ConfigError("server_sleeps: servers of server=colocate sleep where the GPU can; leave it out")
    if not args.colocated:
        for name, default in (("server_python", None), ("server_memory", 0.4)):
            if getattr(args, name) != default:
                raise ConfigError(f"{name}: expected it with server=colocate alone, found {args.server}")
    for name in ("server_tolerance", "server_weights"):
        if getattr(args, name) is not None and args.backend != "vllm":
            raise ConfigError(f"{name}: expected it with backend=vllm alone, found {args.backend}")
    if args.server_sleeps and not args.server:
        raise ConfigError(f"server_sleeps: expected it with backend=vllm alone, found {args.backend}")
    if args.server_sends == "nccl" and (not args.server or args.colocated):
        found = f"backend={args.backend}, server={args.server}"
        raise ConfigError(
            f"server_sends: nccl goes with backend=vllm and servers on other GPUs than the trainer's, found {found}"
        )
    if args.server_sends == "adapters":
        if not args.server or not args.lora_r:
            found = f"backend={args.backend}, lora_r={args.lora_r}"
            raise ConfigError(f"server_sends: adapters go with backend=vllm and lora_r, found {found}")
        if args.sft_steps and not args.init_from:
            raise ConfigError(
                "server_sends: adapters need servers that were started with the weights below them, which SFT changes: "
                "run it on its own (algo=sft), and start from its checkpoint (init_from)"
            )
    if len(set(args.server)) < len(args.server):
        raise ConfigError(f"server: expected each address once, found {args.server}")
    for url in () if args.colocated else args.server:
        try:
            VllmEngine(url)
        except ValueError as error:
            raise ConfigError(f"server: {error}") from None
    if args.env_store is not None and args.envs == "local":
        raise ConfigError("env_store: environments of this process have no workers; set envs to process or ray")
    for name, default in (("env_store_every", 1), ("env_store_bandwidth", 0.0)):
        if args.env_store is None and getattr(args, name) != default:
            raise ConfigError(f"{name}: there is no store of snapshots; set env_store, and envs to process or ray")
    for name in ("ray_address", "env_resources", "env_labels", "env_limits"):
        if getattr(args, name) not in (None, ()) and args.envs != "ray":
            raise ConfigError(f"{name}: expected it with envs=ray alone, found envs={args.envs}")
    for name, read in (("env_resources", needs_of), ("env_labels", labels_of), ("env_limits", limits_of)):
        try:
            read(getattr(args, name))
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None


def refuse_contradictions(args: Args, *, keyed: bool) -> None:
    """Raise `ConfigError` for settings that are impossible or would not compute what they say; see `resolved`."""
    width, points, roots = args.width or 0, args.points or 0.0, args.roots or 0
    forks = args.schedule not in ("none", "mc")

    def refuse(wrong: bool, field: str, message: str) -> None:
        if wrong:
            raise ConfigError(f"{field}: {message}")

    if forks:
        always, too_far = args.root_branch == "always", args.spacing >= args.context
        refuse(width < 2, "width", f"a branch node has at least 2 children (K >= 2), found width={width}")
        refuse(
            points <= 0, "points", f"schedule={args.schedule} needs at least one branch point, found points={points}"
        )
        refuse(always and points < 1, "points", f"a root that always branches is one already, found points={points}")
        refuse(too_far, "spacing", f"{args.spacing} tokens between branch points exceed the context of {args.context}")
        refuse(args.credit in ("gae", "mc"), "credit", f"{args.credit} goes without forks, found {args.schedule}")
    branched = f"found schedule={args.schedule}, roots={roots}"
    alone = f"{args.credit} is for two or more independent rollouts, {branched}"
    refuse(args.credit in ("group", "gigpo") and (forks or roots < 2), "credit", alone)
    refuse((args.credit == "mc") != (args.schedule == "mc"), "credit", f"mc goes with schedule=mc, {branched}")
    refuse(
        args.baseline != "none" and args.credit != "tree", "baseline",
        f"{args.baseline} goes with credit=tree, found credit={args.credit}",
    )  # fmt: skip
    for found, wrong in {
        f"credit={args.credit}": args.credit != "tree",
        f"baseline={args.baseline}": args.baseline == "critic",  # whose V̂ has seen the batch's states, not its keys
        f"advantage_norm={args.advantage_norm}": args.advantage_norm != "none",
        f"dynamic_sampling={args.dynamic_sampling}": args.dynamic_sampling > 0,  # selects by returns that include luck
        f"mask_truncated={args.mask_truncated}": args.mask_truncated,  # likewise
    }.items():
        expected = "credit=tree, V̂ of earlier batches and all that was sampled"
        refuse(wrong and args.lookahead, "lookahead", f"goes with {expected}, found {found}")
    in_lookahead, in_baseline = (args.network in (place, "both") for place in ("lookahead", "baseline"))
    refuse(in_lookahead and not args.lookahead, "network", f"{args.network} goes with lookahead")
    refuse(
        in_baseline and args.baseline not in ("value", "pooled"),
        "network", f"{args.network} goes with a baseline of value or pooled, found {args.baseline}",
    )  # fmt: skip
    fair = args.split_variance == "fair"
    refuse(
        fair and not (args.lookahead and args.schedule == "split"),
        "split_variance",
        "fair goes with lookahead and schedule=split",
    )
    by_progress = f"goes with a baseline of {', '.join(KEYED)}, found {args.baseline}"
    refuse(args.refusals and args.baseline not in KEYED, "refusals", by_progress)
    by_key = "baseline" if args.baseline in KEYED else "schedule" if args.schedule == "split" else "lookahead"
    refuse(
        args.keyed and not keyed, by_key,
        f"needs info['progress_key'], which {args.env_id} does not give",
    )  # fmt: skip
    refuse(
        roots == 1 and not forks and args.baseline == "none" and args.credit == "tree" and args.prompts < 2,
        "roots", "one rollout of one task has nothing to be compared with; set roots or prompts",
    )  # fmt: skip
    uneven = {  # settings that need the same number of independent rollouts for every task
        f"credit={args.credit}": args.credit != "tree",
        f"root_branch={args.root_branch}": args.root_branch == "free",
        f"roots={roots} and baseline={args.baseline}": roots < 2 + (args.baseline == "none"),
        f"aggregation={args.aggregation}": args.aggregation == "path",  # weights the paths of all tasks equally
        f"subsample_returns={args.subsample_returns}": args.subsample_returns > 0,
    }
    for found, wrong in uneven.items():
        refuse(wrong and args.allocation == "spread", "allocation", f"spread does not go with {found}")
    in_loss = args.kl_in == "loss"
    expected = "k2 or k3 in the loss, where the gradient of k1 is 0 on average" if in_loss else "k1 in the reward"
    refuse((args.kl_estimator == "k1") == in_loss, "kl_estimator", f"expected {expected}, found {args.kl_estimator}")
    refuse(0 < args.tis < 1, "tis", f"a cap below 1 would scale what was sampled as it should be, found {args.tis}")
    level = f"corrects tokens, so it goes with ratio=token, found {args.ratio}"
    refuse(args.tis > 0 and args.ratio != "token", "tis", level)
    whole = "episode goes with tis and credit=tree without lookahead"
    partly = not args.tis or args.credit != "tree" or args.lookahead
    found = f"{whole}, found tis={args.tis}, credit={args.credit}, lookahead={args.lookahead}"
    refuse(args.tis_level == "episode" and partly, "tis_level", found)
    stale = "an earlier policy samples, "
    refuse(
        args.staleness > 0 and not args.tis, "staleness", f"{stale}so the loss must be corrected; set tis, to 2, say"
    )
    for found, wrong in {
        "lookahead": args.lookahead,  # measures probabilities of what was not sampled, which must be the sampler's
        "schedule=value-oracle": args.schedule == "value-oracle",  # plays more rollouts, of the present policy
        f"backend=vllm and schedule={args.schedule}": args.backend == "vllm" and args.schedule in BY_ENTROPY,
        "server_sleeps": args.server_sleeps,
        "server=colocate": args.colocated,  # whose servers sleep while the policy learns
        f"server_sends={args.server_sends}": args.server_sends != "weights",  # servers are compared with them later
    }.items():
        refuse(args.staleness > 0 and wrong, "staleness", f"{stale}while the weights change; does not go with {found}")
    refuse(0 < args.dynamic_sampling < 1, "dynamic_sampling", f"expected 1 or more, found {args.dynamic_sampling}")
    refuse(
        args.dynamic_sampling > 0 and roots == 1 and not forks,
        "dynamic_sampling", f"one return of a task cannot differ from others, {branched}",
    )  # fmt: skip
    survival = args.roulette or 0.0
    refuse(survival != 1.0 and args.schedule != "split", "roulette", f"goes with schedule=split, {branched}")
    refuse(not 0 < survival <= 1, "roulette", f"expected a probability above 0, found {args.roulette}")
    refuse(roots < 1, "roots", f"expected at least 1, found {roots}")
    split = f"{args.minibatches} of {args.prompts} prompts: each needs a whole task"
    refuse((args.minibatches or 1) > args.prompts, "minibatches", split)
    pretrained = not args.model.startswith("tiny:") or args.init_from is not None
    refuse(args.lora_r > 0 and not pretrained, "lora_r", f"goes with a pretrained model, found model={args.model}")
    window = f"with history={args.history} every turn is a row, found "
    refuse(args.history > 0 and args.aggregation == "path", "aggregation", f"{window}{args.aggregation}")
    refuse(args.history > 0 and args.ratio == "sequence", "ratio", f"{window}{args.ratio}")
    refuse(args.history > 0 and forks and args.spacing > 0, "spacing", f"{window}{args.spacing} tokens; set it to 0")
    refuse(args.driver == "async" and bool(only_lockstep(args)), "driver", f"async is ruled out: {only_lockstep(args)}")
    too_long = args.max_new_tokens >= args.context
    refuse(too_long, "max_new_tokens", f"{args.max_new_tokens} do not fit the context of {args.context}")


def check_combinations(args: Args) -> None:
    """Refuse settings that would silently turn the named estimator into another one.

    Args:
        args: the settings with the preset filled in.

    Raises:
        ConfigError: two settings contradict each other; the message names one.
    """
    if args.subsample_returns and args.credit == "mc":
        raise ConfigError(
            "subsample_returns: does not go with credit=mc: it would draw from the rollouts for values, too"
        )
    if args.aggregation == "path" and (args.roulette or 1.0) < 1.0:
        raise ConfigError(
            f"aggregation: path counts all paths alike, those that survived roulette={args.roulette} must count more"
        )


def check_info(args: Args, first: Callable[[], Mapping[str, Any]]) -> None:
    """Refuse settings for which the environment's ``info`` lacks a key.

    Args:
        args: the settings with the preset filled in.
        first: plays the beginning of an episode and gives its ``info``; called only for settings that need a key.

    Raises:
        ConfigError: the message names the setting and the key.
    """
    if args.credit == "gigpo" and not first().get("state_hash"):
        raise ConfigError(f"credit: gigpo needs info['state_hash'], which {args.env_id} does not give")
    if args.lookahead and not first().get("admissible_commands"):
        raise ConfigError(f"lookahead: needs info['admissible_commands'], which {args.env_id} does not give")
    if args.network != "none" and first().get("features") is None:
        raise ConfigError(
            f"network: needs info['features'], which {args.env_id} does not give; some "
            "environments do with env_kwargs features=true"
        )


def check_processes(args: Args, found: int, *, wanted: int, sharded: bool) -> None:
    """Check the number of processes: one that was meant to be several would train on a part of the batch.

    Args:
        args: the settings with the preset filled in.
        found: processes that run.
        wanted: processes that the launcher wanted.
        sharded: whether training shards the weights over them.

    Raises:
        ConfigError: there are too few, or the batch cannot be split between them.
    """
    if sharded and args.staleness:
        raise ConfigError("staleness: needs whole weights on every process, found sharded ones (FSDP2, ZeRO-3)")
    if wanted != found:
        raise ConfigError(f"the launcher wanted {wanted} processes, accelerate runs {found}")
    if args.prompts % ((args.minibatches or 1) * wanted):
        raise ConfigError(
            f"prompts: {args.prompts} cannot be split evenly into {args.minibatches} minibatches for {wanted} processes"
        )
    if args.sft_batch < wanted:
        raise ConfigError(f"sft_batch: {args.sft_batch} episodes for {wanted} processes")


def with_whole_rows(args: Args) -> Args:
    """Settings for weights that are sharded over processes, which all make the same passes: long rows are not split.

    Raises:
        ConfigError: rows may be too long for one pass.
    """
    if args.long_rows == "split" and args.context > args.micro_tokens:
        raise ConfigError(
            f"long_rows: rows of up to {args.context} tokens (context) cannot be split into parts of "
            f"{args.micro_tokens} (micro_tokens) where weights are sharded (FSDP2, ZeRO-3): raise micro_tokens "
            "or lower context; with long_rows=whole each is one pass"
        )
    return replace(args, long_rows="whole") if args.long_rows == "split" else args
