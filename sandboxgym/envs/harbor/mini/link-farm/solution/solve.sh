#!/bin/bash
cd /app/site
find . -type l | while read -r link; do
  target=$(readlink "$link")
  case $target in
    /var/www/site/*)
      file=./${target#/var/www/site/}
      rm "$link"
      if [ -e "$file" ]; then ln -s "$(realpath -m --relative-to="$(dirname "$link")" "$file")" "$link"; fi ;;
  esac
done
find . -xtype l -delete
find . -type d -exec chmod 755 {} +
find . -type f | while read -r file; do
  if [ "$(head -c 2 "$file")" = '#!' ]; then chmod 755 "$file"; else chmod 644 "$file"; fi
done
