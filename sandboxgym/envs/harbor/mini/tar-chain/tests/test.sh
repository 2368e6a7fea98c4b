#!/bin/bash
mkdir -p /logs/verifier
cd /app/restored 2> /dev/null
expected=$'./docs/four:four\n./docs/two:two again\n./keep:keep\n./src/main:version 3'
found=$([ "$PWD" = /app/restored ] && find . -type f | LC_ALL=C sort | while read -r file; do echo "$file:$(cat "$file")"; done)
echo "$found"
if [ "$found" = "$expected" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
