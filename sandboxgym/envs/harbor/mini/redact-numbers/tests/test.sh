#!/bin/bash
mkdir -p /logs/verifier
right=0
total=0
check() {
  total=$((total + 1))
  found=$(printf '%s\n' "$1" | timeout 20 sed -E -f /app/redact.sed 2>&1)
  if [ "$found" = "$2" ]; then right=$((right + 1)); else echo "failed: $1 -> $found, expected $2"; fi
}
check 'paid with 1234 5678 9012 3456.' 'paid with xxxx xxxx xxxx 3456.'
check '1111222233334444' 'xxxxxxxxxxxx4444'
check 'card 1111-2222-3333-4444, or 5555-6666-7777-8888!' 'card xxxx-xxxx-xxxx-4444, or xxxx-xxxx-xxxx-8888!'
check 'no 1111 2222-3333 4444' 'no 1111 2222-3333 4444'
check '11112222333344445' '11112222333344445'
check '111122223333444' '111122223333444'
check '1111 2222 3333 4444 5555' '1111 2222 3333 4444 5555'
check 'a1111222233334444b' 'axxxxxxxxxxxx4444b'
check '1234,1111222233334444,1234' '1234,xxxxxxxxxxxx4444,1234'
check 'tel 1234 5678' 'tel 1234 5678'
echo "$right of $total are right"
[ -f /app/redact.sed ] || right=0
awk -v right=$right -v total=$total 'BEGIN {print right == total ? 1 : 0}' > /logs/verifier/reward.txt
