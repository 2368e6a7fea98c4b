#!/bin/bash
mkdir -p /logs/verifier
cd /app/notebook || exit
git config --global --add safe.directory '*'
reward=1
need() { if ! eval "$2"; then echo "failed: $1"; reward=0; fi; }
need "main is checked out" '[ "$(git symbolic-ref --short HEAD)" = main ]'
need "nothing is uncommitted" '[ -z "$(git status --porcelain)" ]'
need "the index has all recipes" '[ "$(git show main:index.txt)" = "$(printf "bread\ncake\npudding\nsoup")" ]'
need "soup is there" 'git show main:soup.txt | grep -q thyme'
need "pudding is there" 'git show main:pudding.txt | grep -q rice'
need "the lost commit is in the history" 'git log --format=%s main | grep -qx Soup'
need "the other commit is too" 'git log --format=%s main | grep -qx Pudding'
echo $reward > /logs/verifier/reward.txt
