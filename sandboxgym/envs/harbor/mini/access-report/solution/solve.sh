#!/bin/bash
cat > /app/report << 'SCRIPT'
#!/bin/bash
# report FILE: the number of requests, the busiest address, the paths with errors.
export LC_ALL=C
requests=$(awk 'NF == 6' "$1")
echo "requests $(printf '%s\n' "$requests" | grep -c .)"
printf '%s\n' "$requests" | awk 'NF == 6 {n[$2]++} END {for (a in n) print n[a], a}' |
  sort -k1,1nr -k2,2 | awk 'NR == 1 {print "busiest", $2, $1}'
errors=$(printf '%s\n' "$requests" | awk 'NF == 6 && $5 >= 500 {sub(/[?].*/, "", $4); print $4}' | sort -u | tr '\n' ' ')
echo "errors ${errors:+${errors% }}" | sed 's/^errors $/errors none/'
SCRIPT
chmod +x /app/report
