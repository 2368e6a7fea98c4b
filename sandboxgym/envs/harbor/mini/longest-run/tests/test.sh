#!/bin/bash
mkdir -p /logs/verifier
cd /app || exit
rm -f run
reward=1
make || reward=0
check() {
  found=$(printf "$1" | timeout 20 ./run)
  if [ "$found" != "$(printf "$2")" ]; then echo "failed: expected $2, found $found"; reward=0; fi
}
check 'aab\n' 'a 2\n'
check 'abbb\n' 'b 3\n'
check 'x\n' 'x 1\n'
found=$(printf '\nzz\n' | ./run | head -n 1)
if [ "$found" != "- 0" ]; then echo "failed: an empty line gave $found"; reward=0; fi
found=$( (head -c 5000 /dev/zero | tr '\0' q; echo rr) | ./run)
if [ "$found" != "q 5000" ]; then echo "failed: a long line gave ${found:0:20}"; reward=0; fi
check 'aabbcc' 'a 2\n'
echo $reward > /logs/verifier/reward.txt
