#!/bin/bash
mkdir -p /logs/verifier
python3 - << 'CHECK'
import urllib.request

reward = 0
try:
    with urllib.request.urlopen("http://127.0.0.1:8701/", timeout=10) as answer:
        count = answer.read().decode().strip()
    print("the count is", count)
    reward = int(count == "42")
except OSError as error:
    print("failed:", error)
with open("/logs/verifier/reward.txt", "w") as file:
    print(reward, file=file)
CHECK
