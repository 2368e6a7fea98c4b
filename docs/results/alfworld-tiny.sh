#!/usr/bin/env bash
# The study behind alfworld-tiny.md: three seeds, each with its own supervised start, every algorithm from that start.
# Two runs at a time. Usage: docs/results/alfworld-tiny.sh [output folder]
set -euo pipefail
out="${1:-runs/study}"
python="${PYTHON:-.venv/bin/python}"
train="$python bpo_ref/train.py --config bpo_ref/configs/alfworld-tiny.yaml --eval-every 20"
algos="${ALGOS:-bpo grpo rloo}"
seeds="${SEEDS:-0 1 2}"
export OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
mkdir -p "$out"

for seed in $seeds; do
    echo "--algo sft --seed $seed --out $out/start$seed"
done | xargs -P 2 -I{} sh -c "$train {} >>$out/log.txt 2>&1"

for seed in $seeds; do
    for algo in $algos; do
        echo "--algo $algo --seed $seed --sft-steps 0 --init-from $out/start$seed/checkpoint --out $out/$algo-seed$seed"
    done
done | xargs -P 2 -I{} sh -c "$train {} >>$out/log.txt 2>&1"

$python -m bpo_ref.compare --out docs/results/alfworld-tiny $(for a in $algos; do ls -d "$out/$a"-seed*; done)
