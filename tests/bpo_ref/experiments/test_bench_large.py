"""The benchmarks for GPUs run at CPU size, and compare equal work."""

from __future__ import annotations

import pytest
from fake_engine import FakeServer

from bpo_ref.experiments import bench_large
from bpo_ref.experiments.bench_large import ALL_SHAPES, BENCHES, LARGE, model_of
from bpo_ref.experiments.gpu_memory import SHAPES, shape_of


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(BENCHES) - {"trl"}))
def test_it_runs_at_a_small_size(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    bench_large.main([name, "--shape", "check", "--repeats", "1"])
    said = capsys.readouterr().out
    assert "| check |" in said and "parameters" in said
    if name == "update":
        assert float(said.rstrip(" |\n").rpartition("|")[2]) < 1e-4  # the gradients agree


def test_servers_are_measured_with_the_weights_that_they_have(capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of("check", context=64)
    with FakeServer(model) as one, FakeServer(model) as other:
        bench_large.main(["server", "--shape", "check", "--repeats", "1", "--server", one.url, other.url])
        said = capsys.readouterr().out
        assert "| check | lockstep | 8 | 2 |" in said and "| check | async | 8 | 2 |" in said
        assert len(one.requests) + len(other.requests) == 2 * 2 * 8 * 2
        other.version = "another"
        with pytest.raises(SystemExit, match="expected all of them to have the same weights"):
            bench_large.main(["server", "--shape", "check", "--server", one.url, other.url])
    with pytest.raises(SystemExit):
        bench_large.main(["server"])


@pytest.mark.slow
def test_adapters_are_updated_packed_and_flat_alike(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_large, "LARGE", 0)
    bench_large.main(["update", "--shape", "check", "--repeats", "1"])
    said = capsys.readouterr().out
    assert float(said.rstrip(" |\n").rpartition("|")[2]) < 0.1  # bf16


def test_shapes_are_those_of_the_real_models() -> None:
    assert set(SHAPES) < set(ALL_SHAPES)
    assert [name for name, shape in ALL_SHAPES.items() if shape.parameters > LARGE] == ["1B", *SHAPES]
    for name in ("check", "100M"):
        model = model_of(name, context=64)
        assert shape_of(model.config) == ALL_SHAPES[name]
        assert sum(parameter.numel() for parameter in model.parameters()) == ALL_SHAPES[name].parameters
