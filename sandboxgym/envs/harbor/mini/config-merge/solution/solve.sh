#!/bin/bash
cat > /app/merge << 'SCRIPT'
#!/usr/bin/env python3
"""merge FILE...: print merged settings."""

import json
import sys


def merged(old, new):
    if isinstance(new, dict):
        result = dict(old) if isinstance(old, dict) else {}
        for key, value in new.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merged(result.get(key), value)
        return result
    if isinstance(new, list) and new[:1] == ["+"]:
        return (old if isinstance(old, list) else []) + new[1:]
    return new


settings = {}
for name in sys.argv[1:]:
    try:
        with open(name) as file:
            layer = json.load(file)
    except (OSError, ValueError):
        layer = None
    if not isinstance(layer, dict):
        print(f"{name}: expected a JSON object", file=sys.stderr)
        sys.exit(2)
    settings = merged(settings, layer)
print(json.dumps(settings, sort_keys=True, indent=2))
SCRIPT
chmod +x /app/merge
/app/merge /app/settings/[123]0-*.json > /tmp/merged && mv /tmp/merged /app/settings/merged.json
