#!/bin/bash
cd /app
python3 - << 'CODE'
import csv
import json
from decimal import Decimal

bookings = {}
with open("ledger.csv", newline="") as file:
    for row in csv.DictReader(file):
        bookings[row["id"]] = row
totals = {}
for row in bookings.values():
    text = row["amount"].replace(",", "").strip()
    if text:
        amount = -Decimal(text[1:-1]) if text.startswith("(") else Decimal(text)
        name = row["account"].strip().lower()
        totals[name] = totals.get(name, Decimal(0)) + amount
with open("totals.json", "w") as file:
    json.dump({name: f"{total:.2f}" for name, total in totals.items()}, file)
CODE
