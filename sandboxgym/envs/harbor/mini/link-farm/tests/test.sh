#!/bin/bash
mkdir -p /logs/verifier
cd /app/site || exit
reward=1
need() { if [ "$2" != "$3" ]; then echo "failed: $1: expected $3, found $2"; reward=0; fi; }
need index.html "$(readlink index.html)" pages/index.html
need pages/old/style.css "$(readlink pages/old/style.css)" ../../static/style.css
need static/pages "$(readlink static/pages)" ../pages
need static/users "$(readlink static/users)" /etc/passwd
need "links without a target" "$(find . -xtype l | sort | tr '\n' ' ')" ""
need "number of links" "$(find . -type l | wc -l)" 4
need directories "$(find . -type d -not -perm 755 | tr '\n' ' ')" ""
need files "$(find . -type f -printf '%m %P\n' | sort | tr '\n' ' ')" \
  "644 pages/index.html 644 pages/old/index.html 644 static/style.css 755 bin/deploy "
need contents "$(cat pages/index.html pages/old/index.html static/style.css bin/deploy | cksum | cut -d' ' -f2)" 59
need "mode of /etc/passwd" "$(stat -c %a /etc/passwd)" 644
echo $reward > /logs/verifier/reward.txt
