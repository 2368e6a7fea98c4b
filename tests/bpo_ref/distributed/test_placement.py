"""Memory that the processes of a run share, and files that they do not read twice."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wordgame
from checkpoints import small_checkpoint

from bpo_ref.args import Args
from bpo_ref.config import ConfigError
from bpo_ref.distributed import fsdp2
from bpo_ref.learning.checkpoint import STATE, load_checkpoint
from bpo_ref.learning.models import load_policy
from bpo_ref.running import run_processes
from bpo_ref.running.folder import appears
from bpo_ref.train import Trainer


def process_of(number: int) -> Any:
    """One of two processes, as far as the check of `out` needs one."""
    return SimpleNamespace(num_processes=2, is_main_process=number == 0, wait_for_everyone=lambda: None)


@pytest.mark.parametrize("shared", [True, False])
def test_a_folder_that_not_all_processes_see_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr(run_processes, "OUT_SECONDS", 0.3)
    (tmp_path / "main").mkdir()
    (tmp_path / "other").mkdir()
    main, other = tmp_path / "main", tmp_path / ("main" if shared else "other")
    sent: list[Any] = []
    monkeypatch.setattr(run_processes, "broadcast_object_list", lambda told: sent.extend(told) or told)
    found: list[bool] = []

    def gather(mine: list[bool]) -> list[bool]:
        """While the first process waits, the other one looks for the file, too."""
        monkeypatch.setattr(run_processes, "broadcast_object_list", lambda _: sent)
        try:
            run_processes.check_shared(other, process_of(1), lambda local: [True, *local])
        except ConfigError as error:
            assert "found" not in str(error) and "[1]" in str(error)
        found.append((other / sent[0]).exists())
        return [*mine, found[0]]

    if shared:
        run_processes.check_shared(main, process_of(0), gather)
    else:
        with pytest.raises(ConfigError, match=r"out: expected a folder that all processes share.*\[1\].*several nodes"):
            run_processes.check_shared(main, process_of(0), gather)
    assert found == [shared]
    assert not list((tmp_path / "main").iterdir()) and not list((tmp_path / "other").iterdir())


def test_a_run_looks_whether_all_processes_see_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(out: Path, *_: Any) -> None:
        assert out.is_dir()
        raise ConfigError("out: expected a folder that all processes share")

    monkeypatch.setattr(run_processes, "check_shared", blind)
    with pytest.raises(ConfigError, match=r"^out: "):
        Trainer(Args(env_id=wordgame.ENV_ID, out=str(tmp_path / "run"), sft_episodes=1, trackers=()))


def test_a_file_that_appears_late_is_waited_for(tmp_path: Path) -> None:
    later = threading.Timer(0.3, (tmp_path / "late").touch)
    later.start()
    assert appears(tmp_path / "late", seconds=30)
    later.join()
    assert not appears(tmp_path / "never", seconds=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_is_asked_for_the_optimizers_state(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The others get theirs from it; what they do not touch of a mapped file, they do not read."""
    told: list[tuple[dict[str, Any], Any]] = []
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(
        fsdp2, "set_optimizer_state_dict", lambda model, optimizer, state, options: told.append((state, options))
    )
    state = {"state": {"weight": 1}, "param_groups": []}
    fsdp2.load_optimizer_state(None, None, state)  # type: ignore[arg-type]
    ((mine, options),) = told
    assert mine == (state if rank == 0 else {})
    assert options.full_state_dict and options.broadcast_from_rank0


def test_a_checkpoint_is_mapped_and_going_on_from_it_leaves_it_as_it_is(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones(1000)
    optimizer.step()
    other = ("args", "stage", "step", "counters", "memory", "scores", "value_head", "sharded")
    torch.save({"optimizer": optimizer.state_dict(), **dict.fromkeys(other)}, tmp_path / STATE)
    before = (tmp_path / STATE).read_bytes()
    state = load_checkpoint(tmp_path)["optimizer"]
    moment = state["state"][0]["exp_avg"]
    assert moment.untyped_storage().nbytes() == 4000
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path / STATE) in maps.read_text()
    optimizer.load_state_dict(state)
    optimizer.step()
    assert not torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], torch.full((1000,), 0.1))
    assert (tmp_path / STATE).read_bytes() == before


def mapped(path: Path) -> list[range]:
    """Addresses of this process where a file is mapped."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    return [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells of memory what Linux tells")
def test_weights_in_the_type_of_their_file_are_mapped_and_not_read(tmp_path: Path) -> None:
    """So all processes of a machine start from one copy, and each reads what it keeps; another type takes a copy."""
    folder = small_checkpoint("qwen2", tmp_path / "model")
    model, _ = load_policy(folder)
    places = mapped(folder / "model.safetensors")
    strays = [name for name, p in model.named_parameters() if not any(p.data_ptr() in place for place in places)]
    assert places and not strays
    before = (folder / "model.safetensors").read_bytes()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    start = model.lm_head.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.lm_head.weight, start)
    assert (folder / "model.safetensors").read_bytes() == before
