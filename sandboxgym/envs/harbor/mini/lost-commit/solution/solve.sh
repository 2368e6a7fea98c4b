#!/bin/bash
cd /app/notebook
lost=$(git reflog --format='%H %s' | grep ' Soup$' | head -n 1 | cut -d' ' -f1)
git merge "$lost" || true
printf 'bread\ncake\npudding\nsoup\n' > index.txt
git add index.txt
git commit -q -m 'Merge the soup'
