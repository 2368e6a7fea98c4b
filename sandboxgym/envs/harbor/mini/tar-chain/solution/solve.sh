#!/bin/bash
mkdir -p /app/restored
cd /app/restored
for number in 001 002 003 004; do
  archive=/app/backups/$number.tar.gz
  wanted=$(grep " $number.tar.gz" /app/backups/SHA256SUMS | cut -d' ' -f1)
  if [ "$(sha256sum < "$archive" | cut -d' ' -f1)" != "$wanted" ]; then
    archive=/app/backups/spare-copy.tar.gz
  fi
  if [ -f "/app/backups/$number.deleted" ]; then
    while read -r name; do rm -f "$name"; done < "/app/backups/$number.deleted"
  fi
  tar -xzf "$archive"
done
