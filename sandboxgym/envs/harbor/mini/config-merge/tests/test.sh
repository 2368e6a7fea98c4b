#!/bin/bash
mkdir -p /logs/verifier
python3 - << 'CHECK'
import json
import pathlib
import subprocess
import tempfile

failures = []


def merge(*contents):
    folder = pathlib.Path(tempfile.mkdtemp())
    files = []
    for number, content in enumerate(contents):
        files.append(folder / f"{number}.json")
        files[-1].write_text(content if isinstance(content, str) else json.dumps(content))
    return subprocess.run(["/app/merge", *map(str, files)], capture_output=True, text=True, timeout=30), files


def check(expected, *contents):
    try:
        done, _ = merge(*contents)
    except OSError as error:
        failures.append(f"{error}")
        return
    if done.stdout.strip() != json.dumps(expected, sort_keys=True, indent=2):
        failures.append(f"{contents}: expected {expected}, found {done.stdout!r}")


check({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, {"a": {"c": 2}})
check({"a": 3}, {"a": {"b": 1}}, {"a": 3})
check({}, {"a": {"b": 1}}, {"a": None})
check({"a": [1, 2, 3]}, {"a": [1]}, {"a": ["+", 2, 3]})
check({"a": [2]}, {}, {"a": ["+", 2]})
check({"a": [2]}, {"a": [1]}, {"a": [2]})
check({"a": {"b": {"d": []}}}, {"a": {"b": {"c": 1, "d": [0]}}}, {"a": {"b": {"c": None, "d": []}}})
try:
    done, files = merge({"a": 1}, "[1]")
    if done.returncode != 2 or done.stdout or str(files[1]) not in done.stderr:
        failures.append(f"a file that is no object: {done}")
except OSError as error:
    failures.append(f"{error}")
try:
    found = json.loads(pathlib.Path("/app/settings/merged.json").read_text())
except (OSError, ValueError) as error:
    found = str(error)
server = {"port": 8443, "hosts": ["a.example", "b.example"], "tls": {"key": "site.pem", "strict": False}}
if found != {"server": server, "paths": ["/home"], "extra": [1]}:
    failures.append(f"merged.json: found {found}")
print("\n".join(failures) or "all is right")
pathlib.Path("/logs/verifier/reward.txt").write_text(f"{int(not failures)}\n")
CHECK
