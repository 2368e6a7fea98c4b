#!/bin/bash
mkdir -p /logs/verifier
reward=1
check() {
  found=$(timeout 20 /app/report "$1")
  if [ "$found" != "$2" ]; then echo "failed: expected"; echo "$2"; echo "found"; echo "$found"; reward=0; fi
}
check /app/access.log $'requests 6\nbusiest 10.0.0.9 3\nerrors /api/items /cart'
printf '%s\n' '1 b GET /x 200 1' '2 a GET /x?q 200 1' '3 a GET' > /tmp/small.log
check /tmp/small.log $'requests 2\nbusiest a 1\nerrors none'
printf '%s\n' '1 c GET /z?1 599 1' '2 c GET /z?2 500 1' '3 d GET /y 499 1' '' > /tmp/other.log
check /tmp/other.log $'requests 3\nbusiest c 2\nerrors /z'
echo $reward > /logs/verifier/reward.txt
