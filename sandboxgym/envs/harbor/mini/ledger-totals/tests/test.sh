#!/bin/bash
mkdir -p /logs/verifier
python3 - << 'CHECK'
import json

expected = {"rent": "-625.00", "food": "-19.35", "salary": "2450.50", "travel": "-0.30", "gifts": "-1000.00"}
try:
    with open("/app/totals.json") as file:
        found = json.load(file)
except (OSError, ValueError) as error:
    print("failed:", error)
    found = {}
if not isinstance(found, dict):
    found = {}
right = sum(found.get(name) == total for name, total in expected.items())
extra = len(found.keys() - expected.keys())
print(f"{right} of {len(expected)} accounts are right, {extra} do not exist")
exact = float(right == len(expected) and not extra)
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": exact, "accounts": right / len(expected)}, file)
CHECK
