#!/bin/bash
cat > /app/rename << 'SCRIPT'
#!/bin/bash
# rename DIRECTORY DATE: put the date in front of the name of every photograph.
directory=$1
date=$2
status=0
shopt -s nullglob
for photo in "$directory"/*.jpg; do
  name=${photo##*/}
  [[ $name == "$date "* ]] && continue
  if [ -e "$directory/$date $name" ]; then
    status=1
  else
    mv -- "$photo" "$directory/$date $name"
  fi
done
exit $status
SCRIPT
