#!/bin/bash
# Runs the script on directories of its own.
set -u
mkdir -p /logs/verifier
points=0
fail() { echo "failed: $1"; }

one=$(mktemp -d)
echo a > "$one/sea side.jpg"; echo b > "$one/hill.jpg"; echo c > "$one/list.txt"; echo d > "$one/2020-01-02 old.jpg"
/app/rename "$one" 2020-01-02; status=$?
found=$(cd "$one" && ls | tr '\n' '|')
if [ $status -eq 0 ] && [ "$found" = "2020-01-02 hill.jpg|2020-01-02 old.jpg|2020-01-02 sea side.jpg|list.txt|" ] &&
   [ "$(cat "$one/2020-01-02 sea side.jpg")" = a ]; then points=$((points + 1)); else fail "names with spaces: $found"; fi

two=$(mktemp -d)
echo new > "$two/cat.jpg"; echo taken > "$two/2021-05-06 cat.jpg"; echo z > "$two/zoo.jpg"
/app/rename "$two" 2021-05-06; status=$?
if [ $status -eq 1 ] && [ "$(cat "$two/cat.jpg")" = new ] && [ "$(cat "$two/2021-05-06 cat.jpg")" = taken ] &&
   [ "$(cat "$two/2021-05-06 zoo.jpg")" = z ]; then points=$((points + 1)); else fail "a name that is taken"; fi

three="$(mktemp -d)/my photos"; mkdir "$three"; echo x > "$three/x.jpg"
/app/rename "$three" 2022-07-08
if [ -f "$three/2022-07-08 x.jpg" ]; then points=$((points + 1)); else fail "a directory with a space"; fi

if [ $points -eq 3 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
