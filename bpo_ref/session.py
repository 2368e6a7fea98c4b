"""State of a run, independent of the algorithm: processes, environments, the network, checkpoints, evaluation.

All randomness is keyed by (seed, step), so an interrupted run continues exactly as if it had not been interrupted.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object, patch_environment

from bpo_ref.args import Args, resolved
from bpo_ref.baselines import Memory
from bpo_ref.config import ConfigError
from bpo_ref.distributed import chosen
from bpo_ref.eval import Score, evaluate
from bpo_ref.experiments.gpu_memory import Layout, shortage
from bpo_ref.learning import packing
from bpo_ref.learning.checkpoint import load_checkpoint, save_checkpoint
from bpo_ref.learning.initial_models import InitialModels, adamw
from bpo_ref.learning.models import (
    ActorCritic,
    CausalLM,
    WithoutAdapter,
    eos_ids,
    lowered_twin,
    policy_of,
    refresh,
    settle_cpu,
)
from bpo_ref.lookahead import check_prompt
from bpo_ref.run_log import RunLog, Stage, described_failures, tracking, write_report
from bpo_ref.running import folder, journals, run_processes, servers
from bpo_ref.running.console import StageProgress, header, model_line, say, say_from_signal
from bpo_ref.running.environments import first_info, gives_key, opened
from bpo_ref.running.launcher import stop_with_launcher
from bpo_ref.running.resuming import MAY_CHANGE, check_settings
from bpo_ref.running.setting_checks import BY_ENTROPY, check_info, check_processes, with_whole_rows
from bpo_ref.sampling.backends import make_backend
from bpo_ref.sampling.chat_format import ChatFormat
from bpo_ref.sampling.driver import by_itself, driver_line
from bpo_ref.sampling.engine import EngineError
from bpo_ref.sampling.masks import VERDICTS
from bpo_ref.sampling.policy import AsyncChatPolicy, ChatPolicy, collect_demonstrations, read_demonstrations
from sandboxgym.adapters.prompts import make_prompt
from sandboxgym.arguments import parse_arguments
from sandboxgym.sandbox.base import SandboxUnavailable
from sandboxgym.system.atomic import write_atomic
from sandboxgym.tree import Failure
from sandboxgym.tree.envs import described
from sandboxgym.tree.journal import Journal
from sandboxgym.workers.env_host import FleetError, WorkerDied

Item = TypeVar("Item")

SAME_SIGNAL_SECONDS = 1.0
"""Seconds within which a second SIGINT counts as the first: launchers forward the one that the terminal sent."""


class Interrupted(Exception):
    """A signal stopped the run, and its state is saved.

    Args:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_SHOW_WHERE = "--env-retries 0 shows where"


class TrainingFailed(Exception):
    """The run cannot continue as it is; the message gives the reason and a remedy."""


class TrainingSession:
    """State of a run: its step, what it has spent, and its scores."""

    lower_once: bool | None = None
    """True if sampling uses a copy of the weights in the compute dtype, cast once after each optimizer step rather than
    at every token. None: on CUDA only, where casting dominates the time per token."""

    lr = 0.0
    """Learning rate of the current step."""
    stopped_by = 0
    """Number of the signal that ended the run early; 0: none."""
    behind: dict[str, Any] | None = None
    """With ``staleness``: the weights and the statistics that sample the next update's rollouts, for checkpoints."""
    _lock: IO[str] | None = None
    _servers: servers.Servers | None = None

    def __init__(self, args: Args) -> None:
        given = args = folder.named(args)
        with patch_environment(accelerate_use_deepspeed="false"):  # `distributed.zero3` makes the engine
            self.accelerator = Accelerator(
                cpu=not torch.cuda.is_available(),
                kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=args.process_timeout))],
                **tracking(args),
            )
        settle_cpu(args.threads)
        self.out = Path(args.out)
        run_processes.all_refuse(self.accelerator, lambda: folder.refusal(args))
        self.envs = opened(args, "env_kwargs")
        try:
            self.eval_envs = opened(args, "eval_kwargs")
        except BaseException:
            self.envs.close()
            raise
        try:
            self._set_up(given, args)
        except BaseException:
            self._let_go()
            raise

    def _set_up(self, given: Args, args: Args) -> None:
        """Read or make the state of the run, once there are environments."""
        try:
            keyed = gives_key(self.envs)
        except (ConfigError, SandboxUnavailable, FleetError, WorkerDied, TimeoutError):
            raise  # with a sentence
        except Exception as error:  # environments raise any type of error
            if not args.env_retries:
                raise
            raise TrainingFailed(f"{args.env_id} cannot be reset: {described(error)} ({_SHOW_WHERE})") from error
        self.args = args = resolved(args, keyed=keyed)
        check_info(args, partial(first_info, self.envs))
        self.strategy = chosen(self.accelerator, dtype=getattr(torch, args.dtype), clip=args.max_grad_norm)
        self.check_processes()
        if self.strategy.sharded:
            self.args = args = with_whole_rows(args)
        self.out.mkdir(parents=True, exist_ok=True)
        run_processes.check_shared(self.out, self.accelerator, self.gather)
        self._take_out()
        args = self.args
        self.counters = {"returns": 0, "env_steps": 0, "tokens": 0, "seconds": 0.0}
        self.scores: dict[str, Score] = {}
        self.stage: Stage = "sft" if args.sft_steps and not args.init_from else "rl"
        self.step = 0
        self._twin: CausalLM | None = None
        self._interrupted = 0
        self.saved_at = ""

        saved = self._saved()
        if saved is not None:
            self.stage = saved["stage"]
        if self.accelerator.is_main_process:
            folder.write_settings(self.out, given, args, processes=self.accelerator.num_processes)
        resumed = f"{saved['stage']} step {saved['step']}" if saved is not None else ""
        device, count = run_processes.device_name(self.accelerator), self.accelerator.num_processes
        self.say(header(args, device=device, processes=count, resumed=resumed))
        if line := driver_line(args):
            self.say(line)
        self.prompt = make_prompt(
            args.prompt, args.env_id, system=args.system, list_actions=args.list_actions, history=args.history
        )
        self.demonstrations = self._load_demonstrations()
        self._models = InitialModels(args, self.accelerator.device, self.strategy.sharded, self.demonstrations)
        model, self.tokenizer = self._models.trained(self.stage, resuming=saved is not None)
        self.chat = ChatFormat(
            self.tokenizer,
            system=self.prompt.system,
            observation_tokens=args.observation_tokens,
            stop_ids=eos_ids(model),
        )
        if args.lookahead:
            check_prompt(self.prompt, self.chat)
        self._check_memory(model)
        if args.backend == "vllm":
            self._servers = servers.reached(
                args,
                model,
                self.tokenizer,
                self.chat,
                self.accelerator,
                self.gather,
                sharded=self.strategy.sharded,
            )
        whole = ActorCritic(model) if args.critic else model
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in whole.parameters()]
        if saved is not None and args.critic:
            whole.value_head.load_state_dict(saved["value_head"])
        self.strategy.place(whole, self.adamw)
        self._check_packing()
        self.restore(saved)
        self.reference = self._build_reference() if args.kl and self.stage == "rl" else None
        self.log = RunLog(args, self.stage, self.step, self.accelerator, resumed=saved is not None)
        self.say(model_line(args, sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)))

    # State.

    def state(self) -> dict[str, Any]:
        """Checkpoint content except the policy's weights, with the statistics for schedules and baselines.

        All processes have to call it.
        """
        return {
            "args": json.loads(json.dumps(asdict(self.args))),
            "stage": self.stage,
            "step": self.step,
            "counters": self.counters,
            "scores": {name: asdict(score) for name, score in self.scores.items()},
            "optimizer": self.strategy.optimizer_state(),
            "value_head": self.strategy.value_head() if self.args.critic else None,
            "sharded": self.strategy.sharded,
            "memory": self.memory.state(),
            "behind": self.behind,
        }

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Continue from a saved state."""
        self.memory = Memory.of(self.args, saved and saved["memory"])
        if saved is not None:
            self.strategy.load_optimizer_state(saved["optimizer"])
            self.step, self.counters = saved["step"], saved["counters"]
            self.saved_at = f"{self.stage} step {self.step}"
            self.scores = {name: Score(**score) for name, score in saved["scores"].items()}
            self.behind = saved.get("behind")

    def _saved(self) -> dict[str, Any] | None:
        checkpoint = self.out / "checkpoint"
        if not self.args.resume:
            return None
        saved = load_checkpoint(checkpoint)
        check_settings(saved, self.args, sharded=self.strategy.sharded, checkpoint=checkpoint)
        return saved

    def maybe_save(self, every: int, *, last: bool = False) -> None:
        """Save every ``every`` steps, at the end, and when a process was asked to stop, which then stops the run.

        Raises:
            Interrupted: a process was asked to stop.
        """
        stop = self.sum(float(self._interrupted > 0)) > 0
        if stop or last or self.step % every == 0:
            self.save(self.out / "checkpoint")
        if stop:
            number = max(self.gather([self._interrupted]))
            if self.accelerator.is_main_process:
                folder.note_stopped(self.out, signal.Signals(number).name, self.saved_at)
            self.accelerator.wait_for_everyone()  # one that ends may end the others: that is how launchers are set up
            raise Interrupted(number)

    def save(self, folder: Path, *, policy: CausalLM | None = None) -> None:
        """Save a checkpoint with the weights of ``policy``, or the current ones."""
        state = self.state()
        weights = self.strategy.whole(self.policy) if policy is None else None
        if self.accelerator.is_main_process:
            try:
                save_checkpoint(folder, policy or self.policy, self.tokenizer, state, weights=weights)
            except OSError as error:
                raise TrainingFailed(f"out: {folder} cannot be written ({described(error)})") from error
            if folder.name == "checkpoint" and self.stage == "rl":  # before the others continue, and open the next ones
                journals.forget(self.out, before=self.step)
        if folder.name == "checkpoint":
            self.saved_at = f"{self.stage} step {self.step}"
        self.accelerator.wait_for_everyone()

    @contextmanager
    def journal(self, seed: Sequence[int]) -> Iterator[Journal | None]:
        """Context with the journal of this process's rollouts of an update, which a resumed run continues; None: off.

        Raises:
            CheckpointError: there is one with other settings.
        """
        args = self.args
        if args.journal == "off" or args.lookahead or args.staleness:
            yield None
            return
        settings = journals.settings_of(args, may_change=MAY_CHANGE)
        head = {"settings": settings, "weights": journals.weights_of(self.policy)}
        part = self.accelerator.process_index
        with closing(journals.opened(self.out, head, seed, part=part, recall=args.journal == "quick")) as journal:
            yield journal

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn failures into messages that say how to continue.

        Raises:
            TrainingFailed: the run cannot continue; also if memory ran out.
        """
        try:
            yield
        except (TrainingFailed, SandboxUnavailable, torch.OutOfMemoryError, RuntimeError) as error:
            full = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if not full and not isinstance(error, (TrainingFailed, SandboxUnavailable, FleetError, EngineError)):
                raise
            advice = "smaller --micro-tokens, --gradient-checkpointing True or fewer --prompts need less"
            what = f"out of memory in {self.stage} step {self.step + 1}: {advice}" if full else str(error)
            raise TrainingFailed(f"{what}; {self.kept()}") from error

    def kept(self) -> str:
        """Sentence about the saved part of the run, and how to continue it."""
        if not self.saved_at:
            return "nothing was saved before"
        return f"what was learned up to {self.saved_at} is in {self.out / 'checkpoint'} (--resume continues from there)"

    def catch_signals(self) -> None:
        """Finish the step, save and stop on SIGINT or SIGTERM; stop at once on a second SIGINT."""
        first = 0.0

        def interrupt(number: int, _: object) -> None:
            nonlocal first
            if not self._interrupted:
                self._interrupted, first = number, time.monotonic()
                if self.accelerator.is_main_process:
                    say_from_signal("stopping once this step is done and saved; Ctrl-C again stops at once")
            elif number == signal.SIGINT and time.monotonic() - first > SAME_SIGNAL_SECONDS:
                raise KeyboardInterrupt

        stop_with_launcher()
        signal.signal(signal.SIGTERM, interrupt)
        signal.signal(signal.SIGINT, interrupt)

    def close(self) -> None:
        """Close environments and logs."""
        self.log.close()
        self._let_go()

    def _let_go(self) -> None:
        self.envs.close()
        self.eval_envs.close()
        if self._servers is not None:
            self._servers.close()
            if self.accelerator.is_main_process:
                folder.remove_published(self.out)
        if self._lock is not None:
            self._lock.close()

    def leave(self) -> None:
        """Leave the other processes, once all have ended their run.

        PyTorch ends its communication threads at exit in no certain order; now and then a process that still has some
        is aborted there ("terminate called without an active exception"), after a run that succeeded.
        """
        self.accelerator.state.destroy_process_group()

    # The network and its initial weights.

    @property
    def policy(self) -> CausalLM:
        """The causal model, without wrappers and value head."""
        return policy_of(self.network)

    @property
    def network(self) -> Any:
        """The bare model, with its value head if it has one; if sharded, whole only within `gathered`."""
        return self.strategy.network

    @property
    def model(self) -> Any:
        """The network as wrapped for all processes: the module that is trained."""
        return self.strategy.model

    def _check_packing(self) -> None:
        """Check packing where the model trains: it was tested on the CPU, and attention may differ here."""
        if self.args.pack == "tree":
            with self.strategy.gathered():
                packing.check(self.policy)

    def _check_memory(self, model: CausalLM) -> None:
        """Refuse a GPU that cannot even hold the weights, their gradients and the optimizer's state."""
        if self.accelerator.device.type == "cuda":
            available = torch.cuda.get_device_properties(self.accelerator.device).total_memory
            layout: Layout = "fsdp2" if self.strategy.sharded else "ddp"
            gpus, weights = self.accelerator.num_processes, sum(parameter.numel() for parameter in model.parameters())
            known: dict[str, Any] = {"layout": layout, "gpus": gpus, "available": available, "weights": weights}
            if told := shortage(self.args, model.config, **known):
                raise ConfigError(told)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which each process may sample and run any number of forward passes; see `Strategy.gathered`.

        Raises:
            EngineError: a server should sleep when all processes have left it, and does not.
        """
        asked = self.reference is not None and self.args.kl_in == "reward"
        with self.strategy.gathered(*([self.reference] if asked else [])):
            yield
        if self._servers is not None:
            self._servers.left()

    def enter_rl(self) -> None:
        """Make the SFT policy the initial policy and the reference, with its adapters merged."""
        self.stage, self.step = "rl", 0
        whole = self.network
        if self.args.lora_r:
            weights = self.strategy.whole(self.policy)
            if self.accelerator.is_main_process:
                self.policy.save_pretrained(self.out / "adapter", state_dict=weights)
                self.tokenizer.save_pretrained(self.out / "adapter")
            self.accelerator.wait_for_everyone()
            main = self.accelerator.is_main_process  # merges on the CPU, in fp32; the others read the result
            self.save(self.out / "sft", policy=self._models.merged() if main else self.policy)
            policy = self._models.adapted(self.stage, self._models.initial(self.stage, self.args.dtype)[0])
            self.accelerator.free_memory()  # accelerate keeps references to what it prepared
            if self.args.critic:
                whole.policy = policy
            self.strategy.place(whole if self.args.critic else policy, self.adamw)
        else:
            self.strategy.restart(self.adamw)
            self.save(self.out / "sft")
        self.save(self.out / "checkpoint")
        self.reference = self._build_reference() if self.args.kl else None

    def _build_reference(self) -> CausalLM:
        """The initial policy of reinforcement learning, frozen: the model without its adapters, or a copy."""
        if self.args.lora_r:
            return WithoutAdapter(self.policy)
        model, _ = self._models.initial(self.stage, self.args.dtype)
        model = model.to(self.accelerator.device).eval().requires_grad_(False)
        if self.args.pack == "tree":
            packing.enable(model)
        return self.strategy.frozen(model)

    def adamw(self, model: CausalLM) -> torch.optim.AdamW:
        """Optimizer of a model's trained weights."""
        return adamw(model, self.args)

    def _load_demonstrations(self) -> list[dict[str, Any]]:
        """Expert episodes, collected once and kept in ``out``, for SFT and the tokenizer's vocabulary."""
        args = self.args
        if not (args.sft_steps or args.model.startswith("tiny:")) or args.init_from:
            return []
        if args.sft_data:
            return read_demonstrations(Path(args.sft_data))
        try:
            expert_kwargs = parse_arguments(args.expert_kwargs)
        except ValueError as error:
            raise ConfigError(f"expert_kwargs: {error}") from error
        path = self.out / "demonstrations.jsonl"
        if self.accelerator.is_main_process and not (args.resume and path.exists()):
            bar = StageProgress("expert episodes", args.sft_episodes, lines=10)
            failures: list[Failure] = []
            episodes = collect_demonstrations(
                self.envs,
                args.sft_episodes,
                noise=args.sft_noise,
                seed=args.seed,
                least=args.sft_reward,
                expert_kwargs=expert_kwargs,
                prompt=self.prompt,
                retries=args.env_retries,
                failures=failures,
                progress=lambda more: bar.advance(bar.done + more),
            )
            bar.close()
            if sum(failure.dropped for failure in failures) == args.sft_episodes:
                raise TrainingFailed(
                    f"every environment of {args.env_id} failed: {described_failures(failures)} ({_SHOW_WHERE})"
                )
            if not episodes:
                raise ConfigError(f"sft_episodes: none of {args.sft_episodes} is good enough (sft_reward)")
            write_atomic(path, "".join(json.dumps(episode) + "\n" for episode in episodes).encode())
        self.accelerator.wait_for_everyone()
        return [json.loads(line) for line in path.read_text().splitlines()]

    # Playing and scoring.

    def player(self, temperature: float) -> Any:
        """Policy with the current weights for rollouts, as their driver needs it; valid until the weights change."""
        backend: Any = make_backend(
            self.args.backend,
            self.sampled(),
            stop_ids=self.chat.stop_ids,
            max_new_tokens=self.args.max_new_tokens,
            temperature=temperature,
            context_limit=self.args.context,
            entropies=self.args.schedule in BY_ENTROPY,
            sampler_logps=self.args.tis > 0,
            pinned=self.args.staleness > 0,
            fleet=None if self._servers is None else self._servers.fleet(self.policy, (self.stage, self.step)),
        )
        skip = self.args.entropy_skip
        skip = self.chat.length(self.prompt.opening) if skip is None else skip
        kind = AsyncChatPolicy if by_itself(self.args) else ChatPolicy
        return kind(backend, self.chat, prompt=self.prompt, entropy_skip=skip)

    def sampled(self) -> CausalLM:
        """The policy for sampling: itself, or a copy with weights already cast."""
        args, wanted = self.args, self.lower_once
        wanted = self.accelerator.device.type == "cuda" if wanted is None else wanted
        if not wanted or args.dtype == "float32" or args.lora_r or self.strategy.sharded or args.backend != "hf":
            return self.policy  # it computes in its own dtype, or its gathered weights are in the compute dtype
        if self._twin is None:
            self._twin = lowered_twin(self.policy, getattr(torch, args.dtype))
        else:
            refresh(self._twin, self.policy)
        return self._twin

    def evaluate(self, name: str) -> Score:
        """Play the evaluation set with the current policy and log the score under the name."""
        args = self.args
        with self.gathered():
            score = evaluate(
                self.player(args.eval_temperature),
                self.eval_envs,
                args.eval_episodes,
                seed=(args.seed, 3),
                part=(self.accelerator.process_index, self.accelerator.num_processes),
                gather=self.gather,
                overlap=args.env_overlap,
                retries=args.env_retries,
                by_itself=by_itself(args),
            )
        self.scores[name] = score
        self.log.evaluation(name, score, self.stage, self.step, self.counters)
        rest = f"mean reward {score.reward:.2f}, {score.turns:.1f} turns"
        self.say(f"evaluation {name}: success {score.rate:.1%} ({score.successes} of {score.n}), {rest}")
        return score

    def report(self) -> None:
        """Write the report of a finished run."""
        if self.accelerator.is_main_process:
            count = self.accelerator.num_processes
            write_report(self.out, self.args, self.scores, self.counters, last=self.step, processes=count)

    # Optimizer steps, over all processes.

    def accumulate(
        self, batches: Sequence[Sequence[Item]], backward: Callable[[Sequence[Item]], None], *, idle: Item
    ) -> None:
        """Backward passes of an optimizer step; see `Strategy.accumulate`."""
        self.strategy.accumulate(batches, backward, idle=idle)

    def optimizer_step(self) -> None:
        """Update the weights with the accumulated gradient.

        Raises:
            TrainingFailed: the gradient is not finite.
        """
        self.grad_norm = self.strategy.step()
        if not math.isfinite(self.grad_norm):
            raise TrainingFailed(
                f"the gradient of {self.stage} step {self.step + 1} has the norm {self.grad_norm}. The same settings "
                "end the same way: try a smaller lr, with --init-from and a new --out"
            )

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next steps."""
        self.lr = lr
        for group in self.strategy.optimizer.param_groups:
            group["lr"] = lr * group["scale"]

    def check_rolled_out(self, trees: int, failures: Sequence[Failure], ends: Mapping[str, float]) -> None:
        """Refuse a batch without usable episodes: some environments may fail and some episodes be masked, not all."""
        if self.sum(float(trees)):
            return
        if ends["masked"]:
            told = ", ".join(f"{name.replace('_', ' ')}: {ends[name]:.0f}" for name in VERDICTS)
            raise TrainingFailed(
                f"all {ends['episodes']:.0f} episodes of {self.args.env_id} ended masked ({told}): see the log"
            )
        raise TrainingFailed(f"every environment of {self.args.env_id} failed: {described_failures(failures)}")

    def sum(self, value: float) -> float:
        """Add up a number over all processes."""
        if self.accelerator.num_processes == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.accelerator.device)
        return float(self.accelerator.reduce(tensor, reduction="sum"))

    def peak_memory(self) -> float | None:
        """Most GiB that PyTorch held on any process's GPU since the last call; None without GPUs."""
        if self.accelerator.device.type != "cuda":
            return None
        bytes_held = torch.cuda.max_memory_allocated(self.accelerator.device)
        torch.cuda.reset_peak_memory_stats(self.accelerator.device)
        return float(max(self.gather([bytes_held]))) / 2**30

    def gather(self, local: list[Any]) -> list[Any]:
        """Collect the lists of all processes into one."""
        return gather_object(local) if self.accelerator.num_processes > 1 else local

    def bar(self, description: str, total: int, *, done: float = 0, lines: int | None = None) -> StageProgress:
        """Show the progress of a stage; in the first process only."""
        return StageProgress(description, total, done=done, shown=self.accelerator.is_main_process, lines=lines)

    def _take_out(self) -> None:
        """Take the folder for this run: lock it, and clear it if asked for; decide whether a run continues."""

        def take() -> str | None:
            try:
                self._lock = folder.lock(self.out)
            except ConfigError as error:
                return str(error)
            # What is there may have changed since: another process may have started in the meantime.
            if reason := folder.refusal(self.args):
                return reason
            resumed.append(self.args.resume or (self.args.resume_if_saved and folder.resumable(self.out)))
            if self.args.overwrite or (not resumed[0] and folder.holds_run(self.out)):
                folder.clear(self.out)
            elif not resumed[0]:
                shutil.rmtree(self.out / journals.FOLDER, ignore_errors=True)  # of a run that was killed at once
            (self.out / folder.STOPPED).unlink(missing_ok=True)
            return None

        resumed: list[bool] = []
        run_processes.all_refuse(self.accelerator, take)
        self.args = replace(self.args, resume=any(self.gather(resumed)))

    def say(self, text: str) -> None:
        """Print a text once, in the first process only."""
        if self.accelerator.is_main_process:
            say(text)

    def check_processes(self) -> None:
        """Check the number of processes, and what each of them would train on."""
        args, wanted = self.args, int(os.environ.get("WORLD_SIZE", "1"))
        self.strategy.check(adapters=bool(args.lora_r), critic=args.critic)
        check_processes(args, self.accelerator.num_processes, wanted=wanted, sharded=self.strategy.sharded)
